"""The session machine under scripts: three bytes are one thing that happens (what, who, how).

Whatever a peer may say it may say at any moment, right or wrong; driver calls complete in order,
well or badly, early or long after their session has left; files of epochs become free. After every
step the tables must agree with each other. A script is bytes, so that the corpus can keep it and a
fuzzer can cut it.
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from typing import Any

import msgpack

from gms import messages as msg
from gms.core import events as ev
from gms.core.device import epochs_in_full, snapshot
from gms.core.events import EpochPhase, Mode, SessionState
from gms.core.machine import DeviceMachine
from gms.core.state import WRITER_STATES, Epoch, Session
from gms.manifest import TensorRecord, encode, identity_hash, layout_hash
from plumbing.errors import UnderstudyError

MIB = 1 << 20
CAPACITY = 10 * MIB
OLD, STRAY, NOWHERE = "a" * 32, "b" * 32, "c" * 32
IDENTITIES: tuple[Any, ...] = ({"v": 1}, {"v": 2}, None, {"v": b"no plain data"}, {"v": 1})
MODES = tuple(Mode)
STATES_WITH_EPOCH = WRITER_STATES | {
    SessionState.READING, SessionState.OFFERING, SessionState.ADOPTING,
}  # fmt: skip
FINAL = (
    ev.GrantWriting, ev.SendEpoch, msg.AllocatedMsg, msg.CommittedMsg, msg.RejoinedMsg,
    msg.DroppedMsg, msg.VerifiedMsg, ev.RefuseRequest,
)  # fmt: skip
SPEAKER = {
    **dict.fromkeys((3, 4, 5, 6, 7), SessionState.WRITING),
    9: SessionState.OFFERING,
    10: SessionState.READING,
}
NO_ANSWER = (msg.ProgressMsg, msg.CondemnMsg, msg.DigestMsg)


def manifest_for(sizes: Any) -> bytes:
    return encode([TensorRecord("t", 0, 16, (4,), "float32")] if sum(sizes) >= 16 else [])


class Fuzzed:
    """A machine, its driver's queue, and the connections that speak to it."""

    def __init__(self, start: int) -> None:
        ids = (f"{n:032x}" for n in itertools.count(1))
        orphans = [Epoch(STRAY, EpochPhase.ORPHANED)] if start & 1 else []
        if start & 2:
            manifest = manifest_for([MIB])
            hashed = layout_hash([MIB], manifest)
            record = ev.JournalRecord(OLD, MIB, hashed, identity_hash({"v": 1}))
            told = None if start & 4 else record  # a journal that is lost tells nothing
            orphans.append(Epoch(OLD, EpochPhase.ORPHANED, expected=told))
        self.machine = DeviceMachine(
            capacity_bytes=CAPACITY,
            granularity_bytes=4096,
            stall_ms=1000,
            new_epoch_id=lambda: next(ids),
            orphans=orphans,
            is_journal_lost=bool(start & 4),
        )
        self.device = self.machine.device
        self.now_ms = 0.0
        self.driver: deque[ev.DeviceEffect] = deque()
        self.watched = {orphan.id for orphan in orphans}
        self.next_session, self.steps = 1, 0
        self.open: dict[int, set[int]] = {}  # connections that may speak: requests without answer
        self.closing: set[int] = set()  # told no, not yet heard to be closed

    # ------------------------------------------------------------------ what happens

    def run(self, script: bytes) -> None:
        for at in range(0, len(script) - 2, 3):
            self.step(*script[at : at + 3])

    def step(self, what: int, who: int, how: int) -> None:
        kind = what % 20
        if kind < 12:
            self.say(kind, who, how)
        elif kind < 16:
            self.complete(how)
        elif kind == 16:
            self.free(who)
        elif kind == 17:
            self.leave(who)
        elif kind == 18:
            self.tick(10 ** (how % 7))
        elif self.device.epochs:
            epoch = sorted(self.device.epochs)[who % len(self.device.epochs)]
            self.tell(ev.HoldersSeen(epoch, (how,)))

    def say(self, kind: int, who: int, how: int) -> None:
        """One of at most eight connections says something; a new one where there is room."""
        if len(self.open) < 8 and (not self.open or who & 1):
            self.open[self.next_session] = set()
            self.next_session += 1
        speakers = sorted(self.open)
        if how % 4:  # mostly by somebody for whom it makes sense
            wanted = SPEAKER.get(kind)
            sessions = self.device.sessions
            apt = [s for s in speakers if s in sessions and sessions[s].state is wanted]
            speakers = apt or speakers
        session = speakers[(who >> 1) % len(speakers)]
        request = max(self.open[session], default=0) + 1
        event = self.event(kind, session, request, how)
        before = pickle.dumps((self.device.sessions, self.device.epochs))
        if not isinstance(event.message, NO_ANSWER):
            self.open[session].add(request)
        try:
            self.tell(event)
        except UnderstudyError:
            after = pickle.dumps((self.device.sessions, self.device.epochs))
            assert after == before, "refused, and changed"
            self.hang_up(session)

    def event(self, kind: int, session: int, request: int, how: int) -> ev.Received:
        found = self.device.sessions.get(session)
        epoch = self.device.epochs.get(found.epoch or "") if found else None
        sizes = list(epoch.slab_sizes) if epoch else []
        identity = IDENTITIES[how % len(IDENTITIES)]
        wrong = how >= 200
        match kind:
            case 0 | 1 | 2:
                attach = msg.AttachMsg(
                    f"e{session}", f"i{session}", MODES[how % 3], identity,
                    wait_ms=100 * how, replace=bool(how & 8),
                )  # fmt: skip
                return ev.Received(session, request, attach, pid=how)
            case 3 | 4:
                return ev.Received(session, request, msg.AllocateMsg(1 + how * 65536))
            case 5:
                return ev.Received(session, 0, msg.ProgressMsg(how, 255))
            case 6 | 7:
                manifest = b"\x90" if wrong else manifest_for(sizes)
                hashed = "0" * 64 if how >= 250 else layout_hash(sizes, manifest)
                told = found.attach.identity if found and found.attach else None
                return ev.Received(
                    session, request, msg.CommitMsg(told or identity or {}, manifest, hashed)
                )
            case 8:
                ids = [OLD, STRAY, NOWHERE, *sorted(self.device.epochs)]
                size = () if wrong else (MIB,)
                said = ids[how % len(ids)]  # never one that is yet to be drawn: they are random
                return ev.Received(
                    session,
                    request,
                    msg.RejoinMsg(f"e{session}", f"i{session}", said, size, how % 3 > 0),
                )
            case 9:
                known = found.rejoin.slab_sizes if found and found.rejoin else ()
                manifest = manifest_for(known)
                hashed = "0" * 64 if wrong else layout_hash(known, manifest)
                offer = msg.OfferMsg(OLD, identity or {"v": 1}, manifest, hashed)
                return ev.Received(session, request, offer)
            case 10:
                if how & 1:
                    why = ("device_error", "canary", "boredom")[how % 3]
                    return ev.Received(session, 0, msg.CondemnMsg(why, "detail"))
                return ev.Received(session, how % 3, msg.DigestMsg(None if wrong else "d" * 64))
            case _:
                if how & 1:
                    return ev.Received(session, request, msg.VerifyMsg())
                return ev.Received(
                    session, request, msg.DropMsg(None if how & 2 else OLD, bool(how & 4))
                )

    def complete(self, how: int) -> None:
        """The driver's oldest call is done, well or badly."""
        if not self.driver:
            return
        effect = self.driver.popleft()
        error = UnderstudyError("gms.driver_failed", "as drawn")
        failed = how % 8 == 7
        match effect:
            case ev.OpenEpoch(session):
                self.tell(ev.DriverFailed(session, error) if failed else ev.EpochOpened(session))
            case ev.CreateSlab(session) if how % 8 == 6:
                self.tell(ev.DeviceFull(session, error))
            case ev.CreateSlab(session):
                self.tell(ev.DriverFailed(session, error) if failed else ev.SlabCreated(session))
            case ev.SealEpoch(session):
                self.tell(ev.DriverFailed(session, error) if failed else ev.Sealed(session, 1))
            case ev.AdoptEpoch(session):
                self.tell(ev.DriverFailed(session, error) if failed else ev.Adopted(session, 1))
            case ev.WriteJournal(None):
                self.tell(ev.JournalBehind("disk") if failed else ev.JournalKept())
            case ev.WriteJournal(int(session)):
                self.tell(ev.JournalFailed(session, "disk") if failed else ev.Journalled(session))
            case ev.ReleaseEpoch(epoch):
                self.watched.add(epoch)

    def free(self, who: int) -> None:
        """The kernel says that no process holds a watched file."""
        if self.watched:
            epoch = sorted(self.watched)[who % len(self.watched)]
            self.watched.discard(epoch)
            self.tell(ev.EpochFree(epoch))

    def leave(self, who: int) -> None:
        """A connection is closed: a refused one first."""
        leaving = sorted(self.closing) or sorted(self.open)
        if leaving:
            session = leaving[who % len(leaving)]
            self.hang_up(session)
            self.closing.discard(session)
            self.tell(ev.Closed(session, "drawn"))

    def hang_up(self, session: int) -> None:
        if self.open.pop(session, None) is not None:
            self.closing.add(session)

    def tick(self, ms: float) -> None:
        self.now_ms += ms
        self.tell(ev.DeadlinePassed())
        due_ms = self.machine.next_deadline_ms()
        assert due_ms is None or due_ms > self.now_ms, "a deadline that has passed comes again"

    # ------------------------------------------------------------------ what must hold

    def tell(self, event: ev.DeviceEvent) -> None:
        committed = self.device.committed
        effects = self.machine.handle(event, self.now_ms)
        for effect in effects:
            self.perform(effect)
        self.check()
        if committed is not None and self.device.committed is not committed:
            self.check_succession(event, committed, effects)

    def perform(self, effect: ev.DeviceEffect) -> None:
        if isinstance(effect, ev.Respond):
            unanswered = self.open.get(effect.session)
            if unanswered is None:
                return
            sent = effect.message if isinstance(effect, ev.SendMessage) else effect
            if isinstance(sent, FINAL) and effect.request_id:
                assert effect.request_id in unanswered, f"answered twice or unasked: {effect}"
                unanswered.discard(effect.request_id)
            if isinstance(effect, ev.RefuseRequest):
                self.hang_up(effect.session)
        elif isinstance(effect, ev.Unwatch):
            self.watched.discard(effect.epoch)
        elif not isinstance(effect, ev.RecordEvent):
            self.driver.append(effect)

    def check(self) -> None:
        epochs, sessions = self.device.epochs, self.device.sessions
        phases = [epoch.phase for epoch in epochs.values()]
        assert phases.count(EpochPhase.COMMITTED) <= 1
        assert phases.count(EpochPhase.STAGING) <= 1
        writers = [s for s in sessions.values() if s.state in WRITER_STATES]
        assert len(writers) == phases.count(EpochPhase.STAGING)
        for session in sessions.values():
            assert session.state not in (SessionState.OPEN, SessionState.CLOSED)
            assert session.id in self.open or session.id in self.closing
            assert (session.state in STATES_WITH_EPOCH) == (session.epoch is not None)
            epoch = epochs.get(session.epoch or "")
            if session.epoch is not None and not self.is_late_survivor(session, epoch):
                assert epoch is not None
                self.check_epoch(epoch, session.id, session.state)
        for epoch in epochs.values():
            assert epoch.readers <= set(sessions)
            assert all(sessions[reader].epoch == epoch.id for reader in epoch.readers)
            if epoch.phase is EpochPhase.SUPERSEDED:
                assert epoch.readers, "superseded memory that nobody reads was not given up"
        self.steps += 1
        if self.steps % 8:
            return
        document = snapshot(self.device, lambda instant_ms: f"{instant_ms:g}")
        msgpack.packb({**document, "epochs": epochs_in_full(self.device)})

    @staticmethod
    def is_late_survivor(session: Session, epoch: Epoch | None) -> bool:
        """A reader that came back after its epoch was given up is still a reader; its
        flock, not its session, is what keeps the memory from being given to the next writer."""
        if session.rejoin is None or session.state is not SessionState.READING:
            return False
        if epoch is None or epoch.phase is EpochPhase.RELEASING:
            return True
        return session.id not in epoch.readers  # given up, and claimed anew by another survivor

    def check_epoch(self, epoch: Epoch, session: int, state: SessionState) -> None:
        if state in WRITER_STATES:
            assert epoch.phase is EpochPhase.STAGING
        elif state is SessionState.READING:
            assert epoch.phase in (EpochPhase.COMMITTED, EpochPhase.SUPERSEDED)
            assert session in epoch.readers
        else:
            assert epoch.phase is EpochPhase.ORPHANED

    def check_succession(
        self, event: ev.DeviceEvent, old: Epoch, effects: list[ev.DeviceEffect]
    ) -> None:
        """What is committed goes only by a commit, by word of an operator or a reader, or to make
        room for a writer who asked to replace it while nobody reads it."""
        message = event.message if isinstance(event, ev.Received) else None
        if isinstance(event, ev.Journalled) or isinstance(message, msg.DropMsg | msg.CondemnMsg):
            return
        writer = self.device.writer
        assert writer is not None, f"{event} lost what was committed"
        assert writer.request.replace
        assert not old.readers
        assert ev.ReleaseEpoch(old.id) in effects

    def finish(self) -> None:
        """Everybody leaves, every call completes, every file becomes free: nothing remains but
        what is committed."""
        while self.open or self.closing:
            self.leave(0)
        while self.driver or self.watched:
            while self.driver:
                self.complete(0)
            self.free(0)
        assert not self.device.sessions
        left = [epoch.phase for epoch in self.device.epochs.values()]
        assert left in ([], [EpochPhase.COMMITTED])


def run(script: bytes) -> None:
    """Run a whole script; its first byte says what an earlier server left."""
    if script:
        world = Fuzzed(script[0])
        world.run(script[1:])
        world.finish()


def summary(script: bytes) -> dict[str, int]:
    """How often each state was reached: that a script goes anywhere at all."""
    world, seen = Fuzzed(script[0]), dict.fromkeys(SessionState, 0)
    for at in range(1, len(script) - 2, 3):
        world.step(*script[at : at + 3])
        for session in world.device.sessions.values():
            seen[session.state] += 1
    return {str(state): count for state, count in seen.items()}
