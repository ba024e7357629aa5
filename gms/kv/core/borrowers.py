"""The sessions of a KV machine: who claims, who waits, whose token is the newest.

Pure. It decides whether a claim may wait at all; whether it is granted is `machine.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable

from gms import kv_messages as msg
from gms.core import effects as fx
from gms.core import events as device_events
from gms.core.effects import Effects
from gms.kv.core import events as ev
from gms.kv.core.events import BorrowerState, Claimant
from gms.kv.core.state import HOLDERS, KvBorrower, Pool
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError
from plumbing.text import duration

ERAS_MAX = 8  # an era ends when a lock server has lost its state; older ones are forgotten
BORROWERS_WAITING_MAX = 64  # eight engines of eight processes; more is a client in a loop


class Borrowers:
    """Every session, in order of arrival."""

    def __init__(self, newest: Iterable[Claimant]) -> None:
        self.newest = {each.era: each for each in newest}  # by era, the last that was heard last
        self.stale_refusals_total = 0
        self._all: dict[int, KvBorrower] = {}

    @property
    def waiting(self) -> list[KvBorrower]:
        return [each for each in self._all.values() if each.state is BorrowerState.WAITING]

    @property
    def leaving(self) -> list[KvBorrower]:
        """Those that wait until the memory which they gave up is free."""
        return [each for each in self._all.values() if each.state is BorrowerState.LEAVING]

    @property
    def returning(self) -> list[KvBorrower]:
        return [each for each in self._all.values() if each.state is BorrowerState.RETURNING]

    @property
    def holders(self) -> list[KvBorrower]:
        """Those whose process maps a pool, or is about to."""
        return [each for each in self._all.values() if each.state in HOLDERS]

    def holders_of(self, pool: str) -> list[KvBorrower]:
        return [each for each in self.holders if each.pool == pool]

    def get(self, event: device_events.Received) -> KvBorrower:
        """The session of `event`.

        Raises:
            ProtocolError: `gms.not_attached`.
        """
        session = self._all.get(event.session)
        if session is None:
            raise ProtocolError(
                "gms.not_attached", f"{event.message.TYPE} needs a session: borrow first"
            )
        return session

    def drop(self, session_id: int) -> KvBorrower | None:
        """Forget a session whose connection has ended."""
        return self._all.pop(session_id, None)

    def borrow(
        self, event: device_events.Received, message: msg.BorrowPoolMsg, now_ms: float
    ) -> Effects:
        """A claim: refuse it if it is stale, else let it wait to be judged."""
        session = self._all.get(event.session) or KvBorrower(event.session)
        session.target(msg.BorrowPoolMsg)
        claimant = Claimant(message.engine, message.incarnation, message.token, message.era)
        self._check_token(claimant)
        if len(self.waiting) >= BORROWERS_WAITING_MAX:
            raise UnderstudyError(
                "gms.too_many_waiters",
                f"{BORROWERS_WAITING_MAX} processes wait for this device's KV memory already, which"
                " is the limit; stop some of them and try again",
            )
        session.claim, session.pid, session.request_id = message, event.pid, event.request_id
        session.move(msg.BorrowPoolMsg, now_ms)
        session.deadline_ms = now_ms + message.wait_ms
        self._all[session.id] = session
        effects = self._heard(claimant)
        for older in self.waiting:
            error = self._stale(older.claimant)
            if error is not None:
                effects += self.refuse(older.id, error, now_ms)
        return effects

    def hand_back(
        self, event: device_events.Received, message: msg.HandBackMsg, now_ms: float
    ) -> Effects:
        """A survivor, which maps the pool whatever anybody says."""
        session = self._all.get(event.session) or KvBorrower(event.session)
        session.move(msg.HandBackMsg, now_ms)
        session.claim, session.pid, session.request_id = message, event.pid, event.request_id
        session.pool = message.pool
        self._all[session.id] = session
        return self._heard(session.claimant)

    def leave(
        self, event: device_events.Received, message: msg.GiveUpMsg, now_ms: float
    ) -> KvBorrower:
        """A holder gives its pool up. One whose token is stale may not: the pool is for the engine
        with the newer one.

        Raises:
            UnderstudyError: `gms.kv_stale_token`.
        """
        session = self.get(event)
        session.target(msg.GiveUpMsg)
        self._check_token(session.claimant)
        session.move(msg.GiveUpMsg, now_ms)
        session.request_id, session.deadline_ms = event.request_id, now_ms + message.wait_ms
        session.reason_message = "a process of this engine still maps it, or it is being freed"
        return session

    def freed(self, pool: Pool, now_ms: float) -> Effects:
        """Tell those who gave `pool` up that its memory is free."""
        effects: Effects = []
        for session in self.leaving:
            if session.pool == pool.id:
                session.move(ev.BorrowerFreed, now_ms)
                del self._all[session.id]
                answer = msg.PoolFreedMsg(pool.id, pool.memory_bytes)
                effects.append(fx.SendMessage(session.id, session.request_id, answer))
        return effects

    def wait(self, session: KvBorrower, reason: str, message: str) -> Effects:
        """Tell it why it waits, if that is news."""
        if (session.reason, session.reason_message) == (reason, message):
            return []
        session.reason, session.reason_message = reason, message
        return [fx.SendMessage(session.id, session.request_id, msg.WaitingMsg(reason, message))]

    def refuse(self, session_id: int, error: UnderstudyError, now_ms: float) -> Effects:
        """End a session that waits or returns with `error`; one that has left needs no answer."""
        session = self._all.pop(session_id, None)
        if session is None:
            return []
        session.move(ev.BorrowerRefused, now_ms)
        return [fx.RefuseRequest(session.id, session.request_id, error)]

    def end_overdue(self, now_ms: float, full: UnderstudyError | None) -> Effects:
        """Refuse whoever has waited for as long as it wanted, with the reason."""
        effects: Effects = []
        for session in (*self.waiting, *self.leaving):
            if session.deadline_ms is None:
                raise InvariantError(f"session {session.id} waits without a deadline")
            if session.deadline_ms > now_ms:
                continue
            waited = duration(now_ms - session.since_ms)
            if full is not None and session.reason == full.code:
                text = f"waited {waited}: {full.message}"
                error = UnderstudyError(full.code, text, **full.details)
            else:
                text = f"waited {waited} for the KV memory: {session.reason_message}"
                error = UnderstudyError("gms.kv_busy", text, reason=session.reason)
            effects += self.refuse(session.id, error, now_ms)
        return effects

    def _heard(self, claimant: Claimant) -> Effects:
        """Remember its token, if it is the newest of its era."""
        known = self.newest.get(claimant.era)
        if claimant.era == msg.NO_ERA or (known is not None and known.token >= claimant.token):
            return []
        self.newest.pop(claimant.era, None)
        while len(self.newest) >= ERAS_MAX:
            del self.newest[next(iter(self.newest))]
        self.newest[claimant.era] = claimant
        return [ev.KeepTokens(tuple(self.newest.values()))]

    def _check_token(self, claimant: Claimant) -> None:
        """
        Raises:
            UnderstudyError: `gms.kv_stale_token`.
        """
        error = self._stale(claimant)
        if error is not None:
            self.stale_refusals_total += 1
            raise error

    def _stale(self, claimant: Claimant) -> UnderstudyError | None:
        newest = self.newest.get(claimant.era)
        if newest is None or claimant == newest or claimant.token > newest.token:
            return None
        return UnderstudyError(
            "gms.kv_stale_token",
            f"{claimant.engine} asks for KV memory under token {claimant.token}, but"
            f" {newest.engine} has done so under token {newest.token} of the same era: it has lost"
            " the lock and must exit",
            engine=claimant.engine,
            token=claimant.token,
            newest_token=newest.token,
        )
