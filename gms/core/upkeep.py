"""The epochs of one place, its journal, and what happens to a committed epoch besides being read:
condemned, dropped, digested, offloaded.

A page of device memory can go bad under an epoch that is otherwise fine. Unless such an epoch
is taken out of service, every relaunch maps the same page and fails on it. So two incarnations
whose canary fails condemn it, and the next writer loads again. Readers keep what they have; the
memory is freed when the last one leaves.

Offload: a device gives up its committed epoch, and a sealed copy in host memory replaces it.
The copy is an epoch of another server (`gms.names.offload_device`), which this machine does
not know; the shell says what is committed there and that a living process holds it. Rules:
- The copy must have the same identity, layout and bytes (digest) as the epoch. So it does not
  matter which epoch it was made of, and a condemned epoch's copy never comes back for other bytes.
- No process may map the epoch: sessions and the kernel are asked, as for a drop.
- The link is on disk with the epoch's end, and lasts until the next commit is on disk (or is
  dropped): a restage that breaks off at any step leaves it in force.
- A server that dies before the link is on disk leaves a record whose memory is gone. Its copy then
  replaces it, too (`weights.py`): the reader may have unmapped it in order to offload it.
- "Offloaded" is answered when the kernel says that the memory is free, not when it was given up.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from msgspec import field

from gms import messages as msg
from gms.core import events as ev
from gms.core.region import WRITER_STATES, Machine, Region, RegionPhase, S, Session
from gms.manifest import LayoutHash, identity_hash
from plumbing.errors import UnderstudyError

# One failed canary may be the engine's own fault; the same failure in another process is not.
CANARIES_MAX = 2
JOURNAL_RETRY_MS = 1000  # operators fix a full disk; once a second is soon enough


class Epoch(Region):
    """One generation of the device's weights."""

    identity: Mapping[str, Any] | None = None
    manifest: bytes = b""
    tensors: int = 0  # how many the manifest lists; known once it is checked
    layout_hash: LayoutHash = LayoutHash("")
    was_published: bool = False  # committed once, here or by an earlier server
    expected: ev.JournalRecord | None = None  # what a survivor's memory must match
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


# Memory that a process may map. That of a superseded epoch is its readers' affair.
HELD = (RegionPhase.MAKING, RegionPhase.RETIRED, RegionPhase.FREEING, RegionPhase.ORPHANED)


class Upkeep(Machine[Epoch]):
    """The books of a place's weights; `weights.py` says who writes and who reads."""

    def __init__(
        self, orphans: Mapping[str, bool], journal: ev.LoadedJournal, now_ms: float
    ) -> None:
        """`orphans` are the epochs of earlier servers that have files, each with whether its file
        says that it is out of service; `journal` is what they have filed.

        Staging epochs are among them: a writer may outlive its server by a moment, during which its
        memory is in use. An epoch without processes is found free at the first look; the journalled
        one is expected back from a process that still maps it.
        """
        epochs = {
            id_: Epoch(id_, RegionPhase.ORPHANED, is_history=is_history)
            for id_, is_history in orphans.items()
        }
        record = journal.record
        # A server may die before it has written that this epoch is out of service.
        is_behind = record is not None and orphans.get(record.epoch, False)
        if record is not None and not is_behind:
            known = epochs.setdefault(record.epoch, Epoch(record.epoch, RegionPhase.ORPHANED))
            # Its slabs are unknown until it is handed back; it counts as one piece until then.
            known.slab_sizes, known.expected = [record.size_bytes], record
        super().__init__(epochs.values())
        self.is_journal_lost = journal.is_lost  # survivors say what was committed
        # The sealed copy in host memory of what was committed, until the next commit.
        self.offloaded = journal.offloaded
        self.offloads_total = self.condemnations_total = 0
        self.problem: str | None = None  # for operators to fix: a journal that cannot be written
        self.journal_retry_ms = now_ms if is_behind else None
        self._journal_writes = 0  # under way
        self._dropped: list[ev.SendMessage] = []  # sent once the drop is on disk
        self._offloaders: dict[int, int] = {}  # request ids by session: who waits for the proof

    @property
    def committed(self) -> Epoch | None:
        return next(iter(self._in_phase(RegionPhase.SERVED)), None)

    @property
    def writer(self) -> Session | None:
        return next(iter(self._in(*WRITER_STATES)), None)

    def is_superseded(self, epoch: Epoch) -> bool:
        """Out of service, and still read."""
        return epoch.phase is RegionPhase.RETIRED and self.is_held(epoch)

    # ------------------------------------------------------------------ the journal

    def journal(self) -> None:
        """Write what is true now, or once the commit that waits for it is on disk."""
        self.journal_retry_ms = None
        self._journal_writes += 1
        committing = map(self.region_of, self._in(S.JOURNALLING))
        epoch = self.committed or next(committing, None)
        record = epoch.record() if epoch is not None else None
        self.do(ev.WriteJournal(record, self.offloaded))

    @property
    def is_journal_true(self) -> bool:
        """Whether the journal on disk is up to date."""
        return not self._journal_writes and self.journal_retry_ms is None

    def _journalled(self, record: ev.JournalRecord | None, error: UnderstudyError | None) -> None:
        """`record` is on disk, or not."""
        self._journal_writes -= 1
        if error is not None:
            # A retired epoch would come back with a restart: retry until it is written.
            self.journal_retry_ms = self.now_ms + JOURNAL_RETRY_MS
            problem = (
                "the journal cannot be written, so a commit would wait for it, and a restart find"
                f" an old record: {error.message}"
            )
            if problem != self.problem:
                self.problem = problem
                self.record("gms.journal", problem, "error")
            return
        for session in self._in(S.JOURNALLING):
            if record is not None and record.epoch == session.region:
                self._publish(session)
        if self.is_journal_true:  # a dropped epoch will not come back with a restart
            self.problem = None
            for answer in self._dropped:
                self.do(answer)
            self._dropped.clear()

    @abc.abstractmethod
    def _publish(self, session: Session) -> None:
        """Its commit is on disk. From here on the epoch is readable."""

    def _may_end(self, region: Epoch) -> bool:
        """Not while the journal is being written: a restart would find the epoch on record and its
        file gone, and take its host copy for it, although it may be condemned."""
        return not self._journal_writes and super()._may_end(region)

    # ------------------------------------------------------------------ out of service

    def on_condemn(self, event: ev.Received, message: msg.CondemnMsg) -> None:
        """A reader's canary has failed on its epoch."""
        session = self.session(event)
        session.accept(message)
        epoch = self.committed
        if epoch is None or epoch.id != session.region:
            return  # out of service already
        incarnation = session.request.incarnation
        data = {"epoch": epoch.id, "incarnation": incarnation}
        what = f"{session.label} reports a canary failure: {message.detail}"
        epoch.failed_canaries.add(incarnation)
        if len(epoch.failed_canaries) < CANARIES_MAX:
            self.record("gms.suspect", what, "warning", **data)
            return
        self.condemnations_total += 1
        condemned = f"epoch {epoch.id} is condemned; the next writer loads again; {what}"
        self.record("gms.condemned", condemned, "error", **data)
        self.retire(epoch)
        self.journal()

    def on_drop(self, event: ev.Received, message: msg.DropMsg) -> None:
        """An operator wants the memory back, or another load."""
        copy = self.offloaded
        if self.committed is None and copy is not None and message.epoch is None:
            # The host copy no longer stands for this device's weights: the next engine loads.
            self.offloaded = None
            said = f"the offloaded weights (host copy {copy.epoch}) were dropped by an operator"
            self._dropped_as(event, msg.DroppedMsg(copy.epoch), said)
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
        self.retire(epoch)
        self._dropped_as(event, dropped, f"epoch {epoch.id} was dropped by an operator")

    def _dropped_as(self, event: ev.Received, answer: msg.DroppedMsg, said: str) -> None:
        self._dropped.append(ev.SendMessage(event.session, event.request_id, answer))
        self.record("gms.dropped", said, epoch=answer.region)
        self.journal()

    def _committed(self) -> Epoch:
        if self.committed is None:
            raise UnderstudyError("gms.nothing_committed", "nothing is committed on this device")
        return self.committed

    def _readers(self, epoch: Epoch) -> list[str]:
        return [session.label for session in self.holders(epoch)]

    def _check_unmapped(self, epoch: Epoch, fix: str, *, is_mapped: bool) -> None:
        readers = self._readers(epoch)
        if readers or is_mapped:
            who = ", ".join(readers) or "a process without a session (it may be stopped)"
            text = f"epoch {epoch.id} is still mapped by {who}; {fix}"
            raise UnderstudyError("gms.epoch_mapped", text, readers=readers)

    def on_digest(self, event: ev.Received, message: msg.DigestMsg) -> None:
        """A writer's digest of what it has just committed."""
        session = self.session(event)
        session.accept(message)
        epoch = self.regions.get(session.region or "")
        if epoch is not None and epoch.digest is None:
            epoch.digest = message.digest
            if epoch.phase is RegionPhase.SERVED:
                self.journal()

    # ------------------------------------------------------------------ offload

    def on_offload(self, event: ev.Received, message: msg.OffloadMsg) -> None:
        """A session has no use for the device's copy at present; if it is a reader, it has unmapped
        it. That the kernel knows: what counts is who holds the epoch's file.
        """
        session = self.sessions.get(event.session)
        if session is None:
            self._begin_offload(event)
            return
        session.move(message, self.now_ms)
        self._forget(session, "it has unmapped the weights")
        try:
            self._begin_offload(event)
        except UnderstudyError as error:  # it has left all the same
            self.do(ev.RefuseRequest(event.session, event.request_id, error))

    def _begin_offload(self, event: ev.Received) -> None:
        if self.writer is not None:
            raise UnderstudyError(
                "gms.writer",
                f"{self.writer.label} is loading weights; offload them once it has committed them",
            )
        if self.offloaded is None or self.committed is not None:
            epoch = self._committed()
            fix = "its memory is freed once every engine has released it and offloads again"
            self._check_unmapped(epoch, fix, is_mapped=event.is_mapped)
            self.offloaded = copy = checked_copy(event.copy, epoch)
            self.offloads_total += 1
            # In this order: the driver's thread writes the link before it gives up the memory.
            epoch.turn("retire")
            self.journal()
            self.do(ev.MarkRetired(epoch.id))
            self.record(
                "gms.offloaded",
                f"epoch {epoch.id} is offloaded; its host copy is {copy.epoch}",
                epoch=epoch.id,
                copy=copy.epoch,
                size_bytes=epoch.size_bytes,
            )
        self._offloaders[event.session] = event.request_id

    def _settle_offloads(self) -> None:
        """Answer once the memory is free and the link is on disk."""
        copy = self.offloaded if self.committed is None else None
        held = [epoch for epoch in self.regions.values() if epoch.phase in HELD]
        is_free = self.is_journal_true and all(self.is_superseded(epoch) for epoch in held)
        if not self._offloaders or (copy is not None and not is_free):
            return
        askers, self._offloaders = self._offloaders, {}
        for asker in askers.items():
            if copy is not None:
                self.do(ev.SendMessage(*asker, msg.OffloadedMsg(copy.epoch, copy.size_bytes)))
            else:
                changed = "the weights were restored or dropped in the meantime"
                error = UnderstudyError("gms.not_offloaded", changed)
                self.do(ev.RefuseRequest(*asker, error))


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
