"""A rank's loan of its device's KV memory.

Owns what must be true before the memory is used: its first holder zeroes a new region on a GPU. For
an engine that does not keep the index of the region, it can clear that index.
"""

from __future__ import annotations

import logging
import mmap
from typing import Any

import msgspec

from engine.kv.layout import IndexPage, index_bytes
from gms.client import BEGUN, KvClaim, KvLease, borrow_pool
from plumbing.errors import InvariantError

logger = logging.getLogger(__name__)


class Lending(msgspec.Struct, frozen=True):
    """By what right memory is borrowed: the grant of `active`, and the service's directory; and how
    long to wait for a service that does not answer."""

    directory: str
    engine: str
    incarnation: str
    token: int
    era: str
    away_s: float

    def claim(self, size_bytes: int, blocks: int, rank: int) -> KvClaim:
        """Only rank 0's pool has records; the others' have a header."""
        return KvClaim(
            self.engine,
            self.incarnation,
            self.token,
            self.era,
            size_bytes,
            index_bytes(blocks if rank == 0 else 0),
        )


class RankLease:
    """None until the wake."""

    def __init__(self) -> None:
        self._lease: KvLease | None = None

    @property
    def is_held(self) -> bool:
        return self._lease is not None

    def borrow(self, lending: Lending, device: str, claim: KvClaim, deadline_s: float) -> KvLease:
        """Raises:
        UnderstudyError: as `gms.client.borrow_pool`.
        """
        if self._lease is None:
            self._lease = borrow_pool(
                lending.directory,
                device,
                claim,
                deadline_s,
                away_s=lending.away_s,
                on_wait=logger.info,
                on_change=logger.warning,
            )
        return self._lease

    def begin(self) -> None:
        """The memory is zero or a predecessor's; from here on it is written."""
        if self._lease is not None:
            self._lease.mark(BEGUN)

    def forget(self) -> None:
        """Nothing that the index says is believed any more, until a writer begins it anew."""
        if self._lease is None:
            raise InvariantError("there is no lease")
        with mmap.mmap(self._lease.index.fileno(), self._lease.index_bytes) as memory:
            page = IndexPage.over(memoryview(memory))
            page.invalidate_header()
            page.release()

    def give_up(self, wait_s: float) -> None:
        """After everything is unmapped: return when the service has freed the memory.

        Raises:
            UnderstudyError: as `KvLease.give_up`.
        """
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.give_up(wait_s)

    def close(self) -> None:
        """After everything is unmapped; its content stays for the next holder."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()


def lending_of(asked: Any) -> Lending:
    return msgspec.convert(asked, Lending)
