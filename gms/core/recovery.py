"""Crash without loss: the memory outlived its server, and its readers hand it back.

Theory of operation. A restarted server knows the epochs of the servers before it by their files
(`orphaned`: somebody may still map them), and by the journal which of them was committed. Readers
come back and say what they have (`rejoin`). Of the journalled epoch one survivor at a time is
asked for the memory (`offer`); when the driver has found it true it is committed again, and the
other survivors are merely registered. A survivor of any other epoch is registered as the reader of
an epoch that was superseded: it may be the active engine, so it is never refused.

Rules, each of which the models showed to be needed:
- Nothing but evidence ends recovery: a good offer, or a file that the kernel says is free. While an
  orphan is held nobody gets RW (`decide.py`); a slow survivor must not double the weights.
- An offer that breaks off is discarded, and the next survivor is asked.
- A writer whose commit was not answered comes back too; the journal says whether it had committed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gms.core import effects as fx
from gms.core import events as ev
from gms.core.capacity import EPOCH_BYTES_MAX
from gms.core.device import Device
from gms.core.effects import Effect
from gms.core.events import EpochPhase, Mode, SessionState
from gms.core.identity import check_identity, identity_hash
from gms.core.manifest import check_size, layout_hash
from gms.core.state import HANDING_BACK, Epoch, Session
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError

# The descriptors of 4,096 slabs arrive in milliseconds; a survivor that was stopped in the middle
# of its offer must not keep the others from making theirs.
OFFER_MS = 10_000.0
# How long a survivor is kept waiting while others are asked before it, one after the other. It
# serves on meanwhile, and tries again.
REJOIN_MS = 60_000.0
# When people are told who still maps the memory that nobody has handed back.
REPORT_AFTER_MS = 10_000.0
ASKED_MAX = 1024  # survivors remembered; a device has a handful of survivors

Effects = list[Effect]


class Recovery:
    """What survivors say, and what that makes of a device's orphans."""

    def __init__(self, device: Device, now_ms: float) -> None:
        self.device = device
        self._began_ms = now_ms
        self._is_reported = not device.orphans
        self._asked: dict[tuple[str, str, int], int] = {}  # how often, by who
        # What was journalled and looked gone: its file may have been removed under its readers.
        self._late: ev.JournalRecord | None = None

    def rejoin(self, event: ev.Rejoin, now_ms: float) -> Effects:
        """A survivor is back; `settle` says what becomes of it."""
        session = self.device.sessions.get(event.session) or Session(event.session)
        session.target(ev.Rejoin)
        if sum(event.slab_sizes) > EPOCH_BYTES_MAX:
            raise ProtocolError(
                "gms.bad_epoch",
                f"an epoch of {sum(event.slab_sizes)} bytes, and the limit is {EPOCH_BYTES_MAX}",
                limit=EPOCH_BYTES_MAX,
            )
        session.rejoin = event
        session.attach = ev.Attach(
            session=event.session,
            request_id=event.request_id,
            engine=event.engine,
            incarnation=event.incarnation,
            mode=Mode.RO,
            rank=event.rank,
            pid=event.pid,
        )
        session.move(ev.Rejoin, now_ms)
        session.deadline_ms = now_ms + REJOIN_MS
        session.reason = "rejoining"
        session.reason_message = f"epoch {event.epoch} is being handed back by another survivor"
        self.device.sessions[session.id] = session
        return []

    def offer(self, event: ev.Offer, now_ms: float) -> Effects:
        """The epoch that was asked for has arrived; is it the one that was journalled?"""
        session = self.device.session(event)
        session.target(ev.Offer)
        epoch, rejoin = self.device.epoch_of(session), _rejoin_of(session)
        check_identity(event.identity)
        check_size(event.manifest)
        computed = layout_hash(rejoin.slab_sizes, event.manifest)
        expected = epoch.expected
        if event.layout_hash != computed or (
            expected is not None
            and (expected.layout_hash, expected.identity_hash)
            != (computed, identity_hash(event.identity))
        ):
            raise ProtocolError(
                "gms.bad_offer",
                f"what was offered as epoch {epoch.id} is not what was committed under that name; "
                "another survivor is asked",
                epoch=epoch.id,
            )
        session.move(ev.Offer, now_ms)
        session.offer, session.deadline_ms = event, None
        return [fx.AdoptEpoch(session.id, epoch.id, rejoin.slab_sizes, event.manifest)]

    def adopted(self, event: ev.Adopted, now_ms: float) -> Effects:
        """The driver holds it: committed again, as if nothing had happened."""
        session = self.device.session(event)
        offer, session.offer = session.offer, None
        session.move(ev.Adopted, now_ms)
        epoch = self.device.epoch_of(session)
        if offer is None:
            raise InvariantError(f"session {session.id} handed back what it did not offer")
        epoch.turn("recover")
        epoch.slab_sizes = list(_rejoin_of(session).slab_sizes)
        epoch.identity, epoch.manifest = dict(offer.identity), offer.manifest
        epoch.layout_hash = layout_hash(epoch.slab_sizes, offer.manifest)
        epoch.tensors = event.tensors
        epoch.digest = epoch.expected.digest if epoch.expected else None
        epoch.readers.add(session.id)
        took_ms = round(now_ms - self._began_ms)
        said = f"epoch {epoch.id} is back from {session.label}, {took_ms} ms after the start"
        effects: Effects = [
            fx.Unwatch(epoch.id),
            fx.TellRejoined(session.id, offer.request_id, epoch.id),
            fx.Record("gms.recovered", said, {"epoch": epoch.id, "duration_ms": took_ms}),
        ]
        self.device.is_journal_lost = False
        effects += self.device.journal()  # it may be lost there, or name something else beside it
        for orphan in self.device.orphans:
            orphan.fallback = None  # replaced, as we know now
        self.device.recoveries_total += 1
        return effects

    def journalled_is_gone(self, record: ev.JournalRecord | None) -> Effects:
        """Nobody maps the journalled epoch any more, its file says. If nobody was told of it, the
        one that it was to replace is still what is committed."""
        heir = next((orphan for orphan in self.device.orphans if orphan.fallback), None)
        if heir is None:
            self._late = record
            return self.device.journal()
        heir.expected, heir.fallback = heir.fallback, None
        return []

    def settle(self, now_ms: float) -> Effects:
        """Judge every survivor that has come back, in order."""
        effects: Effects = []
        if self.device.committed is not None:
            self._late = None  # it is back, or something has taken its place
        back = [s for s in self.device.sessions.values() if s.state is SessionState.REJOINING]
        # Whoever was asked before and is back did not do it: the others first.
        for session in sorted(back, key=lambda s: self._asked.get(_who(s), 0)):
            effects += self._judge(session, _rejoin_of(session), now_ms)
        return effects

    def next_report_ms(self) -> float | None:
        return None if self._is_reported else self._began_ms + REPORT_AFTER_MS

    def report(self, now_ms: float) -> Effects:
        """Tell people once who keeps the memory of the last server and does not hand it back."""
        if self._is_reported or now_ms < self._began_ms + REPORT_AFTER_MS:
            return []
        self._is_reported = True
        if not self.device.orphans:
            return []
        pids = sorted({pid for epoch in self.device.orphans for pid in epoch.holders})
        said = "memory of the server before this one is mapped and was not handed back: "
        said += ", ".join(f"pid {pid}" for pid in pids) or "by processes not visible here"
        return [fx.Record("gms.recovering", f"{said}; nobody may load until it is", {}, "warning")]

    def _judge(self, session: Session, rejoin: ev.Rejoin, now_ms: float) -> Effects:
        epoch = self.device.epochs.get(rejoin.epoch) or self._late_one(rejoin)
        phase = epoch.phase if epoch is not None else None
        if phase is EpochPhase.STAGING:
            return []  # its old connection has ended; we are about to hear of that
        if epoch is not None and epoch.fallback is not None:
            return []  # until the kernel, or a survivor, says what became of its successor
        if epoch is not None and phase is EpochPhase.ORPHANED and self._may_publish(epoch, rejoin):
            if any(s.state in HANDING_BACK for s in self.device.sessions.values()):
                return []  # one at a time; if that one breaks off, this one is asked
            self._note_asked(session)
            session.move(ev.AskedToOffer, now_ms)
            session.epoch, session.deadline_ms = epoch.id, now_ms + OFFER_MS
            return [fx.AskOffer(session.id, rejoin.request_id, epoch.id)]
        is_known = phase in (EpochPhase.COMMITTED, EpochPhase.SUPERSEDED)
        if not rejoin.was_committed and not is_known:
            session.move(ev.Refused, now_ms)
            error = UnderstudyError(
                "gms.not_committed",
                f"epoch {rejoin.epoch} was not committed when the service died, so it is lost; "
                "load the weights again",
                epoch=rejoin.epoch,
            )
            refuse = fx.Refuse(session.id, rejoin.request_id, error)
            return [refuse, *self.device.drop(session, error.message)]
        return self._register(session, rejoin, now_ms)

    def _late_one(self, rejoin: ev.Rejoin) -> Epoch | None:
        """The journalled epoch after all, if nothing has taken its place. Its file is gone, so that
        its end cannot be asked of the kernel: it lasts as long as its offer."""
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
        self._asked[_who(session)] = self._asked.get(_who(session), 0) + 1

    def _may_publish(self, epoch: Epoch, rejoin: ev.Rejoin) -> bool:
        """Without a journal the first survivor's word decides which epoch was committed."""
        if epoch.expected is not None:
            return True
        is_lost = self.device.is_journal_lost and not epoch.is_history
        return is_lost and rejoin.was_committed and self.device.committed is None

    def _register(self, session: Session, rejoin: ev.Rejoin, now_ms: float) -> Effects:
        """A reader again, of whatever its epoch is by now. An epoch that we have never heard of
        is history like any other: its file may have been removed under us."""
        effects: Effects = []
        epoch = self.device.epochs.setdefault(
            rejoin.epoch, Epoch(rejoin.epoch, EpochPhase.ORPHANED)
        )
        if epoch.phase is EpochPhase.ORPHANED:
            epoch.slab_sizes = list(rejoin.slab_sizes)
            epoch.turn("adopt")
            effects += [fx.Unwatch(epoch.id), fx.MarkHistory(epoch.id)]
        session.move(ev.Rejoined, now_ms)
        session.epoch, session.deadline_ms = epoch.id, None
        epoch.readers.add(session.id)
        said = f"{session.label} is back as a reader of {epoch.phase} epoch {epoch.id}"
        return [
            *effects,
            fx.TellRejoined(session.id, rejoin.request_id, epoch.id),
            fx.Record("gms.session", said, {"engine": rejoin.engine, "epoch": epoch.id}),
        ]


def _rejoin_of(session: Session) -> ev.Rejoin:
    if session.rejoin is None:
        raise InvariantError(f"session {session.id} is {session.state} without having rejoined")
    return session.rejoin


def _who(session: Session) -> tuple[str, str, int]:
    return session.request.engine, session.request.incarnation, session.request.rank


def orphans_of(
    ids: Iterable[str], record: ev.JournalRecord | None, history: Collection[str] = ()
) -> list[Epoch]:
    """The epochs that a server starts with: those of which there are files, and what the journal
    knows of them, unless their files say that they are history."""
    orphans = {id_: Epoch(id_, EpochPhase.ORPHANED, is_history=id_ in history) for id_ in ids}
    if record is not None and record.epoch not in history:
        known = orphans.setdefault(record.epoch, Epoch(record.epoch, EpochPhase.ORPHANED))
        # Its slabs are not known before it is back; for the books it is one piece until then.
        known.slab_sizes, known.expected = [record.size_bytes], record
        previous = record.previous
        older = orphans.get(previous.epoch) if previous is not None else None
        if previous is not None and older is not None and not older.is_history:
            older.slab_sizes, older.fallback = [previous.size_bytes], previous
    return list(orphans.values())
