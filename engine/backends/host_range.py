"""Addresses for a KV cache on host memory, with or without memory behind them.

While parked they must not be touched: a read or write kills the process (SIGSEGV), which is better
than a standby that quietly takes memory.

The memory is the process's own, or slabs of a pool that it has borrowed. Surprising: the first is
taken by `mprotect`, not by a new mapping. Parking puts a fresh anonymous
mapping over the range, so later it is zero. And if the kernel refuses `mprotect`, the range is
unchanged, while a refused MAP_FIXED may have removed the old mapping: after one the range is parked
again.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable, Sequence

from engine.backends.process_memory import (
    RESERVE_BYTES,
    Room,
    has_room_for,
    keep_trying,
    read_room,
    resident_bytes,
)
from gms.client import Allocation, Filling
from plumbing.errors import InvariantError, UnderstudyError

logger = logging.getLogger(__name__)

# man 2 mmap; the mmap module lacks these on Python 3.11, and cannot choose an address.
PROT_NONE, MAP_FIXED, MAP_NORESERVE = 0, 0x10, 0x4000
OPEN = mmap.PROT_READ | mmap.PROT_WRITE
MAP_FAILED = ctypes.c_void_p(-1).value
PAGE_BYTES = mmap.PAGESIZE
# The alignment of huge pages. As much is reserved on both sides of a range, so that the kernel
# never merges it with another mapping, and an overrun is caught.
ALIGN_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
for _name in ("mprotect", "madvise"):
    getattr(_libc, _name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class HostRange:
    """`size_bytes` of addresses; parked (without memory) at first."""

    can_test = True  # scratch memory is all there

    def __init__(
        self, size_bytes: int, ranks: int = 1, read: Callable[[], Room] = read_room
    ) -> None:
        """`ranks` processes of this machine take a range of this size at the same time.

        Raises:
            UnderstudyError: `engine.kv_addresses`, there are not enough addresses.
        """
        self.size_bytes = size_bytes
        self.pool_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self._needed_bytes = self.pool_bytes * ranks
        self._read = read
        self._filling: Filling | None = None
        self._reserved_bytes = self.pool_bytes + 3 * ALIGN_BYTES
        self._reserved_at = self._map(None, self._reserved_bytes)
        self.address = -(-self._reserved_at // ALIGN_BYTES) * ALIGN_BYTES + ALIGN_BYTES

    def scratch(self) -> None:
        """Make all of it usable while the engine warms up; touched pages take memory."""
        if not self._open():
            raise _refused("open", self.pool_bytes)

    def park(self) -> None:
        """Release all memory and keep the addresses."""
        self._stop_filling()
        self._map(self.address, self.pool_bytes)

    def take(self, deadline_s: float) -> None:
        """Put zeroed memory behind all of a parked range, once the machine has it free.

        Raises:
            WaitTimeoutError: `engine.kv_memory_busy`; the range stays parked.
        """

        def attempt() -> int | None:
            free_bytes = self._read().free_bytes
            has_room = free_bytes >= self._needed_bytes + RESERVE_BYTES
            return None if has_room and self._open() else free_bytes

        keep_trying(attempt, self._needed_bytes, deadline_s, RESERVE_BYTES)
        # A process with small pages takes 72 ms per GiB to die, which delays the next grant.
        if _libc.madvise(self.address, self.pool_bytes, mmap.MADV_HUGEPAGE):
            logger.debug("no huge pages for the KV cache")

    def borrow(self, slabs: Sequence[Allocation], *, is_new: bool) -> None:
        """Map slabs over all of a parked range. They stay their owner's, and are zero if new.

        Raises:
            UnderstudyError: `engine.kv_addresses`; the range stays parked.
        """
        offset = 0
        try:
            for slab in slabs:
                size_bytes = min(slab.size_bytes, self.pool_bytes - offset)
                if size_bytes:
                    self._map_shared(self.address + offset, size_bytes, slab.fileno())
                offset += size_bytes
            if offset < self.pool_bytes:
                raise InvariantError(f"a pool of {offset} bytes for {self.pool_bytes}")
        except BaseException:
            self.park()
            raise
        fds, size = [slab.fileno() for slab in slabs], self.pool_bytes
        self._filling = Filling(
            self.address,
            self.pool_bytes,
            lambda huge: logger.info("%d of %d bytes of KV memory are in huge pages", huge, size),
            has_room=lambda: has_room_for(fds, self._read),
        )

    def resident_bytes(self) -> int:
        """Resident memory of the range, from the kernel. Not from smaps: to list all mappings of a
        process of vLLM takes 15 ms, of a rest that takes 5."""
        return resident_bytes(self.address, self.pool_bytes)

    def free(self) -> None:
        """Release the addresses too; idempotent."""
        self._stop_filling()
        if self.address:
            _libc.munmap(self._reserved_at, self._reserved_bytes)
            self.address = 0

    def _map(self, address: int | None, size_bytes: int) -> int:
        """Map fresh addresses without memory; at `address`, replace those there and free theirs."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        flags |= MAP_FIXED if address else 0
        mapped = _libc.mmap(address, size_bytes, PROT_NONE, flags, -1, 0)
        if mapped is None or mapped == MAP_FAILED:
            raise _refused("reserve", size_bytes)
        return int(mapped)

    def _map_shared(self, address: int, size_bytes: int, fd: int) -> None:
        mapped = _libc.mmap(address, size_bytes, OPEN, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
        if mapped is None or mapped == MAP_FAILED:
            raise _refused("map", size_bytes)
        # Where the kernel leaves that to programs (shmem_enabled).
        _libc.madvise(address, size_bytes, mmap.MADV_HUGEPAGE)

    def _stop_filling(self) -> None:
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.stop()

    def _open(self) -> bool:
        """Make the range accessible; False if a kernel that does not overcommit refuses."""
        if not _libc.mprotect(self.address, self.pool_bytes, OPEN):
            return True
        if ctypes.get_errno() != errno.ENOMEM:
            raise _refused("open", self.pool_bytes)
        return False


def _refused(what: str, size_bytes: int) -> UnderstudyError:
    number = ctypes.get_errno()
    return UnderstudyError(
        "engine.kv_addresses",
        f"the kernel refused to {what} {size_bytes} bytes of addresses for the KV cache"
        f" ({os.strerror(number)}); check `ulimit -v` and vm.overcommit_memory",
        errno=errno.errorcode.get(number, str(number)),
    )
