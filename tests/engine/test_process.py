"""Huge pages under a backend's own memory, by what the kernel says of a real process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.backends.process_memory import into_huge_pages
from engine.backends.vllm import process_tuning
from engine.supervisor.incarnation import TUNABLES_ENV, huge_pages
from tests.helpers import until

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


# 60 MB in Python's arenas, and 16 MiB of which one page in each huge page is used.
OF_PYTHON = """
import ctypes, mmap
from engine.backends import process_memory
kept = [b""] * 600_000  # whole from the beginning: a list that grows moves, and leaves gaps
for number in range(len(kept)):
    kept[number] = b"%d" % number * 9
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
thin = mmap.mmap(-1, 8 * process_memory.HUGE_BYTES, flags=flags)
thin[:: process_memory.HUGE_BYTES] = bytes(8)
address = ctypes.addressof(ctypes.c_ubyte.from_buffer(thin))
process_memory.into_huge_pages()
assert kept == [b"%d" % number * 9 for number in range(600_000)]
assert process_memory.resident_bytes(address, len(thin)) < 4 * process_memory.HUGE_BYTES
for line in open("/proc/self/smaps_rollup"):
    if line.startswith("AnonHugePages"):
        print(line.split()[1])
"""


def is_allowed() -> bool:
    return SETTING.exists() and "[never]" not in SETTING.read_text()


def kernel() -> tuple[int, ...]:
    return tuple(int(each) for each in platform.release().split("-")[0].split(".")[:2])


def huge_kib(child: str, environ: dict[str, str]) -> int:
    done = subprocess.run(
        [sys.executable, "-c", child], env=environ, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not is_allowed(), reason="this kernel gives no transparent huge pages")
@pytest.mark.skipif(kernel() < (6, 1), reason="this kernel has no MADV_COLLAPSE")
def test_what_python_allocated_is_moved_and_what_is_hardly_used_is_not():
    """Goal: as above, of what malloc does not allocate, and the process does not grow. Method: a
    child with 600,000 small objects and a mapping of which little is used."""
    environ = {**os.environ, TUNABLES_ENV: ""}
    until(lambda: huge_kib(OF_PYTHON, environ) > 40 << 10, "most of it to be in huge pages")


def test_nothing_is_moved_where_huge_pages_are_turned_off():
    assert into_huge_pages({TUNABLES_ENV: "glibc.malloc.hugetlb=0"}) == 0


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", None),
        ("glibc.malloc.hugetlb=2:glibc.malloc.arena_max=2", None),
    ],
)
def test_what_the_user_has_tuned_stays(given: str, added: str | None):
    """Goal: no setting of theirs is lost. Method: every kind of a value."""
    environ = {TUNABLES_ENV: given} if given else {}
    wanted = {} if added is None else {TUNABLES_ENV: added}
    assert huge_pages(environ) == wanted


# ---------------------------------------------------------------------- timer slack


def slack_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(process_tuning.current_ns()))
    thread.start()
    thread.join()
    (slack_ns,) = found
    return slack_ns


def test_only_threads_that_are_started_in_the_block_may_wake_late():
    """Goal: a library's polling threads, and no others. Method: threads before, in and after."""
    before_ns = process_tuning.current_ns()
    assert slack_of_a_new_thread() == before_ns
    with process_tuning.new_threads_may_wake_late(123_000_000):
        assert slack_of_a_new_thread() == 123_000_000
    assert process_tuning.current_ns() == before_ns
    assert slack_of_a_new_thread() == before_ns
