"""The page that a process of a backend shares with its supervisor: early notice of its death,
before the kernel has freed its memory, and what it counts.

A pidfd becomes readable, and a connection ends, when a dying process has released its memory: after
50 to 150 ms for each 500 MB, and far more on a busy machine. A robust futex is marked before
(set_robust_list(2); `exit_mm_release` in the kernel's `do_exit`). So a process locks a robust mutex
on a page of a memfd, and its watcher sleeps in futex(2) until the kernel marks it. The notice is
not proof: the process may use its devices until its pidfd is readable.

The surprising thing: the mutex belongs to the thread that locked it, so only the main thread may,
since its end is the end of the process. The page is never unmapped: the C library keeps its
address.

A supervisor must not take an engine for hung that makes tokens but answers late, so it sees them
counted here. The process that hands tokens to clients counts each token and each step of prefill,
also of what is computed again; the one that keeps the index of KV memory counts blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import threading
from collections.abc import Callable

from engine.messages import Counts
from plumbing.errors import ProtocolError
from plumbing.wire.fds import OwnedFd

PTHREAD_PROCESS_SHARED = 1  # pthread.h
PTHREAD_MUTEX_ROBUST = 1
FUTEX_WAIT = 0  # linux/futex.h, and the bits of a robust futex
FUTEX_WAKE = 1
FUTEX_WAITERS = 0x80000000
FUTEX_OWNER_DIED = 0x40000000
FUTEX_TID_MASK = 0x3FFFFFFF
# futex(2) has no wrapper in the C library. Elsewhere there are no lifelines.
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())

# A read behind a shortened file would end the supervisor with SIGBUS.
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
COUNTS_AT = 1024  # far from the mutex; aligned, so each is written in one piece
ATTRIBUTES_BYTES = 64  # more than a pthread_mutexattr_t takes anywhere
# A timespec: how often the watching thread looks whether it is closed, should a wake-up be missed.
RECHECK = struct.pack("@ll", 5, 0)

_libc = ctypes.CDLL(None, use_errno=True)
_held: list[mmap.mmap] = []  # the pages of this process's lifelines


def hold() -> tuple[OwnedFd, Counts]:
    """This process's page, as a descriptor for its supervisor, and its counts.

    The caller owns the descriptor. It is no lifeline off the main thread, and on an unknown machine
    or C library: the death is then seen a little later, by a pidfd.

    Raises:
        OSError: there is no descriptor or memory for it.
    """
    with OwnedFd(os.memfd_create("lifeline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)) as fd:
        os.ftruncate(fd.fileno(), mmap.PAGESIZE)
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SIZE_SEALS)
        page = mmap.mmap(fd.fileno(), mmap.PAGESIZE)
        _held.append(page)
        if SYS_FUTEX is not None and threading.current_thread() is threading.main_thread():
            _lock(page)
        return fd.duplicate(), Counts.from_buffer(page, COUNTS_AT)


def _lock(page: mmap.mmap) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    attributes = ctypes.create_string_buffer(ATTRIBUTES_BYTES)
    mutex = ctypes.c_void_p(address)
    results = (
        _libc.pthread_mutexattr_init(attributes),
        _libc.pthread_mutexattr_setpshared(attributes, PTHREAD_PROCESS_SHARED),
        _libc.pthread_mutexattr_setrobust(attributes, PTHREAD_MUTEX_ROBUST),
        _libc.pthread_mutex_init(mutex, attributes),
    )
    if any(results) or _libc.pthread_mutex_lock(mutex) != 0:
        return
    word = ctypes.c_uint32.from_address(address)
    if word.value != threading.get_native_id():  # a C library with another layout
        _libc.pthread_mutex_unlock(mutex)
    else:
        word.value |= FUTEX_WAITERS  # or the kernel would wake no watcher


class LifelineWatch:
    """Calls `on_dying` once, on the loop, when the holder of a lifeline begins to die.
    `counts` are the holder's.

    Needs a thread, which sleeps: futex(2) has no descriptor that a loop could poll. Without one, as
    with a page that is no lifeline, nothing is called.
    """

    def __init__(self, lifeline: int, on_dying: Callable[[], None]) -> None:
        """`lifeline` is lent.

        Raises:
            ProtocolError: `lifeline.bad`, its size is not fixed.
            OSError: there is no descriptor or memory for it.
        """
        from asyncio import get_running_loop  # a holder of a lifeline has no loop

        self._loop = get_running_loop()
        self._on_dying = on_dying
        self._is_closed = False
        _check(lifeline)
        page = mmap.mmap(lifeline, mmap.PAGESIZE)
        self._futex = ctypes.c_uint32.from_buffer(page)
        self.counts = Counts.from_buffer(page, COUNTS_AT)
        if SYS_FUTEX is not None and self._futex.value:
            with contextlib.suppress(RuntimeError):  # no thread is left
                threading.Thread(target=self._run, name="lifeline", daemon=True).start()

    def close(self) -> None:
        """Call nothing from now on, and end the thread."""
        self._is_closed = True
        if SYS_FUTEX is not None:
            _futex(self._futex, FUTEX_WAKE, 1)

    def _run(self) -> None:
        value = self._futex.value
        while not self._is_closed and value & FUTEX_TID_MASK:
            if not _futex(self._futex, FUTEX_WAIT, value):
                return
            value = self._futex.value
        if value & FUTEX_OWNER_DIED:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        if not self._is_closed:
            self._on_dying()


def _futex(word: ctypes.c_uint32, operation: int, value: int) -> bool:
    """Whether the futex is worth reading again: False where this machine forbids the call."""
    result = _libc.syscall(
        ctypes.c_long(SYS_FUTEX or 0),
        ctypes.byref(word),
        ctypes.c_int(operation),
        ctypes.c_uint32(value),
        RECHECK if operation == FUTEX_WAIT else None,
        None,
        ctypes.c_uint32(0),
    )
    return result != -1 or ctypes.get_errno() in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)


def _check(lifeline: int) -> None:
    try:
        seals = fcntl.fcntl(lifeline, fcntl.F_GET_SEALS)
    except OSError:  # no memfd
        seals = 0
    is_fixed = seals & SIZE_SEALS == SIZE_SEALS and not seals & fcntl.F_SEAL_WRITE
    if not is_fixed or os.fstat(lifeline).st_size < mmap.PAGESIZE:
        raise ProtocolError("lifeline.bad", "a lifeline must be a page of memory of a fixed size")
