"""What the drill of vLLM measures and compares by, without a vLLM: real mappings, given answers."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest

from gms.server.slab_store import KvSlabStore
from gms.vmm.host import HostMemory
from hack.drill_vllm import OPTIONS, Run
from hack.vllm.figures import Figures, cpu_percent, kv_resident, mappings, private_bytes
from hack.vllm.stock import smallest_gap
from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.config import resolve
from plumbing.wire.fds import close_all

MIB = 1 << 20
KV_BYTES = 37 * MIB  # no mapping of a fresh Python process has this size

SOUND = Figures(
    weights_committed_bytes=100 * MIB,
    weights_physical_bytes=100 * MIB,
    weights_pss_bytes=100 * MIB,
    kv_bytes=KV_BYTES,
    standby_kv_resident_bytes=0,
    active_kv_resident_bytes=MIB,
    active_pss_bytes=1000 * MIB,
    standby_pss_bytes=1000 * MIB,
    standby_worker_private_bytes=300 * MIB,
    stock_worker_private_bytes=400 * MIB,
    idle_s=300.0,
    standby_cpu_percent=1.0,
    standby_cpu_percent_by_process={},
)


def test_gap_is_the_smallest_distance_of_two_candidates():
    """Goal: prompts that rounding may change are left out. Method: both kinds of answers, and one
    without log probabilities."""
    steps = [{"a": -0.5, "b": -2.0}, {"c": -1.0, "d": -1.25}]
    assert smallest_gap({"logprobs": {"top_logprobs": steps}}) == 0.25
    chat = [{"top_logprobs": [{"logprob": value} for value in step.values()]} for step in steps]
    assert smallest_gap({"logprobs": {"content": chat}}) == 0.25
    assert smallest_gap({"logprobs": None}) == 0.0


def test_kv_cache_is_found_by_its_size_and_counted_by_its_pages():
    """Goal: what a parked engine has of it. Method: a mapping of a process that has nothing else of
    that size (this one may: a heap of glibc's is 64 MiB), untouched, then with eight pages
    written."""
    child = f"""
        import mmap
        def wait():
            print(flush=True)
            input()
        wait()
        kv = mmap.mmap(-1, {KV_BYTES}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        kv.madvise(mmap.MADV_NOHUGEPAGE)
        wait()
        kv[: 8 * mmap.PAGESIZE] = b"x" * (8 * mmap.PAGESIZE)
        wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(child)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def go_on(process=process):
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()

        process.stdout.readline()
        with pytest.raises(UnderstudyError, match="no mapping of the size"):
            kv_resident([process.pid], KV_BYTES)
        go_on()
        assert kv_resident([process.pid], KV_BYTES) == 0
        before = private_bytes([process.pid], KV_BYTES)
        go_on()
        assert kv_resident([process.pid], KV_BYTES) == 8 * mmap.PAGESIZE
        assert abs(private_bytes([process.pid], KV_BYTES) - before) < MIB


def test_kv_cache_that_is_lent_is_found_by_its_name(tmp_path):
    """Goal: the figures hold where gms owns the KV memory. Method: a process maps a real pool's
    slab, which has another size than the cache, and writes one page."""
    vault = KvSlabStore(HostMemory(), str(tmp_path), "HOST-0", None)
    vault.make("0123abcd" * 4, KV_BYTES // 2, mmap.PAGESIZE)
    index, slab = vault.export("0123abcd" * 4)
    child = f"""
        import mmap
        mapped = mmap.mmap({slab.fileno()}, {KV_BYTES // 2})
        mapped[: mmap.PAGESIZE] = b"x" * mmap.PAGESIZE
        print(flush=True)
        input()
    """
    command = [sys.executable, "-c", textwrap.dedent(child)]
    try:
        with subprocess.Popen(
            command, stdin=PIPE, stdout=PIPE, text=True, pass_fds=[slab.fileno()]
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert kv_resident([process.pid], KV_BYTES) == mmap.PAGESIZE
            process.communicate("\n")
    finally:
        close_all([index, slab])
        vault.close()


def test_memory_of_a_file_is_seen_with_its_name():
    """Goal: weights are told from the rest. Method: a memfd, mapped and written."""
    fd = os.memfd_create("understudy-test")
    os.ftruncate(fd, MIB)
    with mmap.mmap(fd, MIB) as mapped:
        mapped.write(bytes(MIB))
        (found,) = [each for each in mappings(os.getpid()) if "understudy-test" in each.path]
        assert (found.size_bytes, found.rss_bytes, found.pss_bytes) == (MIB, MIB, MIB)
    os.close(fd)


def test_cpu_of_a_process_that_waits_is_little():
    """Goal: percent of one core. Method: this process, which waits for it."""
    ((name, percent),) = asyncio.run(cpu_percent([os.getpid()], seconds=0.2)).items()
    assert name.startswith(str(os.getpid()))
    assert 0 <= percent < 100


def test_good_figures_have_no_problem_and_each_bad_one_has():
    """Goal: every promise is judged. Method: one figure at a time is otherwise."""
    assert SOUND.problems() == []
    for name, value in {
        "weights_physical_bytes": 200 * MIB,
        "weights_pss_bytes": 0,
        "standby_kv_resident_bytes": 4096,
        "standby_worker_private_bytes": 400 * MIB,
        "standby_cpu_percent": 2.5,
    }.items():
        assert len(replace(SOUND, **{name: value}).problems()) == 1, name


def run_with(*flags: str) -> Run:
    config = resolve(OPTIONS, {}, {})
    return Run(Path("/nowhere"), config, False, None, False, flags, None, lambda line: None)


def test_last_size_of_the_kv_cache_counts():
    """Goal: what is measured is what runs. Method: vLLM's flags of a user, after our own."""
    assert run_with().kv_bytes == 96 * MIB
    assert run_with("--kv-cache-memory-bytes", "1024").kv_bytes == 1024
    with pytest.raises(UsageError, match="takes bytes"):
        _ = run_with("--kv-cache-memory-bytes=1g").kv_bytes


def test_drill_of_vllm_has_its_own_defaults():
    """Goal: each process of vLLM's five times. Method: the settings without any flag."""
    config = resolve(OPTIONS, {}, {})
    assert config["kills"] == 15
    assert config["target"] == ("api", "core", "worker")
