"""Leases: the evidence for engines on other hosts, in place of a witness and a pidfd.

A lease belongs to one incarnation, and its supervisor alone may say that it is over. It ends when
that supervisor reports the tree reaped, or when nothing was received from it for the lease's length
and a margin, counted from when the last message was *received*:

    engine:  sends ── kills its tree at 60 % ── is killed by its kernel at 80 %
    server:     receives ──────────────────────────────── length + margin ──▶ expired

The engine counts from when it sent the message, which is earlier, so the two clocks only have to
run at about the same rate (see `client/lease.py`). The surprising things:

- A lease expires in `tick` and nowhere else. After a stall of this server, every lease restarts:
  messages sent meanwhile have not been read yet, and waiting longer is the safe side.
- A lease keeps the length it was first granted for as long as its incarnation lives. A server
  restarted with a shorter `lease_ms` must not wait less than an engine was told before.
- Connections are accepted in another order than they were opened, because TLS handshakes overlap.
  So the newest message of a supervisor is the one with the largest `progress`.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from lockserver.core.events import Holder, RefuseConnection, Wanted, unlockable_witness
from lockserver.core.names import INCARNATION, WitnessState
from plumbing.text import duration

LEASE_MS = 5000.0
MARGIN_MS = 1000.0


@dataclass(slots=True)
class Lease:
    """One living incarnation of an engine on another host."""

    engine: str
    supervisor: str
    incarnation: str
    lease_ms: int
    expires_ms: float

    def left_ms(self, now_ms: float) -> float:
        return max(0.0, self.expires_ms - now_ms)


class Leases:
    """All valid leases of one server."""

    def __init__(
        self,
        now_ms: float,
        *,
        lease_ms: float = LEASE_MS,
        margin_ms: float = MARGIN_MS,
        listens: bool = False,
    ) -> None:
        """`listens`: engines may live that have not connected to this server yet."""
        self.lease_ms, self.margin_ms = round(lease_ms), margin_ms
        self.valid: dict[str, Lease] = {}  # by incarnation
        self.may_have_strangers = listens
        self.strangers_until_ms = now_ms + self._span_ms(self.lease_ms) if listens else now_ms

    def _span_ms(self, lease_ms: int) -> float:
        return lease_ms + self.margin_ms

    # ------------------------------------------------------------------ a supervisor's messages

    def presume(self, holder: Holder, now_ms: float) -> None:
        """After a restart: a holder on file may have been answered a moment ago."""
        if holder.lease_ms is not None:
            self._add(holder.engine, holder.supervisor, holder.incarnation, holder.lease_ms, now_ms)

    def refuse(self, want: Wanted, now_ms: float) -> RefuseConnection | None:
        """Why this want of an engine on another host counts for nothing, or None."""
        if want.msg.over:
            why = "over TCP an engine cannot hand a lock over in place: no file proves its end"
            return RefuseConnection(want.conn, "lock.bad_want", why)
        for lease in self.valid.values():
            is_another = lease.supervisor != want.msg.supervisor
            if is_another and lease.engine == want.msg.engine:
                left_ms = lease.left_ms(now_ms)
                why = (
                    f"another supervisor of {lease.engine} may still be alive: its lease expires in"
                    f" {duration(left_ms)} unless it is renewed; if two are running, stop one of"
                    " them, or choose another ENGINE_ID"
                )
                details = {"engine": lease.engine, "left_ms": round(left_ms)}
                return RefuseConnection(want.conn, "lock.engine_id_taken", why, details)
        return None

    def vouched(self, want: Wanted) -> Wanted:
        """`want` with its lease as evidence, which counts as much as a held witness."""
        incarnation = want.msg.incarnation
        if incarnation is None or not INCARNATION.fullmatch(incarnation):
            return want
        lease = self.valid.get(incarnation)
        return replace(
            want,
            witness_file=unlockable_witness(incarnation),
            witness_state=WitnessState.HELD,
            lease_ms=lease.lease_ms if lease is not None else self.lease_ms,
        )

    def renew(self, engine: str, supervisor: str, incarnation: str | None, now_ms: float) -> int:
        """A message of this supervisor was received now; how long its lease is, in ms. Another
        incarnation of it, which it no longer names, has been reaped."""
        for lease in self.of(supervisor):
            if lease.incarnation != incarnation:
                del self.valid[lease.incarnation]
        if incarnation is None:
            return self.lease_ms
        known = self.valid.get(incarnation)
        lease_ms = self.lease_ms if known is None else known.lease_ms
        self._add(engine, supervisor, incarnation, lease_ms, now_ms)
        return lease_ms

    def _add(
        self, engine: str, supervisor: str, incarnation: str, lease_ms: int, now_ms: float
    ) -> None:
        until_ms = now_ms + self._span_ms(lease_ms)
        self.valid[incarnation] = Lease(engine, supervisor, incarnation, lease_ms, until_ms)

    # ------------------------------------------------------------------ ending

    def tick(self, now_ms: float, *, is_stalled: bool) -> list[Lease]:
        """Let time pass; the leases that have expired. `is_stalled`: this server could not receive
        anything for a while."""
        if is_stalled:
            for lease in self.valid.values():
                lease.expires_ms = now_ms + self._span_ms(lease.lease_ms)
            if self.may_have_strangers:
                self.strangers_until_ms = now_ms + self._span_ms(self.lease_ms)
        if now_ms >= self.strangers_until_ms:
            self.may_have_strangers = False
        expired = [lease for lease in self.valid.values() if now_ms >= lease.expires_ms]
        for lease in expired:
            del self.valid[lease.incarnation]
        return expired

    # ------------------------------------------------------------------ questions

    def of(self, supervisor: str) -> list[Lease]:
        """The valid leases of one supervisor: one at most, once it has connected."""
        return [lease for lease in self.valid.values() if lease.supervisor == supervisor]

    def is_gone(self, holder: Holder) -> bool:
        """Whether no process of this holder can be alive: the counterpart of a free witness."""
        return holder.lease_ms is not None and holder.incarnation not in self.valid

    def left_ms(self, incarnation: str | None, now_ms: float) -> float | None:
        """How long this incarnation may live without another message; None: it has no lease."""
        lease = self.valid.get(incarnation or "")
        return None if lease is None else lease.left_ms(now_ms)
