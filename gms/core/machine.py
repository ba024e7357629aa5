"""The machine of one device (and tag): epochs, sessions, waits. Everything legal is decided here.

Theory of operation. Two kinds of things have states: sessions (one per attached process) and
epochs (generations of the device's memory); their tables are in `state.py` and enforce
themselves. The state that people see (`empty`, `staging`, `committed`, `recovering`) is derived
from the epochs, never stored. After every event all waiters are judged anew, in order of arrival,
by `grants.py`.

Rules that are easy to break:
- At most one staging epoch, owned by the one writer session. Losing the writer loses only that.
- RW is granted only while no memory is mapped that nobody here owns. Such memory (`releasing`:
  given up by a session; `orphaned`: of the server before this one) ends when the kernel says that
  the epoch's file is free of flocks, which the shell reports as `EpochFree`. So a device never
  holds two copies of the weights by accident, not even for as long as a dying process lingers.
- A completion (`SlabCreated`, …) may arrive after its session has left; it then means nothing.
  The shell performs driver calls in order, so the release that follows undoes the late call.

What a writer does is `writing.py`'s, what survivors of a server's death say `recovery.py`'s, and
what happens to a committed epoch besides being read (condemned, dropped, digested, verified)
`upkeep.py`'s.

This file knows no sockets, no clock, no descriptors and no logging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gms.core import effects as fx
from gms.core import events as ev
from gms.core.device import Device
from gms.core.effects import Effect
from gms.core.events import EpochPhase, SessionState
from gms.core.grants import Grants, pending_request_id
from gms.core.identity import check_identity
from gms.core.recovery import Recovery
from gms.core.state import COMPLETIONS, HANDING_BACK, Epoch, Session
from gms.core.upkeep import Upkeep
from gms.core.writing import JOURNAL_RETRY_MS, Writing
from plumbing.errors import InvariantError, UnderstudyError, WaitTimeoutError

Effects = list[Effect]


class Machine:
    """Events in, effects out; see the head of this file."""

    def __init__(
        self,
        *,
        capacity_bytes: int,
        granularity_bytes: int,
        stall_ms: float,
        new_epoch_id: Callable[[], str],
        orphans: Iterable[Epoch] = (),
        is_journal_lost: bool = False,
        is_journal_behind: bool = False,
        now_ms: float = 0.0,
    ) -> None:
        """`orphans` are the epochs of earlier servers whose files exist; each is watched by the
        shell, as if `ReleaseEpoch` had been asked for it. The journalled one is `expected`.
        `is_journal_behind`: what is on disk is out of service, and is to be written anew."""
        self.stall_ms = stall_ms
        self.device = Device(
            capacity_bytes, granularity_bytes, orphans, is_journal_lost=is_journal_lost
        )
        self.device.journal_retry_ms = now_ms if is_journal_behind else None
        self._grants = Grants(self.device, new_epoch_id)
        self._writing = Writing(self.device, self._grants, stall_ms)
        self._recovery = Recovery(self.device, now_ms)
        self._upkeep = Upkeep(self.device)
        self._on: Mapping[type[ev.Event], Callable[[Any, float], Effects]] = {
            ev.Attach: self._attach,
            ev.Allocate: self._writing.allocate,
            ev.Progress: self._writing.progress,
            ev.Commit: self._writing.commit,
            ev.EpochOpened: self._writing.epoch_opened,
            ev.SlabCreated: self._writing.slab_created,
            ev.DeviceFull: self._writing.device_full,
            ev.Rejoin: self._recovery.rejoin,
            ev.Offer: self._recovery.offer,
            ev.Adopted: self._recovery.adopted,
            ev.Condemn: self._upkeep.condemn,
            ev.Drop: self._upkeep.drop,
            ev.Verify: self._upkeep.verify,
            ev.Digested: self._upkeep.digested,
            ev.Sealed: self._writing.sealed,
            ev.Journalled: self._writing.journalled,
            ev.JournalFailed: self._writing.journal_failed,
            ev.DriverFailed: self._driver_failed,
            ev.Closed: self._closed,
            ev.JournalKept: self._journal_kept,
            ev.JournalBehind: self._journal_behind,
            ev.EpochFree: self._epoch_free,
            ev.HoldersSeen: self._holders_seen,
            ev.Tick: self._tick,
        }

    def next_deadline_ms(self) -> float | None:
        """When to send the next `Tick`."""
        times = [s.deadline_ms for s in self.device.sessions.values()]
        times += [s.retry_ms for s in self.device.sessions.values()]
        times += [self._recovery.next_report_ms(), self._upkeep.next_deadline_ms()]
        times.append(self.device.journal_retry_ms)
        return min((t for t in times if t is not None), default=None)

    def handle(self, event: ev.Event, now_ms: float) -> Effects:
        """Take one event and say what to do.

        Raises:
            ProtocolError, UnderstudyError: the peer's fault; nothing has changed, and the shell
                answers with the error and closes the connection.
            InvariantError: ours.
        """
        handler = self._on.get(type(event))
        if handler is None:
            raise InvariantError(f"{type(event).__name__} is not an event for a machine")
        effects: Effects = []
        is_late = (
            isinstance(event, (*COMPLETIONS, ev.Closed))
            and event.session not in self.device.sessions
        )
        if not is_late:
            effects += handler(event, now_ms)
        if isinstance(event, ev.Closed):
            effects += self._upkeep.left(event.session, now_ms)
        # Survivors first: what they hand back is what newcomers wait for.
        return effects + self._recovery.settle(now_ms) + self._grants.settle(now_ms)

    # ------------------------------------------------------------------ what peers say

    def _attach(self, event: ev.Attach, now_ms: float) -> Effects:
        session = self.device.sessions.get(event.session) or Session(event.session)
        session.target(ev.Attach)
        self.device.check_waiters()
        check_identity(event.identity)
        session.attach = event
        session.deadline_ms = now_ms + event.wait_ms
        session.move(ev.Attach, now_ms)
        self.device.sessions[session.id] = session
        return []  # the grants are judged after every event

    def _closed(self, event: ev.Closed, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.Closed, now_ms)
        gone = fx.Record(
            "gms.session",
            f"{session.label} left{f': {event.reason}' if event.reason else ''}",
            {"engine": session.request.engine, "incarnation": session.request.incarnation},
        )
        return [gone, *self.device.drop(session, event.reason or "the session ended")]

    # ------------------------------------------------------------------ what the driver says

    def _journal_kept(self, event: ev.JournalKept, now_ms: float) -> Effects:
        self.device.journal_written()
        if not self.device.is_journal_true:
            return []
        self.device.problem = None
        return self._upkeep.journal_is_true()

    def _journal_behind(self, event: ev.JournalBehind, now_ms: float) -> Effects:
        """What was condemned or dropped would come back with a restart: try until it is written."""
        self.device.journal_written()
        self.device.journal_retry_ms = now_ms + JOURNAL_RETRY_MS
        told = self.device.problem
        self.device.problem = (
            "the journal cannot be written, and a restart would find what it said before: "
            f"{event.why}"
        )
        if told == self.device.problem:
            return []
        return [fx.Record("gms.journal", self.device.problem, severity="error")]

    def _driver_failed(self, event: ev.DriverFailed, now_ms: float) -> Effects:
        session = self.device.session(event)
        request_id = pending_request_id(session)
        session.move(ev.DriverFailed, now_ms)
        return [
            fx.Refuse(session.id, request_id, event.error),
            *self.device.drop(session, event.error.message),
        ]

    def _epoch_free(self, event: ev.EpochFree, now_ms: float) -> Effects:
        epoch = self.device.epochs.get(event.epoch)
        if epoch is None or epoch.phase not in (EpochPhase.RELEASING, EpochPhase.ORPHANED):
            raise InvariantError(f"epoch {event.epoch} was said to be free while it is in use")
        del self.device.epochs[epoch.id]
        self.device.reclaims_total += 1
        said = f"the memory of epoch {epoch.id} is free"
        effects: Effects = [
            fx.Record("gms.reclaim", said, {"epoch": epoch.id, "size_bytes": epoch.size_bytes})
        ]
        is_over = self.device.is_journal_lost and not self.device.orphans  # nobody can tell us more
        if is_over or (epoch.phase is EpochPhase.ORPHANED and epoch.expected is not None):
            self.device.is_journal_lost = False
            effects += self._recovery.journalled_is_gone(epoch.expected)
        for session in list(self.device.sessions.values()):
            if session.epoch == epoch.id and session.state in HANDING_BACK:
                error = UnderstudyError(
                    "gms.stale_epoch", f"nobody holds epoch {epoch.id} any more; attach again"
                )
                effects += self._grants.refuse(session, error, now_ms)
        return effects

    def _holders_seen(self, event: ev.HoldersSeen, now_ms: float) -> Effects:
        if event.epoch in self.device.epochs:
            self.device.epochs[event.epoch].holders = event.pids
        return []

    # ------------------------------------------------------------------ time

    def _tick(self, event: ev.Tick, now_ms: float) -> Effects:
        effects = self._recovery.report(now_ms) + self._upkeep.tick(now_ms)
        retry_ms = self.device.journal_retry_ms
        if retry_ms is not None and retry_ms <= now_ms:
            effects += self.device.journal()
        for session in list(self.device.sessions.values()):
            if session.retry_ms is not None and session.retry_ms <= now_ms:
                session.retry_ms = None  # a slab is asked for again by the grants
                if session.state is SessionState.JOURNALLING:
                    effects.append(self.device.journal_commit(session))
            if session.deadline_ms is not None and session.deadline_ms <= now_ms:
                effects += self._grants.refuse(session, self._too_late(session), now_ms)
        return effects

    def _too_late(self, session: Session) -> UnderstudyError:
        if session.state is SessionState.OFFERING:
            return WaitTimeoutError(
                "gms.offer_timeout", "the epoch that was asked for did not arrive in time; again"
            )
        if session.full is not None:
            return session.full
        if session.state is SessionState.REJOINING:
            return WaitTimeoutError("gms.rejoin_timeout", f"{session.reason_message}; try again")
        if session.state is SessionState.WAITING:
            return WaitTimeoutError(
                "gms.wait_timeout",
                f"waited {session.request.wait_ms / 1000:g} s for the weights: "
                f"{session.reason_message}",
                reason=session.reason,
            )
        return WaitTimeoutError(
            "gms.writer_stalled",
            f"no progress for {self.stall_ms / 1000:g} s, so what was loaded so far is given up; "
            "a writer reports progress while it reads from disk",
        )
