"""A rank's KV memory at a wake: lent by the memory service, so that it outlives the engine, or its
own.

Owns the lease and its mappings. Knows neither slots nor blocks. The surprising thing: without the
service an engine takes private memory after a moment, and so wakes, as on a disk on which the
service cannot make a pool's file; a pool that nobody maps keeps what is in it, or is gone with the
service.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os

from engine.backends import free_memory
from engine.backends.process import BackendProcess
from engine.backends.reference.link import TakeMemoryMsg
from engine.backends.session import SOCKET_DIR_ENV, host_device
from engine.kv.layout import IndexPage, index_bytes
from gms.client import BEGUN, Filling, KvClaim, KvLease, borrow_pool, has_pool_service, memory_for
from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.wire import sockets

logger = logging.getLogger(__name__)

# A service that has died is back in half a second; until then nobody serves.
AWAY_S = 2.0
NO_BLOCKS = "--cache-tokens 0: no blocks are kept"
NO_POOL_FILE = (
    "gms.pool_file"  # on a disk that is full or fails, which private memory needs none of
)
DEADLINE_S = free_memory.DEADLINE_S  # for another engine's process that still maps the pool


class PrivateMemory:
    """This process's own, with the reason in `note`."""

    lease = None

    def __init__(self, size_bytes: int, note: str) -> None:
        self._mapped = free_memory.allocate(size_bytes)
        self.view, self.note = memoryview(self._mapped), note

    def give_back(self, wait_s: float, *, is_kept: bool) -> int:
        """As `LentMemory.give_back`; nothing of it can be kept."""
        self._mapped.madvise(mmap.MADV_DONTNEED)  # not unmapped yet: nobody else can be there
        size_bytes = len(self.view)
        self.view.release()
        with contextlib.closing(self._mapped):
            start = ctypes.c_ubyte.from_buffer(self._mapped)
            resident_bytes = free_memory.resident_bytes(ctypes.addressof(start), size_bytes)
            del start
        return resident_bytes


class LentMemory:
    """The memory service's. `note` says why none of it is kept for the next engine."""

    def __init__(self, lease: KvLease, device: str, kv_bytes: int, note: str) -> None:
        """Takes `lease`, unless it raises."""
        self.lease, self.note = lease, note
        size_bytes = sum(lease.slab_sizes)
        self._mapped = memory_for(device).reserve(size_bytes)
        try:
            self._mapped.map(0, lease.slabs, writable=True)
        except BaseException:
            self._mapped.free()
            raise
        self.view = self._mapped.view(0, kv_bytes)
        fds = [slab.fileno() for slab in lease.slabs]
        self._filling = Filling(
            self._mapped.address,
            size_bytes,
            _filled,
            has_room=lambda: free_memory.has_room_for(fds),
        )
        lease.mark(BEGUN)

    def give_back(self, wait_s: float, *, is_kept: bool) -> int:
        """Unmap it, once nobody uses `view` any more; how many bytes are resident after that.

        `is_kept`: the next engine finds it. Otherwise wait until the service has freed it.

        Raises:
            UnderstudyError: as `KvLease.give_up`.
        """
        self._filling.stop()
        self._mapped.unmap()
        resident_bytes = free_memory.resident_bytes(self._mapped.address, self._mapped.size_bytes)
        self._mapped.free()
        if is_kept:
            self.lease.close()
        else:
            self.lease.give_up(wait_s)
        return resident_bytes


KvMemory = LentMemory | PrivateMemory
"""`view` is writable."""


class KvSource:
    """Borrows the pools of an engine's devices: this rank's to map it, any rank's for its index."""

    def __init__(self, member: BackendProcess, kv_bytes: int, blocks: int) -> None:
        self._member = member
        self._kv_bytes = kv_bytes
        self._blocks = blocks
        self._directory = os.environ.get(SOCKET_DIR_ENV, "")

    def memory(self, take: TakeMemoryMsg, rank: int, ranks: int, *, is_lent: bool) -> KvMemory:
        """This rank's KV memory; `is_lent`: from the memory service, if it lends any.

        Raises:
            UnderstudyError: `gms.kv_busy`, `gms.kv_stale_token`, …; `engine.kv_memory_busy`.
        """
        why = "--kv-memory private"
        if is_lent:
            device = host_device(rank)
            why = f"the memory service lends no KV memory for {device}"
            if has_pool_service(self._directory, device):
                try:
                    return self._lent(take, rank)
                except UnderstudyError as error:
                    if isinstance(error, UnreachableError):
                        why = f"no memory service: {error.message}"
                    elif error.code == NO_POOL_FILE:
                        why = error.message
                    else:
                        raise
                    logger.warning("%s; this engine takes private KV memory", why)
        free_memory.wait_for_room(self._kv_bytes * ranks)
        return PrivateMemory(self._kv_bytes, why)

    def _lent(self, take: TakeMemoryMsg, rank: int) -> LentMemory:
        lease = self.borrow(take, rank)
        note = "" if self._blocks else NO_BLOCKS
        with contextlib.ExitStack() as stack:
            stack.callback(lease.close)
            memory = LentMemory(lease, host_device(rank), self._kv_bytes, note)
            stack.pop_all()
        return memory

    def borrow(self, take: TakeMemoryMsg, rank: int) -> KvLease:
        """The pool of `rank`'s device. Raises as `memory` does, and UnreachableError."""
        claim = KvClaim(
            self._member.engine,
            self._member.incarnation,
            take.token,
            take.era,
            self._kv_bytes,
            index_bytes(self._blocks),
        )
        try:
            return self._borrow(rank, claim, AWAY_S)
        except UnreachableError:
            raise
        except UnderstudyError as error:
            if error.code != "gms.kv_busy":
                raise
            return self._borrow(rank, claim, DEADLINE_S - AWAY_S)

    def _borrow(self, rank: int, claim: KvClaim, deadline_s: float) -> KvLease:
        return borrow_pool(
            self._directory,
            host_device(rank),
            claim,
            deadline_s,
            on_wait=lambda reason: logger.info("waiting for KV memory: %s", reason),
            on_change=logger.warning,
        )


def _filled(huge_bytes: int) -> None:
    logger.info("%d bytes of KV memory are in huge pages", huge_bytes)


def page_of(lease: KvLease) -> IndexPage:
    """The index in the lease's pool. Its mapping lives until the page is released.

    Raises:
        UnreachableError: `wire.no_descriptors`.
    """
    try:
        mapping = mmap.mmap(lease.index.fileno(), lease.index_bytes)
    except OSError as error:
        raise sockets.no_descriptors("map the index of the KV memory", error) from error
    return IndexPage.over(memoryview(mapping))
