"""A process's own memory in huge pages, so that the kernel frees it sooner when the process dies.

No engine is granted the lock before the last process of a dead one is gone, and the kernel frees
4 KiB pages one by one. glibc's heap gets huge pages as it grows (`incarnation.py` asks for them);
the other half, most of it Python's arenas of 1 MiB, cannot. So it is moved, once: when a backend is
prepared and nobody waits for it. A process of vLLM has 430 MB of its own; to die took it 41 ms of
CPU, and takes 20.

MADV_COLLAPSE (Linux 6.1) needs no privilege, and other threads may use the memory meanwhile. What a
driver has pinned stays where it is.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.backends.free_memory import resident_pages

logger = logging.getLogger(__name__)

MADV_COLLAPSE = 25  # <asm-generic/mman-common.h>; the mmap module lacks it
HUGE_BYTES = 2 << 20
PAGES = HUGE_BYTES // mmap.PAGESIZE
# Of a huge page that many small ones must be there, for the others are taken, too: the process
# grows by a third at most, and in fact by 1 %.
PAGES_MIN = PAGES * 3 // 4
# Whoever asks for this waits for 15 s. On a busy machine it takes two, and more only where the
# kernel must make room for each huge page.
TIME_MAX_S = 5.0
STEP_BYTES = 32 * HUGE_BYTES  # between two looks at the clock: 50 ms, or 300 on a busy machine

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# What turns them off for glibc turns them off here (docs/vllm.md).
TUNABLES_ENV, NO_HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=0"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def into_huge_pages(environ: Mapping[str, str] = os.environ) -> int:
    """Move this process's own memory, as it is now; how many bytes are in huge pages after that.

    Takes up to half a second for 400 MB. Never raises: what cannot be moved is freed more slowly.
    """
    if NO_HUGE_PAGES in environ.get(TUNABLES_ENV, "") or not _are_allowed():
        return 0
    moved_bytes = 0
    end_s = time.monotonic() + TIME_MAX_S
    try:
        for at, size_bytes in _used_memory():
            if time.monotonic() > end_s:
                break
            if not _libc.madvise(at, size_bytes, MADV_COLLAPSE):
                moved_bytes += size_bytes
            elif ctypes.get_errno() == errno.ENOMEM:  # no huge page is left
                break
    except OSError as error:  # no descriptor, or another thread has unmapped something
        logger.debug("not all of this process's memory is in huge pages: %s", error)
    return moved_bytes


def _are_allowed() -> bool:
    try:
        return "[never]" not in SETTING.read_text()
    except OSError:  # a kernel without them
        return False


def _used_memory() -> Iterator[tuple[int, int]]:
    """Address and size of what is to be moved, a step at a time."""
    for first, size_bytes in list(_own_memory()):
        for at, used_bytes in _used(first, size_bytes):
            for done in range(0, used_bytes, STEP_BYTES):
                yield at + done, min(STEP_BYTES, used_bytes - done)


def _own_memory() -> Iterator[tuple[int, int]]:
    """Address and size of the whole huge pages in private, writable memory without a file."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            place, rights, _, _, inode, *name = line.split()
            if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
                start, end = (int(each, 16) for each in place.split("-"))
                first, last = -(-start // HUGE_BYTES) * HUGE_BYTES, end // HUGE_BYTES * HUGE_BYTES
                if first < last:
                    yield first, last - first


def _used(address: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """The parts of it that are used well, each as long as possible: some of the kernel's work is
    done once for each call."""
    begin, end = address, address + size_bytes
    for at in range(address, end, HUGE_BYTES):
        if resident_pages(at, HUGE_BYTES).count(1) < PAGES_MIN:
            if begin < at:
                yield begin, at - begin
            begin = at + HUGE_BYTES
    if begin < end:
        yield begin, end - begin
