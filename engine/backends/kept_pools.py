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

    def __init__(self, leases: Sequence[KvLease], headers: Sequence[IndexHeader]) -> None:
        self._leases, self._headers = leases, headers
        self._incarnation = leases[0].claim.incarnation
        self._pages = [page_of(each) for each in leases]

    def find(self, *, may_adopt: bool) -> Adoption:
        """What there is to adopt, before the first step; every pool is told."""
        if not may_adopt:
            return Adoption(why_empty="adoption is off (--no-kv-adoption)")
        found = adoptable(self._pages, self._headers, self._incarnation)
        if found.records:
            self._mark(ADOPTING)
        return found

    def writer(self, adoption: Adoption) -> IndexWriter:
        """Continues with `adoption`; one without records clears the index."""
        cohort = secrets.token_hex(16)
        return IndexWriter(self._pages, self._headers, self._incarnation, cohort, adoption)

    def trust(self) -> None:
        """The canary has passed on what was adopted."""
        self._mark(ADOPTED)

    def distrust(self, why: str) -> None:
        """No engine after this one may believe the content."""
        for lease in self._leases:
            lease.discard(why)

    def release(self) -> None:
        """Map the index no more."""
        for page in self._pages:
            page.release()

    def _mark(self, mark: str) -> None:
        for lease in self._leases:
            lease.mark(mark)
