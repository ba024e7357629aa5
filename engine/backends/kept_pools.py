"""The index of one engine in its ranks' KV pools, from a wake to a rest: what it adopts of an
earlier engine's, and what it publishes. Shared by every backend; `engine.kv` has the rules."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Sequence

from engine.kv.adopter import Adoption, adoptable
from engine.kv.layout import IndexHeader, IndexPage
from engine.kv.writer import IndexWriter
from gms.client import ADOPTED, ADOPTING, KvLease


def page_of(lease: KvLease) -> IndexPage:
    """The index in the lease's pool. Its mapping lives until the page is released."""
    return IndexPage(memoryview(mmap.mmap(lease.index.fileno(), lease.index_bytes)))


class KeptPools:
    """The pools of `leases`, one of each rank, whose owner closes them."""

    def __init__(
        self, leases: Sequence[KvLease], headers: Sequence[IndexHeader], *, may_adopt: bool
    ) -> None:
        """Adopt or begin empty, before the first step."""
        self.leases = leases
        self._pages = [page_of(each) for each in leases]
        incarnation = leases[0].claim.incarnation
        adoption = Adoption(why_empty="adoption is off (--no-kv-adoption)")
        if may_adopt:
            adoption = adoptable(self._pages, headers, incarnation)
        if adoption.records:
            self._mark(ADOPTING)
        self.adopted, self.why_empty = adoption.records, adoption.why_empty
        cohort = secrets.token_hex(16)
        self.writer = IndexWriter(self._pages, headers, incarnation, cohort, adoption)

    def trust(self) -> None:
        """The canary has passed on what was adopted."""
        self._mark(ADOPTED)

    def distrust(self, why: str) -> None:
        """No engine after this one may believe the content."""
        self.writer.clear()
        for lease in self.leases:
            lease.discard(why)

    def close(self) -> None:
        """Leave the content to the next engine, and map the index no more. An engine that lives to
        do this has not died of what it adopted."""
        self.writer.prove()
        self.writer.close()
        for page in self._pages:
            page.release()

    def _mark(self, mark: str) -> None:
        for lease in self.leases:
            lease.mark(mark)
