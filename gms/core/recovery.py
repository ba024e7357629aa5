"""Crash without loss: the memory outlived its server, and its readers hand it back.

A restarted server finds the epochs of earlier servers by their files (`orphaned`: a process may
still map them), and in the journal which of them was committed. Readers reconnect (`rejoin`). One
survivor of the journalled epoch at a time is asked for the memory (`offer`); once the driver has
verified it, the epoch is committed again and the other survivors are merely registered. A survivor
of any other epoch is registered as the reader of a superseded epoch: it may be the active engine,
so it is never refused.

Rules, each of which the models showed to be needed:
- Only evidence ends recovery: a good offer, or a file that the kernel says is free. While an orphan
  is held no session gets RW (`grants.py`); a slow survivor must not double the weights.
- An offer that breaks off is discarded, and the next survivor is asked.
- A writer whose commit was not answered rejoins too; the journal says whether it had committed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gms import messages as msg
from gms.core import events as ev
from gms.core.device import EPOCH_BYTES_MAX, Device
from gms.core.events import Effects, EpochPhase, Mode, SessionState
from gms.core.state import HANDING_BACK, Epoch, Session
from gms.core.upkeep import is_copy_of
from gms.manifest import check_identity, check_size, identity_hash, layout_hash
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError

# The descriptors of 4,096 slabs arrive in milliseconds; a survivor that was stopped in the middle
# of its offer must not keep the others from making theirs.
OFFER_MS = 10_000.0
# How long a survivor waits while others are asked before it, one after the other. It keeps serving
# meanwhile, and tries again.
REJOIN_MS = 60_000.0
# When the processes that still map memory and have not handed it back are logged.
REPORT_AFTER_MS = 10_000.0
ASKED_MAX = 1024  # survivors remembered; a device has a handful of survivors


class Recovery:
    """The survivors' messages, and what becomes of a device's orphans."""

    def __init__(self, device: Device, now_ms: float) -> None:
        self.device = device
        self._began_ms = now_ms
        self._is_reported = not device.orphans
        self._asked: dict[tuple[str, str, int], int] = {}  # how often, by survivor
        # The journalled epoch that looked gone: its file may have been removed under its readers.
        self._late: ev.JournalRecord | None = None

    def rejoin(self, event: ev.Received, message: msg.RejoinMsg, now_ms: float) -> Effects:
        """A survivor has reconnected; `judge_all` decides what becomes of it."""
        session = self.device.sessions.get(event.session) or Session(event.session)
        session.target(msg.RejoinMsg)
        size_bytes = sum(message.slab_sizes)
        if size_bytes > EPOCH_BYTES_MAX:
            raise ProtocolError(
                "gms.bad_epoch",
                f"the epoch has {size_bytes} bytes, and the limit is {EPOCH_BYTES_MAX}",
                limit=EPOCH_BYTES_MAX,
            )
        session.rejoin, session.pid, session.request_id = message, event.pid, event.request_id
        session.attach = msg.AttachMsg(
            message.engine, message.incarnation, str(Mode.RO), rank=message.rank
        )
        session.move(msg.RejoinMsg, now_ms)
        session.deadline_ms = now_ms + REJOIN_MS
        session.reason = "rejoining"
        session.reason_message = f"epoch {message.epoch} is being handed back by another survivor"
        self.device.sessions[session.id] = session
        return []

    def offer(self, event: ev.Received, message: msg.OfferMsg, now_ms: float) -> Effects:
        """The requested epoch has arrived; is it the one that was journalled?"""
        session = self.device.session(event)
        session.target(msg.OfferMsg)
        epoch, rejoin = self.device.epoch_of(session), _rejoin_of(session)
        check_identity(message.identity)
        check_size(message.manifest)
        computed = layout_hash(rejoin.slab_sizes, message.manifest)
        expected = epoch.expected
        if message.layout_hash != computed or (
            expected is not None
            and (expected.layout_hash, expected.identity_hash)
            != (computed, identity_hash(message.identity))
        ):
            raise ProtocolError(
                "gms.bad_offer",
                f"the memory offered as epoch {epoch.id} is not what was committed under that id; "
                "the server asks another survivor",
                epoch=epoch.id,
            )
        session.move(msg.OfferMsg, now_ms)
        session.offer, session.request_id, session.deadline_ms = message, event.request_id, None
        return [ev.AdoptEpoch(session.id, epoch.id, rejoin.slab_sizes, message.manifest)]

    def adopted(self, event: ev.Adopted, now_ms: float) -> Effects:
        """The driver holds it: committed again, as if nothing had happened."""
        session = self.device.session(event)
        offer, session.offer = session.offer, None
        session.move(ev.Adopted, now_ms)
        epoch = self.device.epoch_of(session)
        if offer is None:
            raise InvariantError(f"session {session.id} handed back an epoch that it did not offer")
        epoch.turn("recover")
        epoch.slab_sizes = list(_rejoin_of(session).slab_sizes)
        epoch.identity, epoch.manifest = dict(offer.identity), offer.manifest
        epoch.layout_hash = layout_hash(epoch.slab_sizes, offer.manifest)
        epoch.tensors = event.tensors
        epoch.digest = epoch.expected.digest if epoch.expected else None
        epoch.readers.add(session.id)
        took_ms = round(now_ms - self._began_ms)
        self.device.is_journal_lost, self.device.offloaded = False, None
        for orphan in self.device.orphans:
            orphan.fallback = None  # it was indeed replaced
        self.device.recoveries_total += 1
        return [
            ev.Unwatch(epoch.id),
            _rejoined(session, epoch),
            ev.RecordEvent(
                "gms.recovered",
                f"epoch {epoch.id} is back from {session.label}, {took_ms} ms after the start",
                {"epoch": epoch.id, "duration_ms": took_ms},
            ),
            *self.device.journal(),  # the record may be lost, or name a predecessor too
        ]

    def journalled_is_gone(
        self, record: ev.JournalRecord | None, copy: ev.JournalRecord | None
    ) -> Effects:
        """The journalled epoch's file is free. If its commit was never answered, the epoch that it
        was to replace is still the committed one. Otherwise a host copy of its bytes stands for
        it: its readers may have unmapped it to offload it when the server died."""
        predecessor = next((orphan for orphan in self.device.orphans if orphan.fallback), None)
        if predecessor is not None:
            predecessor.expected, predecessor.fallback = predecessor.fallback, None
            return []
        self._late = record
        effects: Effects = []
        if record is not None and copy is not None and is_copy_of(copy, record):
            self.device.offloaded = copy
            said = f"epoch {record.epoch} is lost from the device; using its host copy {copy.epoch}"
            data = {"epoch": record.epoch, "copy": copy.epoch, "size_bytes": record.size_bytes}
            effects.append(ev.RecordEvent("gms.offloaded", said, data))
        return effects + self.device.journal()

    def judge_all(self, now_ms: float) -> Effects:
        """Judge every survivor that has reconnected, in order."""
        effects: Effects = []
        if self.device.committed is not None:
            self._late = None  # it is back, or replaced
        back = [s for s in self.device.sessions.values() if s.state is SessionState.REJOINING]
        # A survivor that was asked before failed to offer: the others come first.
        for session in sorted(back, key=lambda s: self._asked.get(_survivor(s), 0)):
            effects += self._judge(session, _rejoin_of(session), now_ms)
        return effects

    def next_report_ms(self) -> float | None:
        return None if self._is_reported else self._began_ms + REPORT_AFTER_MS

    def report(self, now_ms: float) -> Effects:
        """Log once which processes keep an earlier server's memory without handing it back."""
        if self._is_reported or now_ms < self._began_ms + REPORT_AFTER_MS:
            return []
        self._is_reported = True
        if not self.device.orphans:
            return []
        pids = sorted({pid for epoch in self.device.orphans for pid in epoch.holders})
        holders = ", ".join(f"pid {pid}" for pid in pids) or "processes not visible here"
        message = (
            f"memory of the previous server is mapped and was not handed back: {holders}; no "
            "engine may load until it is"
        )
        return [ev.RecordEvent("gms.recovering", message, {}, "warning")]

    def _judge(self, session: Session, rejoin: msg.RejoinMsg, now_ms: float) -> Effects:
        epoch = self.device.epochs.get(rejoin.epoch) or self._late_epoch(rejoin)
        phase = epoch.phase if epoch is not None else None
        if phase is EpochPhase.STAGING:
            return []  # its old connection has ended, which is about to be reported
        if epoch is not None and epoch.fallback is not None:
            return []  # until the kernel, or a survivor, settles what became of its successor
        if epoch is not None and phase is EpochPhase.ORPHANED and self._may_publish(epoch, rejoin):
            if any(s.state in HANDING_BACK for s in self.device.sessions.values()):
                return []  # one at a time; if that one breaks off, this one is asked
            self._note_asked(session)
            session.move(ev.AskedToOffer, now_ms)
            session.epoch, session.deadline_ms = epoch.id, now_ms + OFFER_MS
            return [ev.SendMessage(session.id, session.request_id, msg.WantedMsg(epoch.id))]
        is_known = phase in (EpochPhase.COMMITTED, EpochPhase.SUPERSEDED)
        if not rejoin.was_committed and not is_known:
            session.move(ev.SessionRefused, now_ms)
            error = UnderstudyError(
                "gms.not_committed",
                f"epoch {rejoin.epoch} was not committed when the service died, so it is lost; "
                "load the weights again",
                epoch=rejoin.epoch,
            )
            refuse = ev.RefuseRequest(session.id, session.request_id, error)
            return [refuse, *self.device.drop(session, error.message)]
        return self._register(session, rejoin, now_ms)

    def _late_epoch(self, rejoin: msg.RejoinMsg) -> Epoch | None:
        """The journalled epoch after all, if nothing has replaced it. Its file is gone, so the
        kernel cannot report its end: it lasts as long as its offer."""
        late, device = self._late, self.device
        if late is None or late.epoch != rejoin.epoch or not rejoin.was_committed:
            return None
        if device.committed is not None or device.staging is not None:
            return None
        epoch = Epoch(late.epoch, EpochPhase.ORPHANED, [late.size_bytes], expected=late)
        epoch.has_no_file = True
        device.epochs[epoch.id] = epoch
        return epoch

    def _note_asked(self, session: Session) -> None:
        if len(self._asked) >= ASKED_MAX:
            self._asked.clear()
        self._asked[_survivor(session)] = self._asked.get(_survivor(session), 0) + 1

    def _may_publish(self, epoch: Epoch, rejoin: msg.RejoinMsg) -> bool:
        """Without a journal the first survivor decides which epoch was committed."""
        if epoch.expected is not None:
            return True
        is_lost = self.device.is_journal_lost and not epoch.is_history
        return is_lost and rejoin.was_committed and self.device.committed is None

    def _register(self, session: Session, rejoin: msg.RejoinMsg, now_ms: float) -> Effects:
        """A reader again, of whatever its epoch is by now. An unknown epoch is history like any
        other: its file may have been removed."""
        effects: Effects = []
        epoch = self.device.epochs.setdefault(
            rejoin.epoch, Epoch(rejoin.epoch, EpochPhase.ORPHANED)
        )
        if epoch.phase is EpochPhase.ORPHANED:
            epoch.slab_sizes = list(rejoin.slab_sizes)
            epoch.turn("adopt")
            effects += [ev.Unwatch(epoch.id), ev.MarkHistory(epoch.id)]
        session.move(ev.Rejoined, now_ms)
        session.epoch, session.deadline_ms = epoch.id, None
        epoch.readers.add(session.id)
        return [
            *effects,
            _rejoined(session, epoch),
            ev.RecordEvent(
                "gms.session",
                f"{session.label} is back as a reader of {epoch.phase} epoch {epoch.id}",
                {"engine": rejoin.engine, "epoch": epoch.id},
            ),
        ]


def _rejoined(session: Session, epoch: Epoch) -> ev.SendMessage:
    """The answer to the session's `rejoin` or `offer`."""
    request_id, session.request_id = session.request_id, 0
    return ev.SendMessage(session.id, request_id, msg.RejoinedMsg(epoch.id))


def _rejoin_of(session: Session) -> msg.RejoinMsg:
    if session.rejoin is None:
        raise InvariantError(f"session {session.id} is {session.state} without having rejoined")
    return session.rejoin


def _survivor(session: Session) -> tuple[str, str, int]:
    return session.request.engine, session.request.incarnation, session.request.rank


def orphans_of(
    ids: Iterable[str], record: ev.JournalRecord | None, history: Collection[str] = ()
) -> list[Epoch]:
    """The epochs that a server starts with: those that have files, with what the journal knows of
    them, unless their files are marked as history."""
    orphans = {id_: Epoch(id_, EpochPhase.ORPHANED, is_history=id_ in history) for id_ in ids}
    if record is not None and record.epoch not in history:
        known = orphans.setdefault(record.epoch, Epoch(record.epoch, EpochPhase.ORPHANED))
        # Its slabs are unknown until it is handed back; it counts as one piece until then.
        known.slab_sizes, known.expected = [record.size_bytes], record
        previous = record.previous
        older = orphans.get(previous.epoch) if previous is not None else None
        if previous is not None and older is not None and not older.is_history:
            older.slab_sizes, older.fallback = [previous.size_bytes], previous
    return list(orphans.values())
