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
from gms.core.events import Mode
from gms.core.region import WRITER_STATES, RegionPhase, Session, SessionState
from gms.core.snapshot import epochs_in_full, weights_snapshot
from gms.core.upkeep import Epoch
from gms.core.weights import WeightsMachine
from gms.manifest import TensorRecord, encode, identity_hash, layout_hash
from plumbing.errors import UnderstudyError

MIB = 1 << 20
CAPACITY = 10 * MIB
OLD, STRAY, NOWHERE = "a" * 32, "b" * 32, "c" * 32
IDENTITIES: tuple[Any, ...] = ({"v": 1}, {"v": 2}, None, {"v": b"no plain data"}, {"v": 1})
MODES = tuple(Mode)
STATES_WITH_EPOCH = WRITER_STATES | {SessionState.READING, SessionState.RETURNING}
FINAL = (
    msg.WritingMsg, ev.SendRegion, msg.AllocatedMsg, msg.CommittedMsg, msg.KeptMsg,
    msg.DroppedMsg, msg.VerifiedMsg, ev.RefuseRequest,
)  # fmt: skip
SPEAKER = {
    **dict.fromkeys((3, 4, 5, 6, 7), SessionState.WRITING),
    10: SessionState.READING,
}
NO_ANSWER = (msg.ProgressMsg, msg.CondemnMsg, msg.DigestMsg)


def manifest_for(sizes: Any) -> bytes:
    return encode([TensorRecord("t", 0, 16, (4,), "float32")] if sum(sizes) >= 16 else [])


class Fuzzed:
    """A machine, its driver's queue, and the connections that speak to it."""

    def __init__(self, start: int) -> None:
        ids = (f"{n:032x}" for n in itertools.count(1))
        orphans = [Epoch(STRAY, RegionPhase.ORPHANED)] if start & 1 else []
        if start & 2:
            manifest = manifest_for([MIB])
            hashed = layout_hash([MIB], manifest)
            record = ev.JournalRecord(OLD, MIB, hashed, identity_hash({"v": 1}))
            told = None if start & 4 else record  # a journal that is lost tells nothing
            orphans.append(Epoch(OLD, RegionPhase.ORPHANED, expected=told))
        self.machine = WeightsMachine(
            capacity_bytes=CAPACITY,
            granularity_bytes=4096,
            stall_ms=1000,
            new_epoch_id=lambda: next(ids),
            orphans=orphans,
            is_journal_lost=bool(start & 4),
        )
        self.device = self.machine
        self.now_ms = 0.0
        self.driver: deque[ev.Effect] = deque()
        self.watched: set[str] = set()
        self.next_session, self.steps = 1, 0
        self.open: dict[int, set[int]] = {}  # connections that may speak: requests without answer
        self.closing: set[int] = set()  # told no, not yet heard to be closed
        self.tell(ev.DeadlinePassed())  # watches what is there

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
        elif self.device.regions:
            epoch = sorted(self.device.regions)[who % len(self.device.regions)]
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
        before = pickle.dumps((self.device.sessions, self.device.regions))
        if not isinstance(event.message, NO_ANSWER):
            self.open[session].add(request)
        try:
            self.tell(event)
        except UnderstudyError:
            after = pickle.dumps((self.device.sessions, self.device.regions))
            assert after == before, "refused, and changed"
            self.hang_up(session)

    def event(self, kind: int, session: int, request: int, how: int) -> ev.Received:
        found = self.device.sessions.get(session)
        epoch = self.device.regions.get(found.region or "") if found else None
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
                told = (
                    found.request.identity
                    if found and isinstance(found.request, msg.AttachMsg)
                    else None
                )
                return ev.Received(
                    session, request, msg.CommitMsg(told or identity or {}, manifest, hashed)
                )
            case 8 | 9:
                ids = [OLD, STRAY, NOWHERE, *sorted(self.device.regions)]
                said = ids[how % len(ids)]  # never one that is yet to be drawn: they are random
                slabs = () if wrong else (MIB,)
                manifest = manifest_for(slabs)
                hashed = "0" * 64 if how >= 250 else layout_hash(slabs, manifest)
                held = msg.HeldEpoch(how % 3 > 0, identity or {"v": 1}, hashed)
                who = f"e{session}", f"i{session}"
                message = msg.HandBackMsg(*who, said, slabs, epoch=held, manifest=manifest)
                return ev.Received(session, request, message)
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
                self.tell(ev.DriverFailed(session, UnderstudyError("gms.device_full", "drawn")))
            case ev.CreateSlab(session):
                self.tell(ev.DriverFailed(session, error) if failed else ev.SlabCreated(session))
            case ev.SealEpoch(session):
                self.tell(ev.DriverFailed(session, error) if failed else ev.Sealed(session, 1))
            case ev.TakeBack(region):
                self.tell(ev.RegionNotBack(region, error) if failed else ev.RegionBack(region, 1))
            case ev.WriteJournal(committing):
                self.tell(ev.Journalled(committing, "disk" if failed else ""))
            case ev.Release(region):
                self.tell(ev.RegionReleased(region))

    def free(self, who: int) -> None:
        """The kernel says that no process holds a watched file."""
        if self.watched:
            epoch = sorted(self.watched)[who % len(self.watched)]
            self.watched.discard(epoch)
            self.tell(ev.RegionFree(epoch))

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

    def tell(self, event: ev.MemoryEvent) -> None:
        committed = self.device.committed
        effects = self.machine.handle(event, self.now_ms)
        for effect in effects:
            self.perform(effect)
        self.check()
        if committed is not None and self.device.committed is not committed:
            self.check_succession(event, committed, effects)

    def perform(self, effect: ev.Effect) -> None:
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
        elif isinstance(effect, ev.Watch):
            self.watched.add(effect.region)
        elif isinstance(effect, ev.Unwatch):
            self.watched.discard(effect.region)
        elif not isinstance(effect, ev.RecordEvent):
            self.driver.append(effect)

    def check(self) -> None:
        epochs, sessions = self.device.regions, self.device.sessions
        phases = [epoch.phase for epoch in epochs.values()]
        assert phases.count(RegionPhase.SERVED) <= 1
        assert phases.count(RegionPhase.MAKING) <= 1
        writers = [s for s in sessions.values() if s.state in WRITER_STATES]
        assert len(writers) == phases.count(RegionPhase.MAKING)
        for session in sessions.values():
            assert session.state not in (SessionState.OPEN, SessionState.CLOSED)
            assert session.id in self.open or session.id in self.closing
            assert (session.state in STATES_WITH_EPOCH) == (session.region is not None)
            self.check_session(session, epochs.get(session.region or ""))
        for epoch in epochs.values():
            if epoch.phase is RegionPhase.RETIRED and not self.device.is_held(epoch):
                assert epoch.id in self.watched, "memory that nobody reads was not given up"
        self.steps += 1
        if self.steps % 8:
            return
        document = weights_snapshot(self.device, lambda instant_ms: f"{instant_ms:g}")
        msgpack.packb({**document, "epochs": epochs_in_full(self.device)})

    @staticmethod
    def check_session(session: Session, epoch: Epoch | None) -> None:
        if session.state in WRITER_STATES:
            assert epoch is not None
            assert epoch.phase is RegionPhase.MAKING
        elif session.state is SessionState.READING:
            # A reader that came back after its epoch was given up is still one: its flock, not its
            # session, is what keeps the memory from being given to the next writer.
            came_late = isinstance(session.request, msg.HandBackMsg)
            assert came_late or (
                epoch is not None and epoch.phase in (RegionPhase.SERVED, RegionPhase.RETIRED)
            )

    def check_succession(self, event: ev.MemoryEvent, old: Epoch, effects: list[ev.Effect]) -> None:
        """What is committed goes only by a commit, by word of an operator or a reader, or to make
        room for a writer who asked to replace it while nobody reads it."""
        message = event.message if isinstance(event, ev.Received) else None
        if isinstance(event, ev.Journalled) or isinstance(message, msg.DropMsg | msg.CondemnMsg):
            return
        writer = self.device.writer
        assert writer is not None, f"{event} lost what was committed"
        assert writer.may_replace
        assert not self.device.is_held(old)
        assert ev.Watch(old.id, ends=True) in effects

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
        left = [epoch.phase for epoch in self.device.regions.values()]
        assert left in ([], [RegionPhase.SERVED])


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
