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
  replaces it, too (`weights.py`): the reader may have unmapped it in order to offload it.
- "Offloaded" is answered when the kernel says that the memory is free, not when it was given up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from gms import messages as msg
from gms.core import events as ev
from gms.core.region import Region, RegionPhase, S
from gms.manifest import LayoutHash, identity_hash
from plumbing.errors import ProtocolError, UnderstudyError, WaitTimeoutError

# One failed canary may be the engine's own fault; the same failure in another process is not.
CANARIES_MAX = 2

# Digesting 120 GiB at 2 GB/s takes a minute; a reader that has not answered in ten has a problem.
VERIFY_MS = 600_000.0
# A reader answers at once whether it has begun; one that does not is stopped, or has no keeper, and
# another is asked.
ASK_MS = 5_000.0


class Epoch(Region):
    """One generation of the device's weights."""

    identity: Mapping[str, Any] | None = None
    manifest: bytes = b""
    tensors: int = 0  # how many the manifest lists; known once it is checked
    layout_hash: LayoutHash = LayoutHash("")
    was_published: bool = False  # committed once, here or by an earlier server
    expected: ev.JournalRecord | None = None  # what a survivor's memory must match
    fallback: ev.JournalRecord | None = None  # the same, if the journalled one is gone
    is_history: bool = False  # its file is marked: out of service
    digest: str | None = None  # of the bytes, as its writer computed it
    failed_canaries: set[str] = field(default_factory=set)  # incarnations

    def record(self) -> ev.JournalRecord:
        return ev.JournalRecord(
            epoch=self.id,
            size_bytes=self.size_bytes,
            layout_hash=self.layout_hash,
            identity_hash=identity_hash(self.identity or {}),
            digest=self.digest,
        )


class Verification(Struct):
    """The verification under way: its asker, its epoch, and the readers asked so far."""

    asker: int
    request_id: int
    epoch: str
    deadline_ms: float = 0.0
    reader: int = 0
    has_begun: bool = False
    asked: set[int] = field(default_factory=set)


# Memory that a process may map. That of a superseded epoch is its readers' affair.
HELD = (RegionPhase.MAKING, RegionPhase.RETIRED, RegionPhase.FREEING, RegionPhase.ORPHANED)


class Upkeep:
    """Condemn, drop, digest, verify, offload."""

    def __init__(self, machine: Any) -> None:
        """`machine` is the `WeightsMachine`."""
        self.machine = machine
        self._verification: Verification | None = None
        self._last_id = 0
        self._dropped: list[ev.SendMessage] = []  # sent once the drop is on disk
        self._offloaders: dict[int, int] = {}  # request ids by session: who waits for the proof

    def received(self, event: ev.Received) -> None:
        match event.message:
            case msg.CondemnMsg() as message:
                self._condemn(event, message)
            case msg.DigestMsg() as message:
                self._digest(event, message)
            case msg.DropMsg() as message:
                self._drop(event, message)
            case msg.VerifyMsg():
                self._verify(event)
            case msg.OffloadMsg():
                self._offload(event)
            case message:
                raise ProtocolError(
                    "gms.unexpected_message", f"clients do not send {message.TYPE!r}"
                )

    def left(self, session: int) -> None:
        """A connection has ended: perhaps an asker's, or that of a reader that was asked."""
        self._offloaders.pop(session, None)
        question = self._verification
        if question is not None and question.asker == session:
            self._verification = None
        elif question is not None and question.reader == session:
            self._ask_next(question)

    def _committed(self) -> Epoch:
        epoch: Epoch | None = self.machine.committed
        if epoch is None:
            raise UnderstudyError("gms.nothing_committed", "nothing is committed on this device")
        return epoch

    # ------------------------------------------------------------------ out of service

    def _condemn(self, event: ev.Received, message: msg.CondemnMsg) -> None:
        """A reader cannot trust its epoch."""
        machine = self.machine
        session = machine.session(event)
        session.accept(message)
        if message.why not in ("device_error", "canary"):
            raise ProtocolError(
                "gms.bad_reason", f"an epoch is not condemned for {message.why[:40]!r}"
            )
        epoch = machine.committed
        if epoch is None or epoch.id != session.region:
            return  # out of service already
        incarnation = session.request.incarnation
        data = {"epoch": epoch.id, "why": message.why, "incarnation": incarnation}
        what = (
            f"{session.label} reports a {message.why.replace('_', ' ')} failure: {message.detail}"
        )
        if message.why == "canary":
            epoch.failed_canaries.add(incarnation)
            if len(epoch.failed_canaries) < CANARIES_MAX:
                machine.record("gms.suspect", what, "warning", **data)
                return
        machine.condemnations_total += 1
        condemned = f"epoch {epoch.id} is condemned; the next writer loads again; {what}"
        machine.record("gms.condemned", condemned, "error", **data)
        machine.retire(epoch)
        machine.journal()

    def _drop(self, event: ev.Received, message: msg.DropMsg) -> None:
        """An operator wants the memory back, or another load."""
        machine, copy = self.machine, self.machine.offloaded
        if machine.committed is None and copy is not None and message.epoch is None:
            # The host copy no longer stands for this device's weights: the next engine loads.
            machine.offloaded = None
            said = f"the offloaded weights (host copy {copy.epoch}) were dropped by an operator"
            self._dropped_as(event, msg.DroppedMsg(copy.epoch, ()), said)
            return
        epoch = self._committed()
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
            self._check_unmapped(epoch, fix, is_mapped=event.is_mapped)
        dropped = msg.DroppedMsg(epoch.id, tuple(self._readers(epoch)))
        machine.retire(epoch)
        self._dropped_as(event, dropped, f"epoch {epoch.id} was dropped by an operator")

    def _dropped_as(self, event: ev.Received, answer: msg.DroppedMsg, said: str) -> None:
        self._dropped.append(ev.SendMessage(event.session, event.request_id, answer))
        self.machine.record("gms.dropped", said, epoch=answer.epoch)
        self.machine.journal()

    def journal_is_true(self) -> None:
        """The journal is up to date: a dropped epoch will not come back with a restart."""
        for answer in self._dropped:
            self.machine.do(answer)
        self._dropped.clear()

    def _readers(self, epoch: Epoch) -> list[str]:
        return [session.label for session in self.machine.holders(epoch)]

    def _check_unmapped(self, epoch: Epoch, fix: str, *, is_mapped: bool) -> None:
        readers = self._readers(epoch)
        if readers or is_mapped:
            who = ", ".join(readers) or "a process without a session (it may be stopped)"
            text = f"epoch {epoch.id} is still mapped by {who}; {fix}"
            raise UnderstudyError("gms.epoch_mapped", text, readers=readers)

    # ------------------------------------------------------------------ the bytes

    def _verify(self, event: ev.Received) -> None:
        """Ask a reader for a digest; a server without a device context cannot read by itself."""
        epoch = self._committed()
        if self._verification is not None:
            raise UnderstudyError(
                "gms.verifying", "a verification of this device is under way; try again later"
            )
        self._verification = Verification(event.session, event.request_id, epoch.id)
        self._ask_next(self._verification)

    def _digest(self, event: ev.Received, message: msg.DigestMsg) -> None:
        """A writer's digest of what it has just committed, or the answer to a verification."""
        machine = self.machine
        session = machine.session(event)
        session.accept(message)
        if event.request_id == 0:
            self._keep_digest(session.region, message.digest)
            return
        question = self._verification
        if question is None or (question.reader, self._last_id) != (session.id, event.request_id):
            return  # too late: another reader was asked, or the asker has left
        if message.digest is None and message.is_coming:
            question.has_begun, question.deadline_ms = True, machine.now_ms + VERIFY_MS
            return
        if message.digest is None:
            self._ask_next(question)
            return
        self._verification = None
        epoch = machine.regions.get(question.epoch)
        expected = epoch.digest if epoch is not None else None
        verified = msg.VerifiedMsg(question.epoch, expected, message.digest, session.label)
        machine.do(ev.SendMessage(question.asker, question.request_id, verified))
        if expected not in (None, message.digest):
            altered = f"{session.label} found that the bytes of epoch {question.epoch} have changed"
            machine.record("gms.altered", altered, "error", epoch=question.epoch)

    def _keep_digest(self, epoch_id: str | None, digest: str | None) -> None:
        epoch = self.machine.regions.get(epoch_id or "")
        if epoch is not None and digest is not None and epoch.digest is None:
            epoch.digest = digest
            if epoch.phase is RegionPhase.SERVED:
                self.machine.journal()

    def next_deadline_ms(self) -> float | None:
        return self._verification.deadline_ms if self._verification is not None else None

    def deadline_passed(self) -> None:
        question = self._verification
        if question is None or self.machine.now_ms < question.deadline_ms:
            return
        if not question.has_begun:
            self._ask_next(question)
            return
        error = WaitTimeoutError(
            "gms.verify_timeout", f"no digest within {VERIFY_MS / 1000:g} s; is the reader stopped?"
        )
        self._give_up(question, error)

    def _ask_next(self, question: Verification) -> None:
        epoch = self.machine.regions.get(question.epoch)
        readers = self.machine.holders(epoch) if epoch is not None else []
        for reader in sorted(each.id for each in readers if each.state is S.READING):
            if reader in question.asked:
                continue
            question.reader, question.has_begun = reader, False
            question.deadline_ms = self.machine.now_ms + ASK_MS
            question.asked.add(reader)
            self._last_id += 1
            wanted = msg.DigestWantedMsg(question.epoch)
            self.machine.do(ev.SendMessage(reader, self._last_id, wanted))
            return
        error = UnderstudyError(
            "gms.no_verifier",
            "only a standby reads the memory to verify it, and none is attached; start one",
        )
        self._give_up(question, error)

    def _give_up(self, question: Verification, error: UnderstudyError) -> None:
        self._verification = None
        self.machine.do(ev.RefuseRequest(question.asker, question.request_id, error))

    # ------------------------------------------------------------------ offload

    def _offload(self, event: ev.Received) -> None:
        """Somebody has no use for the device's copy at present; if it is a reader, it has unmapped
        it. That the kernel knows: what counts is who holds the epoch's file.
        """
        if event.session not in self.machine.sessions:
            self._begin(event)
            return
        self.machine.leave(event)
        try:
            self._begin(event)
        except UnderstudyError as error:  # it has left all the same
            self.machine.do(ev.RefuseRequest(event.session, event.request_id, error))

    def _begin(self, event: ev.Received) -> None:
        machine = self.machine
        if machine.writer is not None:
            raise UnderstudyError(
                "gms.writer",
                f"{machine.writer.label} is loading weights; offload them once it has committed"
                " them",
            )
        if machine.offloaded is None or machine.committed is not None:
            epoch = self._committed()
            fix = "its memory is freed once every engine has released it and offloads again"
            self._check_unmapped(epoch, fix, is_mapped=event.is_mapped)
            machine.offloaded = copy = checked_copy(event.copy, epoch)
            machine.offloads_total += 1
            # In this order: the driver's thread writes the link before it gives up the memory.
            epoch.turn("retire")
            machine.journal()
            machine.do(ev.MarkRetired(epoch.id))
            machine.record(
                "gms.offloaded",
                f"epoch {epoch.id} is offloaded; its host copy is {copy.epoch}",
                epoch=epoch.id,
                copy=copy.epoch,
                size_bytes=epoch.size_bytes,
            )
        self._offloaders[event.session] = event.request_id

    def settle(self) -> None:
        """Answer once the memory is free and the link is on disk."""
        machine, copy = self.machine, self.machine.offloaded
        if not self._offloaders:
            return
        answer: ev.Effect
        if copy is not None and machine.committed is None:
            held = [epoch for epoch in machine.regions.values() if epoch.phase in HELD]
            if any(not machine.is_superseded(epoch) for epoch in held):
                return
            if not machine.is_journal_true:
                return
        askers, self._offloaders = self._offloaders, {}
        for asker in askers.items():
            if copy is not None and machine.committed is None:
                answer = ev.SendMessage(*asker, msg.OffloadedMsg(copy.epoch, copy.size_bytes))
            else:
                changed = UnderstudyError(
                    "gms.not_offloaded", "the weights were restored or dropped in the meantime"
                )
                answer = ev.RefuseRequest(*asker, changed)
            machine.do(answer)


def checked_copy(copy: ev.JournalRecord | None, epoch: Epoch) -> ev.JournalRecord:
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


def is_copy_of(copy: ev.JournalRecord, epoch: ev.JournalRecord) -> bool:
    """Whether both have the same layout, identity and bytes; not as long as a digest is unknown."""
    if copy.digest is None or epoch.digest is None:
        return False
    return (copy.layout_hash, copy.identity_hash, copy.digest) == (
        epoch.layout_hash,
        epoch.identity_hash,
        epoch.digest,
    )
