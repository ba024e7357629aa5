"""A vLLM that loads on half of the CPUs has as many threads as one that was never limited, bound in
the same way: real processes with torch, limited as a supervisor limits them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from engine.backends.process import CPUS_ENV

ALL = sorted(os.sched_getaffinity(0))
LIMIT = ALL[-1:]
pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="one CPU cannot be halved")

# What vLLM's spawned processes run, and what they have afterwards.
COUNT = """
import importlib.util, json, multiprocessing, os, sys, threading
def counts():
    import torch
    found = [torch.get_num_threads()]
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    affinity = sorted(os.sched_getaffinity(0))  # as Python says
    with open("/proc/self/status") as stream:
        kernel = next(line.split()[1] for line in stream if line.startswith("Cpus_allowed_list"))
    print(json.dumps([found, affinity, kernel]))
if __name__ == "__main__":
    os.sched_setaffinity(0, json.loads(sys.argv[1]))
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("engine.backends.vllm.api.main")
    from tests.vllm.test_cpu_count import report
    child = multiprocessing.get_context("spawn").Process(target=report)
    child.start()
    child.join()
"""


def report() -> None:
    """In the spawned process."""
    scope: dict = {"__name__": "reporter"}
    exec(COUNT, scope)
    scope["counts"]()


def counted(limit: list[int], **environment: str) -> list:
    """torch's threads in two threads, Python's affinity, and the kernel's."""
    unset = ("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", COUNT, json.dumps(limit)],
        env={**environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list = json.loads(done.stdout)
    return found


def test_limited_process_counts_all_cpus_and_stays_limited():
    """Goal: the harm is real, and undone. Method: no limit, a limit, and the limit that says how
    many CPUs there will be."""
    threads, _, _ = counted(ALL)
    assert counted(LIMIT)[0] != threads
    told = {CPUS_ENV: ",".join(map(str, ALL))}
    assert counted(LIMIT, **told) == [threads, ALL, str(LIMIT[0])]
