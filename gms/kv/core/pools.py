"""The pools of one device: at most one that can be lent, and what earlier ones left behind.

Pure. It carries out what must not be done by halves; whether it is done is `machine.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from gms.core import effects as fx
from gms.core.effects import Effects
from gms.kv.core import events as ev
from gms.kv.core.borrowers import Borrowers
from gms.kv.core.events import Claimant, PoolPhase
from gms.kv.core.state import Pool
from plumbing.errors import InvariantError


class Pools:
    """By id; `orphans` as in `KvMachine`."""

    def __init__(self, orphans: Mapping[str, bool]) -> None:
        self.by_id = {
            each: Pool(
                each,
                PoolPhase.ORPHANED,
                has_begun=True,
                is_certain=False,
                discarded="before this server started" if is_discarded else "",
            )
            for each, is_discarded in orphans.items()
        }
        self.discards_total = self.given_up_total = self.recoveries_total = 0

    @property
    def current(self) -> Pool | None:
        """The pool that is lent, or will be."""
        phases = (PoolPhase.KEPT, PoolPhase.MAKING)
        return next((pool for pool in self.by_id.values() if pool.phase in phases), None)

    @property
    def unowned(self) -> list[Pool]:
        """The others, which must end before anything is lent or made."""
        return [pool for pool in self.by_id.values() if pool is not self.current]

    def discard(self, pool: Pool, why: str) -> Effects:
        """Never lend `pool` again; harmless to repeat."""
        if pool.phase not in (PoolPhase.KEPT, PoolPhase.ORPHANED):
            return []
        pool.discarded, pool.adopting = why, None
        if pool.phase is PoolPhase.ORPHANED:  # once it is here
            return [ev.MarkDiscarded(pool.id)]
        pool.turn("discard")
        self.discards_total += 1
        text = f"KV pool {pool.id} is discarded, and never lent again: {why}"
        record = fx.RecordEvent("gms.kv_discarded", text, {"pool": pool.id}, "warning")
        return [ev.MarkDiscarded(pool.id), record]

    def give_up(self, pool: Pool, by: Claimant) -> Effects:
        """Its engine rests: free its memory once no process maps it. One that was discarded before
        is on its way."""
        if pool.phase is not PoolPhase.KEPT:
            return []
        pool.discarded, pool.adopting = f"{by} rests", None
        pool.turn("discard")
        self.given_up_total += 1
        text = f"KV pool {pool.id} is given up: {pool.discarded}"
        data = {"pool": pool.id, "engine": by.engine, "token": by.token}
        return [ev.MarkDiscarded(pool.id), fx.RecordEvent("gms.kv_given_up", text, data)]

    def taken_back(self, pool: Pool) -> Effects:
        """The survivor that brought it may be gone again: the memory is here all the same."""
        offer = pool.offer
        if offer is None:
            raise InvariantError(f"pool {pool.id} came back without an offer")
        other = self.current
        pool.turn("recover")
        pool.returning = pool.offer = None
        pool.size_bytes, pool.index_bytes = offer.size_bytes, offer.index_bytes
        pool.slab_sizes = offer.slab_sizes
        pool.holder = Claimant(offer.engine, offer.incarnation, offer.token, offer.era)
        self.recoveries_total += 1
        text = f"KV pool {pool.id} was handed back by {pool.holder}"
        effects: Effects = [fx.RecordEvent("gms.kv_recovered", text, {"pool": pool.id})]
        if other is not None and not pool.discarded:
            pool.discarded = f"pool {other.id} has replaced it"
        return effects + (self.discard(pool, pool.discarded) if pool.discarded else [])

    def free(self, pool: Pool, *, has_holders: bool) -> Effects:
        """The kernel says that no process holds its file; a session may still be about to."""
        pool.is_watched, pool.pids = False, ()
        pool.is_free = pool.phase is PoolPhase.KEPT and not has_holders
        is_coming = pool.returning is not None or has_holders
        if is_coming or pool.phase not in (PoolPhase.DISCARDED, PoolPhase.ORPHANED):
            return []
        pool.turn("release")
        return [ev.ReleasePool(pool.id)]

    def watch(self, borrowers: Borrowers) -> Effects:
        """Ask the kernel about the files of those pools whose end, or next holder, hangs on it."""
        effects: Effects = []
        for pool in self.by_id.values():
            is_idle = not borrowers.holders_of(pool.id)
            wanted = {
                PoolPhase.ORPHANED: pool.returning is None,
                PoolPhase.DISCARDED: is_idle,
                PoolPhase.KEPT: is_idle and bool(borrowers.waiting),
            }.get(pool.phase, False)
            if wanted is not pool.is_watched:
                pool.is_watched = wanted
                effects.append(ev.WatchPool(pool.id) if wanted else ev.UnwatchPool(pool.id))
        return effects
