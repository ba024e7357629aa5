"""Leases: the evidence for process trees that this server cannot see.

A lease belongs to one incarnation of one member of an engine, and its supervisor alone may vouch
for it. It ends when its supervisor reports the tree reaped, or when nothing was received from it
for its length and a margin, counted from when the last message was *received*:

    member:  sends ── kills its tree at 60 % ── is killed by its kernel at 80 %
    server:     receives ──────────────────────────────── length + margin ──▶ expired

The member counts from when it sent the message, which is earlier, so the two clocks only have to
run at about the same rate (see `client/lease.py`). The surprising things:

- A lease expires in `tick` and nowhere else. After a stall of this server, every lease restarts:
  messages sent meanwhile have not been read yet, and waiting longer is the safe side.
- A lease keeps the length it was first granted for as long as its incarnation lives. A server
  restarted with a shorter `lease_ms` must not wait less than a member was told before.
- An incarnation that is *spent* can never be part of a group again. That is the seal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lockserver.core.events import LeaseTerms, MemberId
from lockserver.core.evidence import STALL_MS
from lockserver.core.supervisors import Locks

LEASE_MS = 5000.0
MARGIN_MS = 1000.0
SPENT_MAX = 1024  # incarnations remembered as over; older ones have been dead for long


@dataclass(slots=True)
class Lease:
    """One living incarnation of a member."""

    engine: str
    member: int
    id: MemberId
    lease_ms: int
    expires_ms: float
    claims: frozenset[str] = frozenset()  # the locks that it claimed last

    def left_ms(self, now_ms: float) -> float:
        return max(0.0, self.expires_ms - now_ms)


@dataclass(frozen=True, slots=True)
class Spent:
    """Why an incarnation is over, for its own supervisor."""

    member: int  # the one that was lost
    reason: str


class Leases:
    """All living leases of one server."""

    def __init__(
        self,
        now_ms: float,
        *,
        lease_ms: float = LEASE_MS,
        margin_ms: float = MARGIN_MS,
        listens: bool = True,
    ) -> None:
        """`listens`: whether members may exist that have not connected to this server yet."""
        self.lease_ms, self.margin_ms = round(lease_ms), margin_ms
        self.alive: dict[str, Lease] = {}  # by incarnation
        self._spent: dict[str, Spent] = {}
        self._ticked_ms = now_ms
        self.strangers_until_ms = now_ms + self._span_ms(self.lease_ms) if listens else now_ms
        self.may_have_strangers = listens

    def _span_ms(self, lease_ms: int) -> float:
        return lease_ms + self.margin_ms

    # ------------------------------------------------------------------ renewing

    def presume(self, engine: str, terms: LeaseTerms, now_ms: float) -> None:
        """After a restart: every member on file may have been answered a moment ago."""
        for member, who in enumerate(terms.members):
            until_ms = now_ms + self._span_ms(terms.lease_ms)
            self.alive[who.incarnation] = Lease(engine, member, who, terms.lease_ms, until_ms)

    def renew(
        self, engine: str, member: int, who: MemberId, claims: Iterable[str], now_ms: float
    ) -> Lease:
        """A message of this incarnation was received now."""
        lease = self.alive.get(who.incarnation)
        if lease is None:
            lease = Lease(engine, member, who, self.lease_ms, now_ms)
            self.alive[who.incarnation] = lease
        lease.expires_ms = now_ms + self._span_ms(lease.lease_ms)
        lease.claims = frozenset(claims)
        return lease

    # ------------------------------------------------------------------ ending

    def end(self, incarnation: str) -> None:
        """Its own supervisor reports it reaped."""
        self.alive.pop(incarnation, None)

    def tick(self, now_ms: float) -> list[Lease]:
        """Let time pass; the leases that have expired."""
        gap_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        if gap_ms > STALL_MS:
            self._forgive(now_ms)
        if now_ms >= self.strangers_until_ms:
            self.may_have_strangers = False
        over = [lease for lease in self.alive.values() if now_ms >= lease.expires_ms]
        for lease in over:
            del self.alive[lease.id.incarnation]
        return over

    def _forgive(self, now_ms: float) -> None:
        for lease in self.alive.values():
            lease.expires_ms = now_ms + self._span_ms(lease.lease_ms)
        if self.may_have_strangers:
            self.strangers_until_ms = now_ms + self._span_ms(self.lease_ms)

    def spend(self, incarnation: str, member: int, reason: str) -> None:
        """Never grant this incarnation anything again, however long it lives."""
        self._spent.setdefault(incarnation, Spent(member, reason))
        while len(self._spent) > SPENT_MAX:
            del self._spent[next(iter(self._spent))]

    # ------------------------------------------------------------------ questions

    def spent(self, incarnation: str | None) -> Spent | None:
        return self._spent.get(incarnation) if incarnation is not None else None

    def of(self, engine: str, member: int) -> list[Lease]:
        """The valid leases of one member: one, unless a restart found more than one on file."""
        return [
            each for each in self.alive.values() if (each.engine, each.member) == (engine, member)
        ]

    def is_whole(self, terms: LeaseTerms) -> bool:
        """Whether every member is alive, as a standby's must be."""
        return all(who.incarnation in self.alive for who in terms.members)

    def is_free(self, terms: LeaseTerms) -> bool:
        """Whether no member can be alive: the counterpart of a free witness."""
        return not any(who.incarnation in self.alive for who in terms.members)

    def seal(self, terms: LeaseTerms) -> None:
        """Found free: later messages of these incarnations do not count."""
        for member, who in enumerate(terms.members):
            self.spend(who.incarnation, member, "its lease had expired")

    def may_free_unknown(self, locks: Locks) -> bool:
        """Whether no member can hold a lock whose holder is not on file.

        One can while members may exist that have not connected since the start, or while a living
        one claims the lock.
        """
        unknown = {lock.name for lock in locks.values() if lock.is_unknown}
        claimed = any(unknown & lease.claims for lease in self.alive.values())
        return not self.may_have_strangers and not claimed

    def remaining_ms(self, terms: LeaseTerms, now_ms: float) -> Mapping[int, float]:
        """The time left by member index, of those that are alive."""
        found = ((k, self.alive.get(who.incarnation)) for k, who in enumerate(terms.members))
        return {member: lease.left_ms(now_ms) for member, lease in found if lease is not None}
