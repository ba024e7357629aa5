"""Host memory in huge pages: shared memory, to which most kernels give pages of 4 KiB only.

A process that dies unmaps its memory page by page, and no engine is granted the lock before: with
pages of 4 KiB 60 to 170 ms for each GiB of shared memory, with pages of 2 MiB a few. Whoever maps
it next also has a fault for each page that it touches.

Page faults ask `/sys/kernel/mm/transparent_hugepage/shmem_enabled`, which is `never` by default and
which only root can change. MADV_COLLAPSE (Linux 6.1) asks neither that nor for a privilege. It
works on every 2 MiB of a file of which at least one page is there, so where it fails one page of
each is touched, and it is asked again. To fill memory in this way is also cheaper than a fault for
each of its pages, and where it is in huge pages already it takes half a millisecond for a GiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable

# What the mapping, its place in the file and its size must be a multiple of.
HUGE_BYTES = 2 << 20
# Between two looks at whether to go on: 5 ms, or 150 ms in a virtual machine whose host has yet to
# find the memory.
STEP_BYTES = 32 * HUGE_BYTES
# How long a process uses a mapping before it is filled: a takeover takes a fraction of a second,
# and then come the requests that have waited for it. Filling new memory takes a core meanwhile.
AFTER_S = 2.0

# <asm-generic/mman-common.h>; the mmap module lacks both.
MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def prefer(address: int, size_bytes: int) -> None:
    """Let page faults take huge pages there, where the administrator leaves that to programs."""
    _advise(address, size_bytes, mmap.MADV_HUGEPAGE)


def fill(address: int, size_bytes: int, may_go_on: Callable[[], bool] = lambda: True) -> int:
    """Put memory behind a writable shared mapping now, in huge pages; its content stays.

    Returns how many bytes are in huge pages now: less than all where the kernel has no such pages
    left, or does not know the call. Then page faults do the rest, as ever.
    """
    first = -(-address // HUGE_BYTES) * HUGE_BYTES
    last = (address + size_bytes) // HUGE_BYTES * HUGE_BYTES
    done = first
    while done < last and may_go_on():
        step_bytes = min(STEP_BYTES, last - done)
        is_huge = _collapse(done, step_bytes)
        if not is_huge and not (_touch(done, step_bytes) and _collapse(done, step_bytes)):
            break
        done += step_bytes
    return max(0, done - first)


class Filling:
    """Fills a mapping on a thread, beside a process that uses it already and whose first requests
    come first."""

    def __init__(
        self,
        address: int,
        size_bytes: int,
        on_end: Callable[[int], None],
        *,
        has_room: Callable[[], bool] = lambda: True,
        after_s: float = AFTER_S,
    ) -> None:
        """On the thread, `has_room` is asked first whether this process may have all of it, and
        `on_end` is told how many bytes are in huge pages."""
        self._stopped = threading.Event()

        def run() -> None:
            may_fill = not self._stopped.wait(after_s) and has_room()
            on_end(fill(address, size_bytes, lambda: may_fill and not self._stopped.is_set()))

        self._thread = threading.Thread(target=run, name="huge-pages", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started: the faults do it all
            self._thread.start()

    def stop(self) -> None:
        """Before the memory is unmapped; waits for the step that is under way."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()


def _touch(address: int, size_bytes: int) -> bool:
    """One page of every huge page; nothing is written."""
    return all(
        _advise(at, mmap.PAGESIZE, MADV_POPULATE_WRITE)
        for at in range(address, address + size_bytes, HUGE_BYTES)
    )


def _collapse(address: int, size_bytes: int) -> bool:
    """Where there is a page of every huge page; the content stays."""
    return _advise(address, size_bytes, MADV_COLLAPSE)


def _advise(address: int, size_bytes: int, advice: int) -> bool:
    return not _libc.madvise(address, size_bytes, advice)
