"""What happens to a committed epoch besides being read: condemned, dropped, digested, verified,
offloaded.

A page of device memory can go bad under an epoch that is otherwise fine. Unless such an epoch
is taken out of service, every relaunch maps the same page and dies of it. So one reader with a
device error, or two incarnations whose canary fails, condemn it, and the next writer loads again.
Readers keep what they have; the memory is freed when the last one leaves.

Offload: a device gives up its committed epoch, and a sealed copy in host memory replaces it.
The copy is an epoch of another server (`gms.names.offload_device`), which this machine does
not know; the shell says what is committed there and that a living process holds it. Rules:
- The copy must have the same identity, layout and bytes (digest) as the epoch. So it does not
  matter which epoch it was made of, and a condemned epoch's copy never comes back for other bytes.
- Nobody may map the epoch: sessions and the kernel are asked, as for a drop.
- The link is on disk with the epoch's end, and lasts until the next commit is on disk (or is
  dropped): a restage that breaks off at any step leaves it in force.
- A server that dies before the link is on disk leaves a record whose memory is gone. Its copy then
  replaces it, too (`recovery.py`): the reader may have unmapped it in order to offload it.
- "Offloaded" is answered when the kernel says that the memory is free, not when it was given up.
"""

from __future__ import annotations

from msgspec import Struct, field

from gms import messages as msg
from gms.core import events as ev
from gms.core.device import Device
from gms.core.events import Effects, EpochPhase, SessionState
from gms.core.state import Epoch
from plumbing.errors import ProtocolError, UnderstudyError, WaitTimeoutError

# One failed canary may be the engine's own fault; the same failure in another process is not.
CANARIES_MAX = 2

# Digesting 120 GiB at 2 GB/s takes a minute; a reader that has not answered in ten has a problem.
VERIFY_MS = 600_000.0
# A reader answers at once whether it has begun; one that does not is stopped, or has no keeper, and
# another is asked.
ASK_MS = 5_000.0


class Verification(Struct):
    """The verification under way: its asker, its epoch, and the readers asked so far."""

    asker: int
    request_id: int
    epoch: str
    deadline_ms: float = 0.0
    reader: int = 0
    has_begun: bool = False
    asked: set[int] = field(default_factory=set)


class Upkeep:
    """Condemn, drop, digest, verify."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._verification: Verification | None = None
        self._last_id = 0
        self._dropped: list[ev.SendMessage] = []  # sent once the drop is on disk

    # ------------------------------------------------------------------ out of service

    def condemn(self, event: ev.Received, message: msg.CondemnMsg, now_ms: float) -> Effects:
        """A reader cannot trust its epoch."""
        session = self.device.session(event)
        session.target(msg.CondemnMsg)
        if message.why not in ("device_error", "canary"):
            raise ProtocolError(
                "gms.bad_reason", f"an epoch is not condemned for {message.why[:40]!r}"
            )
        session.move(msg.CondemnMsg, now_ms)
        epoch = self.device.epochs.get(session.epoch or "")
        if epoch is None or epoch.phase is not EpochPhase.COMMITTED:
            return []  # out of service already
        data = {"epoch": epoch.id, "why": message.why, "incarnation": session.request.incarnation}
        what = (
            f"{session.label} reports a {message.why.replace('_', ' ')} failure: {message.detail}"
        )
        if message.why == "canary":
            epoch.failed_canaries.add(session.request.incarnation)
            if len(epoch.failed_canaries) < CANARIES_MAX:
                return [ev.RecordEvent("gms.suspect", what, data, "warning")]
        self.device.condemnations_total += 1
        condemned = f"epoch {epoch.id} is condemned; the next writer loads again; {what}"
        return [
            ev.RecordEvent("gms.condemned", condemned, data, "error"),
            *self.device.retire(epoch),
            *self.device.journal(),
        ]

    def drop(self, event: ev.Received, message: msg.DropMsg) -> Effects:
        """An operator wants the memory back, or another load."""
        epoch = self.device.committed
        if epoch is None and self.device.offloaded is not None and message.epoch is None:
            return self._forget_copy(event, self.device.offloaded)
        if epoch is None:
            raise UnderstudyError("gms.nothing_committed", "nothing is committed on this device")
        if message.epoch not in (None, epoch.id):
            raise UnderstudyError(
                "gms.stale_epoch",
                f"epoch {message.epoch} is not the committed one, which is {epoch.id}",
                epoch=epoch.id,
            )
        if not message.even_if_mapped:
            fix = (
                "stop it first, or use --even-if-mapped: new engines then load again, and the "
                "memory is freed when its last process exits"
            )
            _check_unmapped(self.device, epoch, fix, is_mapped=event.is_mapped)
        dropped = msg.DroppedMsg(epoch.id, tuple(_readers(self.device, epoch)))
        self._dropped.append(ev.SendMessage(event.session, event.request_id, dropped))
        return [
            ev.RecordEvent(
                "gms.dropped", f"epoch {epoch.id} was dropped by an operator", {"epoch": epoch.id}
            ),
            *self.device.retire(epoch),
            *self.device.journal(),
        ]

    def _forget_copy(self, event: ev.Received, copy: ev.JournalRecord) -> Effects:
        """The host copy no longer stands for this device's weights: the next engine loads."""
        self.device.offloaded = None
        dropped = msg.DroppedMsg(copy.epoch, ())
        self._dropped.append(ev.SendMessage(event.session, event.request_id, dropped))
        said = f"the offloaded weights (host copy {copy.epoch}) were dropped by an operator"
        return [
            ev.RecordEvent("gms.dropped", said, {"epoch": copy.epoch}),
            *self.device.journal(),
        ]

    def journal_is_true(self) -> Effects:
        """The journal is up to date: a dropped epoch will not come back with a restart."""
        dropped, self._dropped = self._dropped, []
        return list(dropped)

    # ------------------------------------------------------------------ the bytes

    def verify(self, event: ev.Received, now_ms: float) -> Effects:
        """Ask a reader for a digest; a server without a device context cannot read by itself."""
        epoch = self.device.committed
        if epoch is None:
            raise UnderstudyError("gms.nothing_committed", "nothing is committed on this device")
        if self._verification is not None:
            raise UnderstudyError(
                "gms.verifying", "a verification of this device is under way; try again later"
            )
        self._verification = Verification(event.session, event.request_id, epoch.id)
        return self._ask_next(self._verification, now_ms)

    def digest(self, event: ev.Received, message: msg.DigestMsg, now_ms: float) -> Effects:
        """A writer's digest of what it has just committed, or the answer to a verification."""
        session = self.device.session(event)
        session.move(msg.DigestMsg, now_ms)
        if event.request_id == 0:
            return self._keep(session.epoch, message.digest)
        question = self._verification
        if question is None or (question.reader, self._last_id) != (session.id, event.request_id):
            return []  # too late: another reader was asked, or the asker has left
        if message.digest is None and message.is_coming:
            question.has_begun, question.deadline_ms = True, now_ms + VERIFY_MS
            return []
        if message.digest is None:
            return self._ask_next(question, now_ms)
        self._verification = None
        epoch = self.device.epochs.get(question.epoch)
        expected = epoch.digest if epoch is not None else None
        verified = msg.VerifiedMsg(question.epoch, expected, message.digest, session.label)
        answer = ev.SendMessage(question.asker, question.request_id, verified)
        if expected is None or expected == message.digest:
            return [answer]
        altered = f"{session.label} found that the bytes of epoch {question.epoch} have changed"
        return [answer, ev.RecordEvent("gms.altered", altered, {"epoch": question.epoch}, "error")]

    def next_deadline_ms(self) -> float | None:
        return self._verification.deadline_ms if self._verification is not None else None

    def deadline_passed(self, now_ms: float) -> Effects:
        question = self._verification
        if question is None or now_ms < question.deadline_ms:
            return []
        if not question.has_begun:
            return self._ask_next(question, now_ms)
        self._verification = None
        error = WaitTimeoutError(
            "gms.verify_timeout", f"no digest within {VERIFY_MS / 1000:g} s; is the reader stopped?"
        )
        return [ev.RefuseRequest(question.asker, question.request_id, error)]

    def left(self, session: int, now_ms: float) -> Effects:
        """A connection has ended: perhaps the asked reader's, or the asker's."""
        question = self._verification
        if question is not None and question.asker == session:
            self._verification = None
        elif question is not None and question.reader == session:
            return self._ask_next(question, now_ms)
        return []

    def _keep(self, epoch_id: str | None, digest: str | None) -> Effects:
        epoch = self.device.epochs.get(epoch_id or "")
        if epoch is None or digest is None or epoch.digest is not None:
            return []
        epoch.digest = digest
        return self.device.journal() if epoch.phase is EpochPhase.COMMITTED else []

    def _ask_next(self, question: Verification, now_ms: float) -> Effects:
        epoch = self.device.epochs.get(question.epoch)
        left = sorted((epoch.readers if epoch is not None else set()) - question.asked)
        for reader in left:
            if self.device.sessions[reader].state is SessionState.READING:
                question.reader, question.has_begun = reader, False
                question.deadline_ms = now_ms + ASK_MS
                question.asked.add(reader)
                self._last_id += 1
                return [ev.SendMessage(reader, self._last_id, msg.DigestWantedMsg(question.epoch))]
        self._verification = None
        error = UnderstudyError(
            "gms.no_verifier",
            "only a standby reads the memory to verify it, and none is attached; start one",
        )
        return [ev.RefuseRequest(question.asker, question.request_id, error)]


# Memory that a process may map. That of a superseded epoch is its readers' affair.
HELD = (EpochPhase.STAGING, EpochPhase.RELEASING, EpochPhase.ORPHANED)


class Offload:
    """The requests to offload one device, and their answers."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._askers: dict[int, int] = {}  # request ids by session: who waits for the proof

    def ask(self, event: ev.Received, now_ms: float) -> Effects:
        """Somebody has no use for the device's copy at present; if it is a reader, it has unmapped
        it. That the kernel knows: what counts is who holds the epoch's file.

        Raises:
            UnderstudyError: `gms.epoch_mapped`, `gms.no_copy`, `gms.nothing_committed`, …
        """
        reader = self.device.sessions.get(event.session)
        if reader is None:
            return self._begin(event)
        reader.move(msg.OffloadMsg, now_ms)
        left = self.device.drop(reader, "it has unmapped the weights")
        try:
            return [*left, *self._begin(event)]
        except UnderstudyError as error:  # it has left all the same
            return [*left, ev.RefuseRequest(event.session, event.request_id, error)]

    def _begin(self, event: ev.Received) -> Effects:
        self._check_no_writer()
        if self.device.offloaded is not None and self.device.committed is None:
            self._askers[event.session] = event.request_id
            return []
        epoch = self.device.committed
        if epoch is None:
            raise UnderstudyError("gms.nothing_committed", "nothing is committed on this device")
        fix = "its memory is freed once every engine has released it and offloads again"
        _check_unmapped(self.device, epoch, fix, is_mapped=event.is_mapped)
        copy = _checked(event.copy, epoch)
        self._askers[event.session] = event.request_id
        self.device.offloaded = copy
        self.device.offloads_total += 1
        epoch.turn("offload")
        return [
            # In this order: the driver's thread writes the link before it gives up the memory.
            *self.device.journal(),
            ev.MarkHistory(epoch.id),
            ev.ReleaseEpoch(epoch.id),
            ev.RecordEvent(
                "gms.offloaded",
                f"epoch {epoch.id} is offloaded; its host copy is {copy.epoch}",
                {"epoch": epoch.id, "copy": copy.epoch, "size_bytes": epoch.size_bytes},
            ),
        ]

    def left(self, session: int) -> None:
        """A connection has ended."""
        self._askers.pop(session, None)

    def judge(self) -> Effects:
        """Answer once the memory is free and the link is on disk."""
        copy = self.device.offloaded
        if not self._askers:
            return []
        if copy is None or self.device.committed is not None:
            askers, self._askers = self._askers, {}
            changed = UnderstudyError(
                "gms.not_offloaded", "the weights were restored or dropped in the meantime"
            )
            return [ev.RefuseRequest(*asker, changed) for asker in askers.items()]
        is_held = any(epoch.phase in HELD for epoch in self.device.epochs.values())
        if is_held or not self.device.is_journal_true:
            return []
        askers, self._askers = self._askers, {}
        answer = msg.OffloadedMsg(copy.epoch, copy.size_bytes)
        return [ev.SendMessage(*asker, answer) for asker in askers.items()]

    def _check_no_writer(self) -> None:
        writer = self.device.writer
        if writer is not None:
            raise UnderstudyError(
                "gms.writer",
                f"{writer.label} is loading weights; offload them once it has committed them",
            )


def _readers(device: Device, epoch: Epoch) -> list[str]:
    return [device.sessions[reader].label for reader in sorted(epoch.readers)]


def _check_unmapped(device: Device, epoch: Epoch, fix: str, *, is_mapped: bool) -> None:
    readers = _readers(device, epoch)
    if readers or is_mapped:
        who = ", ".join(readers) or "a process without a session (it may be stopped)"
        text = f"epoch {epoch.id} is still mapped by {who}; {fix}"
        raise UnderstudyError("gms.epoch_mapped", text, readers=readers)


def is_copy_of(copy: ev.JournalRecord, epoch: ev.JournalRecord) -> bool:
    """Whether both have the same layout, identity and bytes; not as long as a digest is unknown."""
    if copy.digest is None or epoch.digest is None:
        return False
    return (copy.layout_hash, copy.identity_hash, copy.digest) == (
        epoch.layout_hash,
        epoch.identity_hash,
        epoch.digest,
    )


def _checked(copy: ev.JournalRecord | None, epoch: Epoch) -> ev.JournalRecord:
    """`copy`, if it is of the same bytes as `epoch`."""
    why = None
    if epoch.digest is None:
        why = "the digest of its bytes is not known yet"
    elif copy is None:
        why = "there is none, or only its server has it"
    elif copy.digest is None:
        why = "the digest of the copy is not known yet"
    elif not is_copy_of(copy, epoch.record()):
        why = f"epoch {copy.epoch} there has other bytes"
    if copy is None or why is not None:
        raise UnderstudyError(
            "gms.no_copy",
            f"epoch {epoch.id} has no sealed copy in host memory: {why}; a copy is made in the "
            "background where `gms serve` runs with --host-memory",
            epoch=epoch.id,
        )
    return copy
