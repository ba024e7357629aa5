"""Grants of one device: who may read, who may write, and when the next slab is made.

Pure. `settle` is called after every event and judges everything that waits, in order of arrival;
the verdicts themselves are pure functions in `decide.py` and `capacity.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from gms.core import capacity
from gms.core import effects as fx
from gms.core import events as ev
from gms.core.decide import No, Read, Wait, Write, decide
from gms.core.device import Device
from gms.core.effects import Effect
from gms.core.events import EpochPhase, SessionState
from gms.core.state import Epoch, Session
from plumbing.errors import InvariantError, UnderstudyError

Effects = list[Effect]


class Grants:
    """The verdicts on a device's waiting sessions, carried out."""

    def __init__(self, device: Device, new_epoch_id: Callable[[], str]) -> None:
        self.device = device
        self._new_epoch_id = new_epoch_id

    def settle(self, now_ms: float) -> Effects:
        """Judge everything that waits. The writer's slab first: failing it frees the way to RW."""
        effects = self._settle_allocation(now_ms)
        for session in self.device.waiting:
            verdict = decide(session.request, self.device.epochs.values(), self.device.writer)
            if isinstance(verdict, Read):
                effects += self._grant_read(session, now_ms)
            elif isinstance(verdict, Write):
                effects += self._grant_write(session, now_ms)
            elif isinstance(verdict, No):
                effects += self.refuse(session, verdict.error, now_ms)
        # Reasons last: a grant above may be what somebody earlier in the queue now waits for.
        for session in self.device.waiting:
            verdict = decide(session.request, self.device.epochs.values(), self.device.writer)
            if not isinstance(verdict, Wait):
                raise InvariantError(f"session {session.id} waits although {verdict}")
            request_id = session.request.request_id
            effects += self._tell(session, request_id, verdict.reason, verdict.message)
        return effects

    def tell_full(self, session: Session) -> Effects:
        """The driver has no memory for a slab: say who holds what of it, as far as we know."""
        if session.asked is None or session.full is None:
            raise InvariantError(f"session {session.id} is short of memory that it did not ask for")
        session.full = capacity.device_full(
            session.full,
            self.device.epochs.values(),
            self.device.sessions,
        )
        request_id, message = session.asked.request_id, session.full.message
        return self._tell(session, request_id, "device_full", message)

    def _tell(self, session: Session, request_id: int, reason: str, message: str) -> Effects:
        """Say why it waits, if that is news."""
        if message == session.reason_message:
            return []
        session.reason, session.reason_message = reason, message
        return [fx.TellWaiting(session.id, request_id, reason, message)]

    def _grant_read(self, session: Session, now_ms: float) -> Effects:
        epoch = self.device.committed
        if epoch is None:
            raise InvariantError("RO granted with nothing committed")
        session.move(ev.GrantedRead, now_ms)
        session.epoch, session.deadline_ms = epoch.id, None
        epoch.readers.add(session.id)
        self.device.exports_total += 1
        said = f"{session.label} reads epoch {epoch.id}"
        return [
            fx.TellAttached(session.id, session.request.request_id, epoch.id),
            fx.Record("gms.session", said, {"engine": session.request.engine, "epoch": epoch.id}),
        ]

    def _grant_write(self, session: Session, now_ms: float) -> Effects:
        session.move(ev.GrantedWrite, now_ms)
        epoch = Epoch(self._new_epoch_id(), EpochPhase.STAGING)
        self.device.epochs[epoch.id] = epoch
        session.epoch, session.deadline_ms = epoch.id, None
        said = f"{session.label} writes epoch {epoch.id}"
        return [
            fx.OpenEpoch(session.id, epoch.id),
            fx.Record("gms.session", said, {"engine": session.request.engine, "epoch": epoch.id}),
        ]

    def _settle_allocation(self, now_ms: float) -> Effects:
        """Issue the writer's slab once it fits; make room where that was asked for."""
        session = self.device.writer
        if session is None or session.asked is None or session.is_issued:
            return []
        if session.retry_ms is not None:
            return []  # the driver had no room a moment ago
        epoch = self.device.epoch_of(session)
        granularity = self.device.granularity_bytes
        size = -(-session.asked.size_bytes // granularity) * granularity
        fit = capacity.fit(
            size,
            self.device.epochs.values(),
            self.device.capacity_bytes,
            self.device.sessions,
            may_replace=session.request.replace,
        )
        if isinstance(fit, capacity.TooLarge):
            return self.refuse(session, fit.error, now_ms)
        if not isinstance(fit, capacity.Fits):
            # Memory that was given up is on its way; the session's deadline is running.
            self.device.oom_waits_total += not session.has_waited
            session.has_waited = True
            told = self._tell(session, session.asked.request_id, "releasing", _going(self.device))
            if isinstance(fit, capacity.FitsWithout) and self.device.committed is not None:
                return [
                    *told,
                    *self.device.retire(self.device.committed),
                    *self.device.journal(),
                ]
            return told
        session.has_waited = False
        session.is_issued, session.deadline_ms = True, None
        epoch.slab_sizes.append(size)  # counted from now on, so that nobody else is promised it
        return [fx.CreateSlab(session.id, epoch.id, size)]

    def refuse(self, session: Session, error: UnderstudyError, now_ms: float) -> Effects:
        request_id = pending_request_id(session)
        session.move(ev.Refused, now_ms)
        refused = fx.Record(
            "gms.session",
            f"{session.label} was refused: {error.message}",
            {"engine": session.request.engine, "error_code": error.code},
            severity="warning",
        )
        return [
            fx.Refuse(session.id, request_id, error),
            refused,
            *self.device.drop(session, error.message),
        ]


def _going(device: Device) -> str:
    going = [e for e in device.epochs.values() if e.is_going]
    return "room is being made: " + (
        "; ".join(f"epoch {e.id[:8]}" + "".join(f", pid {pid}" for pid in e.holders) for e in going)
        or "the epoch that is replaced is given up"
    )


def pending_request_id(session: Session) -> int:
    """The request that an error for this session answers; 0 where it asks for nothing now."""
    for request in (session.commit, session.asked, session.offer, session.rejoin):
        if request is not None and session.state is not SessionState.READING:
            return request.request_id
    is_attaching = session.state in (SessionState.WAITING, SessionState.OPENING)
    return session.request.request_id if is_attaching else 0
