"""A vLLM that loads on half of the CPUs counts them all: real processes with torch, limited as a
supervisor limits them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.backends.process import CPUS_ENV

# What vLLM's spawned processes run, and what they have afterwards.
SPAWN = """
import importlib.util, json, multiprocessing, os, sys
if __name__ == "__main__":
    os.sched_setaffinity(0, json.loads(sys.argv[1]))
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("engine.backends.vllm.api.main")
    from tests.vllm.test_cpu_count import report
    child = multiprocessing.get_context("spawn").Process(target=report)
    child.start()
    child.join()
"""


def report() -> None:
    """In a spawned process: torch's threads in two threads, Python's affinity, and the kernel's."""
    import threading

    import torch

    found = [torch.get_num_threads()]
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    lines = Path("/proc/self/status").read_text().splitlines()
    kernel = next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list"))
    print(json.dumps([found, sorted(os.sched_getaffinity(0)), kernel]))


def counted(limit: list[int], **environment: str) -> list:
    unset = ("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", SPAWN, json.dumps(limit)]
    env = {**environ, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found: list = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be halved")
def test_limited_process_counts_all_cpus_and_stays_limited():
    """Goal: a vLLM that loads on half of the CPUs has as many threads as one that was never
    limited. Method: no limit, a limit, and the limit that says how many CPUs there will be."""
    everyone = sorted(os.sched_getaffinity(0))
    limit = everyone[-1:]
    threads, _, _ = counted(everyone)
    assert counted(limit)[0] != threads
    told = {CPUS_ENV: ",".join(map(str, everyone))}
    assert counted(limit, **told) == [threads, everyone, str(limit[0])]
