"""Memory of a backend's process: KV memory is taken only when the machine has it free, and the
process's own memory lies in huge pages.

The second fence: a grant means that the old holder's processes are gone, and this module asks the
kernel whether their memory is, by /proc/meminfo and the limits of this process's control groups.
Without it, an overcommitting kernel hands out addresses at once and kills some process later,
perhaps the GPU memory service. What a control group counts as used includes the page cache; its
inactive part is counted as free, because the kernel reclaims it on demand.

Huge pages let a process die faster: no engine is granted the lock before the last process of a dead
one is gone, and the kernel frees 4 KiB pages one by one. glibc's heap gets huge pages as it grows
(`incarnation.py` asks for them). The other half, most of it Python's arenas of 1 MiB, is moved
once, when a backend is prepared. The death of a vLLM process with 430 MB of its own took 41 ms of
CPU without, and takes 20 ms with them. MADV_COLLAPSE (Linux 6.1) needs no privilege, other threads
may use the memory meanwhile, and what a driver has pinned stays where it is.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plumbing.errors import UsageError, WaitTimeoutError
from plumbing.text import size

logger = logging.getLogger(__name__)

# Well inside the waking budget of 60 s, so that the reason is reported before the kill comes.
DEADLINE_S = 45.0
POLL_S = 0.005  # a dying process frees about 15 GiB per second: 80 MiB in this time

# Left for the rest of the machine: page tables, sockets, the next engine's start.
RESERVE_BYTES = 64 << 20

BLOCK_BYTES = 512  # of st_blocks (man 2 stat)

_RESIDENT = bytes(page & 1 for page in range(256))  # the other bits are undefined (man 2 mincore)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are free now, the limit of what ever can be, and what sets that limit."""

    free_bytes: int
    limit_bytes: int
    limited_by: str


def read_room(root: str = "/") -> Room:
    """The tightest of the machine and every control group above this process.

    `root` is the root of the file system, so that tests can provide their own.
    """
    rooms = [_machine(root), *_control_groups(root)]
    tightest = min(rooms, key=lambda room: room.free_bytes)
    smallest = min(rooms, key=lambda room: room.limit_bytes)
    return Room(tightest.free_bytes, smallest.limit_bytes, smallest.limited_by)


def check_can_ever_fit(needed_bytes: int, room: Room, fix: str) -> None:
    """Refuse what can never fit; `fix` is the clause that names the flags to change.

    Raises:
        UsageError: `engine.kv_too_large`.
    """
    if needed_bytes + RESERVE_BYTES > room.limit_bytes:
        raise UsageError(
            "engine.kv_too_large",
            f"the KV cache needs {size(needed_bytes)} and {room.limited_by} allows"
            f" {size(room.limit_bytes)} in total; {fix}",
            needed_bytes=needed_bytes,
            limit_bytes=room.limit_bytes,
        )


def keep_trying(
    attempt: Callable[[], int | None], needed_bytes: int, deadline_s: float, reserve_bytes: int = 0
) -> None:
    """Call `attempt` until it returns None; else it returns how many bytes are free.

    `reserve_bytes` must stay free besides what is needed; it is only for the message.

    Raises:
        WaitTimeoutError: `engine.kv_memory_busy`: another process still holds it.
    """
    end = time.monotonic() + deadline_s
    is_first = True
    while (free_bytes := attempt()) is not None:
        kept = f" ({size(reserve_bytes)} are reserved)" if reserve_bytes else ""
        reason = f"the KV cache needs {size(needed_bytes)} and {size(free_bytes)} are free{kept}"
        if time.monotonic() >= end:
            raise WaitTimeoutError(
                "engine.kv_memory_busy",
                f"{reason}; waited {deadline_s:g} s for another process to free memory",
                needed_bytes=needed_bytes,
                free_bytes=free_bytes,
            )
        if is_first:
            logger.warning("%s; waiting up to %g s", reason, deadline_s)
            is_first = False
        time.sleep(POLL_S)


def has_room_for(fds: Sequence[int], read: Callable[[], Room] = read_room) -> bool:
    """Whether what is not there yet of these files of shared memory could be there at once. It
    would count against this process's control groups, which touches it first."""
    files = [os.fstat(fd) for fd in fds]
    missing_bytes = sum(file.st_size - file.st_blocks * BLOCK_BYTES for file in files)
    if missing_bytes <= 0:
        return True
    room = read()
    if missing_bytes + RESERVE_BYTES <= room.free_bytes:
        return True
    logger.warning(
        "KV memory is allocated lazily: %s are not allocated yet, but only %s are free (%s)",
        size(missing_bytes),
        size(room.free_bytes),
        room.limited_by,
    )
    return False


def resident_bytes(address: int, size_bytes: int) -> int:
    """How much of these addresses is in memory now, says the kernel.

    They must be reserved by the caller, or what another thread has mapped there meanwhile counts.
    """
    return mmap.PAGESIZE * resident_pages(address, size_bytes).count(1)


def resident_pages(address: int, size_bytes: int) -> bytes:
    """For each page of these addresses, whether it is in memory now: 1 or 0 (man 2 mincore)."""
    pages = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
    if _libc.mincore(address, size_bytes, pages):
        number = ctypes.get_errno()
        raise OSError(number, f"mincore of {size_bytes} bytes: {os.strerror(number)}")
    return bytes(pages).translate(_RESIDENT)


def _machine(root: str) -> Room:
    values = {}
    with open(os.path.join(root, "proc/meminfo"), encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
    return Room(values["MemAvailable"], values["MemTotal"], "this machine's memory")


def _control_groups(root: str) -> Iterator[Room]:
    """One room per group with a limit, from the process's own up to the root that is visible
    (Documentation/admin-guide/cgroup-v2.rst)."""
    path = _read(root, "proc/self/cgroup").rpartition("0::")[2]
    while path:
        directory = os.path.join(root, "sys/fs/cgroup", path.lstrip("/"))
        limit, used = _read(directory, "memory.max"), _read(directory, "memory.current")
        if limit.isdecimal() and used.isdecimal():  # else it has no limit, or a namespace hides it
            stat = dict(line.split() for line in _read(directory, "memory.stat").splitlines())
            free = int(limit) - int(used) + int(stat.get("inactive_file", 0))
            yield Room(max(0, free), int(limit), f"the control group {path}")
        path = os.path.dirname(path) if path != "/" else ""


def _read(directory: str, name: str) -> str:
    try:
        with open(os.path.join(directory, name), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


MADV_COLLAPSE = 25  # <asm-generic/mman-common.h>; the mmap module lacks it
HUGE_BYTES = 2 << 20
PAGES = HUGE_BYTES // mmap.PAGESIZE
# Of a huge page that many small ones must be there, for the others are taken, too: the process
# grows by a third at most, and in fact by 1 %.
PAGES_MIN = PAGES * 3 // 4
# The caller waits for 15 s. On a busy machine it takes two, and more only where the
# kernel must make room for each huge page.
TIME_MAX_S = 5.0
STEP_BYTES = 32 * HUGE_BYTES  # between two looks at the clock: 50 ms, or 300 on a busy machine

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# What turns them off for glibc turns them off here (docs/vllm.md).
TUNABLES_ENV, NO_HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=0"
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
