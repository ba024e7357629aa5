"""The machine of one device (and tag): epochs, sessions, waits. Everything legal is decided here.

Sessions (one per attached process) and epochs (generations of the device's memory) have states,
whose tables enforce themselves (`state.py`). The state that operators see (`empty`, `staging`,
`committed`, `recovering`) is derived from the epochs, never stored. After every event all waiters
are judged anew, in order of arrival, by `grants.py`.

Rules that are easy to break:
- At most one staging epoch, owned by the one writer session. Losing the writer loses only that.
- RW is granted only while no memory is mapped that no session owns. Such memory (`releasing`: given
  up by a session; `orphaned`: left by an earlier server) ends when the kernel says that the epoch's
  file is free of flocks, which the shell reports as `EpochFree`. So a device never holds two copies
  of the weights by accident, not even while a dying process lingers.
- A completion (`SlabCreated`, …) may arrive after its session has left; it is then ignored. The
  shell performs driver calls in order, so the release that follows undoes the late call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gms import messages as msg
from gms.core import events as ev
from gms.core.device import Device
from gms.core.events import Effects, EpochPhase, Mode, SessionState
from gms.core.grants import JOURNAL_RETRY_MS, Grants, Writing
from gms.core.recovery import Recovery
from gms.core.state import COMPLETIONS, HANDING_BACK, Epoch, Session
from gms.core.upkeep import Offload, Upkeep
from gms.manifest import check_identity
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError, WaitTimeoutError


class DeviceMachine:
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
        offloaded: ev.JournalRecord | None = None,
        now_ms: float = 0.0,
    ) -> None:
        """`orphans` are the epochs of earlier servers whose files exist; the shell watches each, as
        if the machine had asked for its `ReleaseEpoch`. The journalled one is `expected`.
        `is_journal_behind`: the epoch on disk is out of service, so the journal must be rewritten.
        `offloaded`: the host copy that stands for what was committed, by the journal.
        """
        self.stall_ms = stall_ms
        self.device = Device(
            capacity_bytes,
            granularity_bytes,
            orphans,
            is_journal_lost=is_journal_lost,
            offloaded=offloaded,
        )
        self.device.journal_retry_ms = now_ms if is_journal_behind else None
        self._grants = Grants(self.device, new_epoch_id)
        self._writing = Writing(self.device, self._grants, stall_ms)
        self._recovery = Recovery(self.device, now_ms)
        self._upkeep = Upkeep(self.device)
        self._offload = Offload(self.device)

    def next_deadline_ms(self) -> float | None:
        """When to send the next `DeadlinePassed`."""
        times = [s.deadline_ms for s in self.device.sessions.values()]
        times += [s.retry_ms for s in self.device.sessions.values()]
        times += [self._recovery.next_report_ms(), self._upkeep.next_deadline_ms()]
        times.append(self.device.journal_retry_ms)
        return min((t for t in times if t is not None), default=None)

    def handle(self, event: ev.DeviceEvent, now_ms: float) -> Effects:
        """Take one event and return what to do.

        Raises:
            ProtocolError, UnderstudyError: the client's fault; nothing has changed, and the shell
                answers with the error and closes the connection.
            InvariantError: ours.
        """
        effects: Effects = []
        if isinstance(event, ev.Received):
            if event.kv_bytes is not None:
                self.device.kv_bytes = event.kv_bytes
            effects += self._received(event, now_ms)
        elif not (
            isinstance(event, (*COMPLETIONS, ev.Closed))
            and event.session not in self.device.sessions
        ):
            effects += self._happened(event, now_ms)
        if isinstance(event, ev.Closed):
            effects += self._upkeep.left(event.session, now_ms)
            self._offload.left(event.session)
        effects += self._offload.judge()
        # Survivors first: newcomers wait for what they hand back.
        return effects + self._recovery.judge_all(now_ms) + self._grants.judge_all(now_ms)

    def _received(self, event: ev.Received, now_ms: float) -> Effects:
        match event.message:
            case msg.AttachMsg() as message:
                return self._attach(event, message, now_ms)
            case msg.AllocateMsg() as message:
                return self._writing.allocate(event, message, now_ms)
            case msg.ProgressMsg() as message:
                return self._writing.progress(event, message, now_ms)
            case msg.CommitMsg() as message:
                return self._writing.commit(event, message, now_ms)
            case msg.RejoinMsg() as message:
                return self._recovery.rejoin(event, message, now_ms)
            case msg.OfferMsg() as message:
                return self._recovery.offer(event, message, now_ms)
            case msg.CondemnMsg() as message:
                return self._upkeep.condemn(event, message, now_ms)
            case msg.DigestMsg() as message:
                return self._upkeep.digest(event, message, now_ms)
            case msg.DropMsg() as message:
                return self._upkeep.drop(event, message)
            case msg.VerifyMsg():
                return self._upkeep.verify(event, now_ms)
            case msg.OffloadMsg():
                return self._offload.ask(event, now_ms)
            case message:
                raise ProtocolError(
                    "gms.unexpected_message", f"clients do not send {message.TYPE!r}"
                )

    def _happened(self, event: ev.DeviceEvent, now_ms: float) -> Effects:
        match event:
            case ev.EpochOpened():
                return self._writing.epoch_opened(event, now_ms)
            case ev.SlabCreated():
                return self._writing.slab_created(event, now_ms)
            case ev.DeviceFull():
                return self._writing.device_full(event, now_ms)
            case ev.Sealed():
                return self._writing.sealed(event, now_ms)
            case ev.Journalled():
                return self._writing.journalled(event, now_ms)
            case ev.JournalFailed():
                return self._writing.journal_failed(event, now_ms)
            case ev.Adopted():
                return self._recovery.adopted(event, now_ms)
            case ev.DriverFailed():
                return self._driver_failed(event, now_ms)
            case ev.Closed():
                return self._closed(event, now_ms)
            case ev.JournalKept():
                return self._journal_kept()
            case ev.JournalBehind():
                return self._journal_behind(event, now_ms)
            case ev.EpochFree():
                return self._epoch_free(event, now_ms)
            case ev.HoldersSeen():
                return self._holders_seen(event)
            case ev.DeadlinePassed():
                return self._deadline_passed(now_ms)
            case _:
                raise InvariantError(f"{type(event).__name__} is not an event for a machine")

    # ------------------------------------------------------------------ sessions

    def _attach(self, event: ev.Received, message: msg.AttachMsg, now_ms: float) -> Effects:
        if message.mode not in list(Mode):
            known = ", ".join(Mode)
            raise ProtocolError("gms.bad_mode", f"there is no mode {message.mode!r}; use {known}")
        session = self.device.sessions.get(event.session) or Session(event.session)
        session.target(msg.AttachMsg)
        self.device.check_waiters()
        check_identity(message.identity)
        session.attach, session.pid, session.request_id = message, event.pid, event.request_id
        session.deadline_ms = now_ms + message.wait_ms
        session.move(msg.AttachMsg, now_ms)
        self.device.sessions[session.id] = session
        return []  # the grants are judged after every event

    def _closed(self, event: ev.Closed, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.Closed, now_ms)
        gone = ev.RecordEvent(
            "gms.session",
            f"{session.label} left{f': {event.reason}' if event.reason else ''}",
            {"engine": session.request.engine, "incarnation": session.request.incarnation},
        )
        return [gone, *self.device.drop(session, event.reason or "the session ended")]

    # ------------------------------------------------------------------ driver, journal and kernel

    def _journal_kept(self) -> Effects:
        self.device.journal_written()
        if not self.device.is_journal_true:
            return []
        self.device.problem = None
        return self._upkeep.journal_is_true()

    def _journal_behind(self, event: ev.JournalBehind, now_ms: float) -> Effects:
        """A retired epoch would come back with a restart: retry until it is written."""
        self.device.journal_written()
        self.device.journal_retry_ms = now_ms + JOURNAL_RETRY_MS
        problem = (
            f"the journal cannot be written, so a restart would find an old record: {event.why}"
        )
        return self.device.note_problem("gms.journal", problem)

    def _driver_failed(self, event: ev.DriverFailed, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.DriverFailed, now_ms)
        return [
            ev.RefuseRequest(session.id, session.request_id, event.error),
            *self.device.drop(session, event.error.message),
        ]

    def _epoch_free(self, event: ev.EpochFree, now_ms: float) -> Effects:
        epoch = self.device.epochs.get(event.epoch)
        if epoch is None or epoch.phase not in (EpochPhase.RELEASING, EpochPhase.ORPHANED):
            raise InvariantError(f"epoch {event.epoch} was reported as free while it is in use")
        del self.device.epochs[epoch.id]
        self.device.reclaims_total += 1
        effects: Effects = [
            ev.RecordEvent(
                "gms.reclaim",
                f"the memory of epoch {epoch.id} is free",
                {"epoch": epoch.id, "size_bytes": epoch.size_bytes},
            )
        ]
        # Without orphans no survivor can replace a lost journal any more.
        is_over = self.device.is_journal_lost and not self.device.orphans
        if is_over or (epoch.phase is EpochPhase.ORPHANED and epoch.expected is not None):
            self.device.is_journal_lost = False
            effects += self._recovery.journalled_is_gone(epoch.expected, event.copy)
        for session in list(self.device.sessions.values()):
            if session.epoch == epoch.id and session.state in HANDING_BACK:
                error = UnderstudyError(
                    "gms.stale_epoch", f"no process holds epoch {epoch.id} any more; attach again"
                )
                effects += self._grants.refuse(session, error, now_ms)
        return effects

    def _holders_seen(self, event: ev.HoldersSeen) -> Effects:
        if event.epoch in self.device.epochs:
            self.device.epochs[event.epoch].holders = event.pids
        return []

    # ------------------------------------------------------------------ time

    def _deadline_passed(self, now_ms: float) -> Effects:
        effects = self._recovery.report(now_ms) + self._upkeep.deadline_passed(now_ms)
        retry_ms = self.device.journal_retry_ms
        if retry_ms is not None and retry_ms <= now_ms:
            effects += self.device.journal()
        for session in list(self.device.sessions.values()):
            if session.retry_ms is not None and session.retry_ms <= now_ms:
                session.retry_ms = None  # the grants ask for a slab again
                if session.state is SessionState.JOURNALLING:
                    effects.append(self.device.journal_commit(session))
            if session.deadline_ms is not None and session.deadline_ms <= now_ms:
                effects += self._grants.refuse(session, self._too_late(session), now_ms)
        return effects

    def _too_late(self, session: Session) -> UnderstudyError:
        if session.state is SessionState.OFFERING:
            return WaitTimeoutError(
                "gms.offer_timeout", "the requested epoch did not arrive in time; try again"
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
            f"no progress for {self.stall_ms / 1000:g} s, so this load is given up; a writer must "
            "report progress while it reads from disk",
        )
