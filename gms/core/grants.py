"""Grants of one device: who may read, who may write, when the next slab is made; and a writer's
life.

`judge_all` is called after every event and judges everything that waits, in order of arrival.
`decide`, from a request and the epochs to a verdict, is speculative (called for every waiter at
every change), so it changes nothing. The order of its checks is the order of priorities: a
committed epoch is never doubled or lost by accident, and no session writes while memory without an
owner may still be mapped.

`Writing` leads a writer from the grant to the commit, slab by slab. Losing the writer loses its
staging epoch and nothing else; the committed epoch stays until the new one is on disk. The
surprising thing: nothing slow is done here. A slab is created when it fits; the driver's thread
checks manifests and seals memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from gms import messages as msg
from gms.core import device as capacity
from gms.core import events as ev
from gms.core.device import EPOCHS_MAX, Device, Fit
from gms.core.events import Effects, EpochPhase, Mode, SessionState
from gms.core.state import Epoch, Session
from gms.manifest import (
    SLABS_MAX,
    check_identity,
    check_size,
    first_mismatch,
    identity_hash,
    layout_hash,
)
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError
from plumbing.text import size as size_of


class GrantRead(Struct, frozen=True):
    """Grant RO on the committed epoch."""


class GrantWrite(Struct, frozen=True):
    """Grant RW: a staging epoch of its own."""


class KeepWaiting(Struct, frozen=True):
    """Not yet; `reason` is a code, `message` a sentence that names what the session waits for."""

    reason: str
    message: str


Verdict = GrantRead | GrantWrite | KeepWaiting | UnderstudyError  # an error: waiting cannot help


class Grants:
    """The verdicts on a device's waiting sessions, carried out."""

    def __init__(self, device: Device, new_epoch_id: Callable[[], str]) -> None:
        self.device = device
        self._new_epoch_id = new_epoch_id

    def judge_all(self, now_ms: float) -> Effects:
        """Judge everything that waits. The writer's slab first: refusing it may make RW free."""
        effects = self._judge_allocation(now_ms)
        for session in self.device.waiting:
            match self._verdict(session):
                case GrantRead():
                    effects += self._grant_read(session, now_ms)
                case GrantWrite():
                    effects += self._grant_write(session, now_ms)
                case UnderstudyError() as error:
                    effects += self.refuse(session, error, now_ms)
        # Reasons last: a session earlier in the queue may now wait for one that was granted above.
        for session in self.device.waiting:
            verdict = self._verdict(session)
            if not isinstance(verdict, KeepWaiting):
                raise InvariantError(f"session {session.id} waits although {verdict}")
            effects += self._send_reason(session, verdict.reason, verdict.message)
        return effects

    def _verdict(self, session: Session) -> Verdict:
        device = self.device
        return decide(session.request, device.epochs.values(), device.writer, device.offloaded)

    def send_full(self, session: Session, error: UnderstudyError) -> Effects:
        """The driver has no memory for a slab: name the holders that are known here."""
        session.full = capacity.device_full(
            error, self.device.epochs.values(), self.device.sessions, self.device.kv_bytes
        )
        return self._send_reason(session, "device_full", session.full.message)

    def _send_reason(self, session: Session, reason: str, message: str) -> Effects:
        """Send why the session waits, if that has changed."""
        if message == session.reason_message:
            return []
        session.reason, session.reason_message = reason, message
        return [ev.SendMessage(session.id, session.request_id, msg.WaitingMsg(reason, message))]

    def _grant_read(self, session: Session, now_ms: float) -> Effects:
        epoch = self.device.committed
        if epoch is None:
            raise InvariantError("RO granted with nothing committed")
        session.move(ev.GrantedRead, now_ms)
        session.epoch, session.deadline_ms = epoch.id, None
        epoch.readers.add(session.id)
        self.device.exports_total += 1
        request_id, session.request_id = session.request_id, 0
        return [ev.SendEpoch(session.id, request_id, epoch.id), _recorded(session, "reads")]

    def _grant_write(self, session: Session, now_ms: float) -> Effects:
        session.move(ev.GrantedWrite, now_ms)
        epoch = Epoch(self._new_epoch_id(), EpochPhase.STAGING)
        self.device.epochs[epoch.id] = epoch
        session.epoch, session.deadline_ms = epoch.id, None
        return [ev.OpenEpoch(session.id, epoch.id), _recorded(session, "writes")]

    def _judge_allocation(self, now_ms: float) -> Effects:
        """Issue the writer's slab once it fits; make room if the request allows it."""
        session = self.device.writer
        if session is None or session.asked_bytes is None or session.is_issued:
            return []
        if session.retry_ms is not None:
            return []  # the driver had no room a moment ago
        epoch = self.device.epoch_of(session)
        granularity = self.device.granularity_bytes
        size = -(-session.asked_bytes // granularity) * granularity
        fit = capacity.fit(
            size,
            self.device.epochs.values(),
            self.device.capacity_bytes,
            self.device.sessions,
            may_replace=session.request.replace,
            kv_bytes=self.device.kv_bytes,
        )
        if isinstance(fit, UnderstudyError):
            return self.refuse(session, fit, now_ms)
        if fit is not Fit.NOW:
            # Memory that was given up is being freed; the session's deadline is running.
            self.device.oom_waits_total += not session.has_waited
            session.has_waited = True
            effects = self._send_reason(session, "releasing", _being_freed(self.device))
            if fit is Fit.WITHOUT_COMMITTED and self.device.committed is not None:
                effects += self.device.retire(self.device.committed) + self.device.journal()
            return effects
        session.has_waited = False
        session.is_issued, session.deadline_ms = True, None
        epoch.slab_sizes.append(size)  # counted from now on, so that it is promised once
        return [ev.CreateSlab(session.id, epoch.id, size)]

    def refuse(self, session: Session, error: UnderstudyError, now_ms: float) -> Effects:
        session.move(ev.SessionRefused, now_ms)
        refused = ev.RecordEvent(
            "gms.session",
            f"{session.label} was refused: {error.message}",
            {"engine": session.request.engine, "error_code": error.code},
            severity="warning",
        )
        return [
            ev.RefuseRequest(session.id, session.request_id, error),
            refused,
            *self.device.drop(session, error.message),
        ]


def _being_freed(device: Device) -> str:
    epochs = [e for e in device.epochs.values() if e.is_being_freed]
    return (
        "memory is being freed: "
        + (
            "; ".join(
                f"epoch {e.id[:8]}" + "".join(f", pid {pid}" for pid in e.holders) for e in epochs
            )
            or "the replaced epoch is being freed"
        )
        + (f"; KV memory takes {size_of(device.kv_bytes)}" if device.kv_bytes else "")
    )


def _recorded(session: Session, verb: str) -> ev.RecordEvent:
    return ev.RecordEvent(
        "gms.session",
        f"{session.label} {verb} epoch {session.epoch}",
        {"engine": session.request.engine, "epoch": session.epoch},
    )


def decide(
    request: msg.AttachMsg,
    epochs: Iterable[Epoch],
    writer: Session | None,
    offloaded: ev.JournalRecord | None = None,
) -> Verdict:
    """The verdict on `request`, with `epochs` of the device and its one `writer`, if any;
    `offloaded`: the host copy that stands for what was committed."""
    everything = list(epochs)
    committed = next((e for e in everything if e.phase is EpochPhase.COMMITTED), None)
    if committed is None and offloaded is not None and not request.replace:
        other = _on_offloaded(request, offloaded)
        if other is not None:
            return other
    if committed is not None:
        verdict = _on_committed(request, committed)
        if verdict is not None:
            return verdict
    unowned = [epoch for epoch in everything if epoch.phase is EpochPhase.ORPHANED]
    if unowned:
        return KeepWaiting(
            "recovering",
            f"memory of the previous server is still mapped: {_holders(unowned)}; it is freed when "
            "they exit",
        )
    if writer is not None:
        return KeepWaiting("writer", f"{writer.label} is loading the weights")
    if request.mode == Mode.RO:
        if offloaded is not None:
            return KeepWaiting(
                "offloaded",
                "the weights are offloaded to host memory until an engine that may write wakes up",
            )
        return KeepWaiting("not_committed", "nothing is committed and no engine is loading")
    # A given-up epoch that a reader has come back to has an owner again (`Epoch.is_being_freed`).
    unowned = [epoch for epoch in everything if epoch.is_being_freed]
    if unowned:
        return KeepWaiting(
            "releasing", f"memory of a session that has ended is not free yet: {_holders(unowned)}"
        )
    if len(everything) >= EPOCHS_MAX:
        return KeepWaiting(
            "epochs",
            f"{len(everything)} epochs of this device are still read, which is the limit; stop the "
            "engines that read superseded ones",
        )
    return GrantWrite()


def _on_offloaded(request: msg.AttachMsg, offloaded: ev.JournalRecord) -> UnderstudyError | None:
    """The verdict where other weights are offloaded than the requested ones; None: the same."""
    if request.identity is None or identity_hash(request.identity) == offloaded.identity_hash:
        return None
    return UnderstudyError(
        "gms.identity_mismatch",
        f"the weights that are offloaded to host memory as epoch {offloaded.epoch} are not the "
        "requested ones; start every engine with the same checkpoint and settings, or ask to "
        "replace the epoch",
        epoch=offloaded.epoch,
    )


def _on_committed(request: msg.AttachMsg, committed: Epoch) -> Verdict | None:
    """The verdict where something is committed; None: the request is to replace it."""
    if request.mode == Mode.RW:
        if request.replace:
            return None
        return UnderstudyError(
            "gms.already_committed",
            f"epoch {committed.id} is committed on this device; attach with rw_or_ro to use it, or "
            "ask to replace it",
            epoch=committed.id,
        )
    if request.identity is None or committed.identity is None:
        return GrantRead()
    mismatch = first_mismatch(committed.identity, request.identity)
    if mismatch is None:
        return GrantRead()
    if request.mode == Mode.RW_OR_RO and request.replace:
        return None
    return UnderstudyError(
        "gms.identity_mismatch",
        f"the committed weights are not the requested ones: {mismatch}; start every engine with "
        "the same checkpoint and settings, or ask to replace the epoch",
        epoch=committed.id,
        field=mismatch.field,
        expected=mismatch.expected,
        offered=mismatch.offered,
    )


def _holders(epochs: Sequence[Epoch]) -> str:
    parts = []
    for epoch in epochs:
        pids = ", ".join(f"pid {pid}" for pid in epoch.holders)
        parts.append(f"epoch {epoch.id}" + (f" by {pids}" if pids else ""))
    return "; ".join(parts)


# A full device has room again when a dead process has been reaped, which takes seconds if it had
# pinned memory; the driver does not report that, so the call is retried.
DEVICE_FULL_RETRY_MS = 250
DEVICE_FULL_WAIT_MS = 60_000.0
JOURNAL_RETRY_MS = 1000  # operators fix a full disk; once a second is soon enough


class Writing:
    """The requests of a device's writer session, and the driver's completions for it."""

    def __init__(self, device: Device, grants: Grants, stall_ms: float) -> None:
        self.device = device
        self._grants = grants
        self.stall_ms = stall_ms

    def allocate(self, event: ev.Received, message: msg.AllocateMsg, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.target(msg.AllocateMsg)
        if len(self.device.epoch_of(session).slab_sizes) >= SLABS_MAX:
            raise ProtocolError(
                "gms.too_many_slabs",
                f"this epoch has {SLABS_MAX} slabs, which is the limit; use larger ones",
            )
        session.move(msg.AllocateMsg, now_ms)
        session.request_id = event.request_id
        session.asked_bytes, session.is_issued = message.size_bytes, False
        session.deadline_ms = now_ms + self.stall_ms
        return []  # the grants create it as soon as it fits

    def progress(self, event: ev.Received, message: msg.ProgressMsg, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(msg.ProgressMsg, now_ms)
        if message.done_bytes > session.done_bytes:  # repeating a figure is not progress
            session.done_bytes = message.done_bytes
            if session.state is SessionState.WRITING:  # else the writer waits for us
                session.deadline_ms = now_ms + self.stall_ms
        session.total_bytes = message.total_bytes
        return []

    def commit(self, event: ev.Received, message: msg.CommitMsg, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.target(msg.CommitMsg)
        epoch = self.device.epoch_of(session)
        check_identity(message.identity)
        check_size(message.manifest)
        computed = layout_hash(epoch.slab_sizes, message.manifest)
        if message.layout_hash != computed:
            raise ProtocolError(
                "gms.layout_mismatch",
                f"the writer's layout hash is {message.layout_hash[:16]} and the server's is "
                f"{computed[:16]}: they do not describe the same memory",
            )
        if message.restaged_from is not None:
            self._check_restage(message)
        announced = session.request.identity
        if announced is not None:
            changed = first_mismatch(announced, message.identity)
            if changed is not None:
                raise UnderstudyError(
                    "gms.identity_changed",
                    f"the checkpoint changed while it was being loaded: {changed}; load it again",
                    field=changed.field,
                )
        session.move(msg.CommitMsg, now_ms)
        session.request_id, session.deadline_ms = event.request_id, None
        epoch.manifest, epoch.layout_hash = message.manifest, computed
        epoch.identity = dict(message.identity)
        session.is_restaging = message.restaged_from is not None
        if session.is_restaging and self.device.offloaded is not None:
            epoch.digest = self.device.offloaded.digest
        return [ev.SealEpoch(session.id, epoch.id, message.manifest)]

    def _check_restage(self, message: msg.CommitMsg) -> None:
        """What is committed must be the host copy that stands for this device's weights.

        Raises:
            UnderstudyError: `gms.stale_copy`.
        """
        copy = self.device.offloaded
        offered = (message.restaged_from, message.layout_hash, identity_hash(message.identity))
        if copy is None or offered != (copy.epoch, copy.layout_hash, copy.identity_hash):
            raise UnderstudyError(
                "gms.stale_copy",
                f"the host copy {message.restaged_from} does not match the weights of this "
                "device; load them again",
            )

    # ------------------------------------------------------------------ completions

    def epoch_opened(self, event: ev.EpochOpened, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.EpochOpened, now_ms)
        session.deadline_ms = now_ms + self.stall_ms
        request_id, session.request_id = session.request_id, 0
        copy = self.device.offloaded  # of the requested identity, or it would not be granted
        is_wanted = copy is not None and not session.request.replace
        offered = copy.epoch if copy is not None and is_wanted else None
        return [ev.GrantWriting(session.id, request_id, str(session.epoch), offered)]

    def slab_created(self, event: ev.SlabCreated, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.SlabCreated, now_ms)
        request_id, session.request_id = session.request_id, 0
        session.asked_bytes = session.full = session.full_since_ms = None
        session.deadline_ms = now_ms + self.stall_ms
        session.reason = session.reason_message = ""
        sizes = self.device.epoch_of(session).slab_sizes
        return [ev.SendMessage(session.id, request_id, msg.AllocatedMsg(len(sizes) - 1, sizes[-1]))]

    def device_full(self, event: ev.DeviceFull, now_ms: float) -> Effects:
        """The driver has less memory than we counted: another program uses it. Wait, and say so."""
        session = self.device.session(event)
        session.move(ev.DeviceFull, now_ms)
        self.device.epoch_of(session).slab_sizes.pop()
        if session.full_since_ms is None:
            session.full_since_ms = now_ms
            self.device.oom_waits_total += 1
        session.is_issued = False
        session.retry_ms = now_ms + DEVICE_FULL_RETRY_MS
        session.deadline_ms = session.full_since_ms + DEVICE_FULL_WAIT_MS
        return self._grants.send_full(session, event.error)

    def sealed(self, event: ev.Sealed, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.Sealed, now_ms)
        session.may_be_journalled = True
        epoch = self.device.epoch_of(session)
        epoch.tensors = event.tensors
        return [self.device.journal_commit(session)]

    def journalled(self, event: ev.Journalled, now_ms: float) -> Effects:
        """On disk: publish. From here on the old epoch is history and the new one is readable."""
        session = self.device.session(event)
        session.move(ev.Journalled, now_ms)
        epoch = self.device.epoch_of(session)
        retired: Effects = []
        is_stale = self.device.is_journal_behind
        if self.device.committed is not None:
            retired, is_stale = self.device.retire(self.device.committed), True
        if self.device.offloaded is not None:
            # From here on the device has its own again, and may lose or condemn it.
            self.device.offloaded, is_stale = None, True
        epoch.turn("publish")
        epoch.readers.add(session.id)
        session.retry_ms = self.device.problem = None
        request_id, session.request_id = session.request_id, 0
        self.device.commits_total += 1
        self.device.restages_total += session.is_restaging
        how = "restored the weights from host memory as" if session.is_restaging else "committed"
        return [
            ev.SendMessage(session.id, request_id, msg.CommittedMsg(epoch.id)),
            ev.RecordEvent(
                "gms.restaged" if session.is_restaging else "gms.commit",
                f"{session.label} {how} epoch {epoch.id}",
                {"epoch": epoch.id, "size_bytes": epoch.size_bytes, "tensors": epoch.tensors},
            ),
            *retired,
            # The replaced epoch is history from now on, also after a restart.
            *(self.device.journal() if is_stale else []),
        ]

    def journal_failed(self, event: ev.JournalFailed, now_ms: float) -> Effects:
        session = self.device.session(event)
        session.move(ev.JournalFailed, now_ms)
        session.retry_ms = now_ms + JOURNAL_RETRY_MS
        problem = f"a commit waits for the journal, which cannot be written: {event.why}"
        return self.device.note_problem("gms.commit", problem)
