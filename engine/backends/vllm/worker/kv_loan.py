"""By what right a rank borrows its device's KV memory, as the API process tells it."""

from __future__ import annotations

import msgspec

from engine.kv.layout import index_bytes
from gms.client import KvClaim


class Lending(msgspec.Struct, frozen=True):
    """The grant of `active`, and the memory service's directory; and how long to wait for a service
    that does not answer."""

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
