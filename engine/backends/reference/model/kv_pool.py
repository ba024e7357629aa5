"""A rank's KV memory at a wake: lent by the memory service, so that it outlives the engine, or its
own.

Owns the lease and its mappings. Knows neither slots nor blocks. The surprising thing: without the
service an engine takes private memory after a moment, and so wakes; a pool that nobody maps keeps
what is in it, or is gone with the service.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from typing import NamedTuple

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
DEADLINE_S = free_memory.DEADLINE_S  # for another engine's process that still maps the pool


class KvMemory(NamedTuple):
    """`view` is writable. Without a `lease` it is private; `note` says why."""

    view: memoryview
    lease: KvLease | None = None
    note: str = ""


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
                except UnreachableError as error:
                    why = f"no memory service: {error.message}"
                    logger.warning("%s; this engine takes private KV memory", why)
        free_memory.wait_for_room(self._kv_bytes * ranks)
        return KvMemory(memoryview(free_memory.allocate(self._kv_bytes)), None, why)

    def _lent(self, take: TakeMemoryMsg, rank: int) -> KvMemory:
        lease = self.borrow(take, rank)
        note = "" if self._blocks else NO_BLOCKS
        with contextlib.ExitStack() as stack:
            stack.callback(lease.close)
            size_bytes = sum(lease.slab_sizes)
            mapped = memory_for(host_device(rank)).reserve(size_bytes)
            stack.callback(mapped.free)
            mapped.map(0, lease.slabs, writable=True)
            stack.pop_all()
        Filling(mapped.address, size_bytes, _filled)
        lease.mark(BEGUN)
        return KvMemory(mapped.view(0, self._kv_bytes), lease, note)

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
    """The index in the lease's pool. Its mapping lives as long as the page.

    Raises:
        UnreachableError: `wire.no_descriptors`.
    """
    try:
        mapping = mmap.mmap(lease.index.fileno(), lease.index_bytes)
    except OSError as error:
        raise sockets.no_descriptors("map the index of the KV memory", error) from error
    return IndexPage.over(memoryview(mapping))
