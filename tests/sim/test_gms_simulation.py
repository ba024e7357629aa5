"""The memory service's machine under random schedules: processes that die at every step, servers
that crash, completions that come late, flocks that outlive connections.

The model around it is small on purpose: processes hold an epoch's file from before they map until
they are reaped, some time after their connection closed; the driver completes calls in order, but
whenever it likes. Everything is drawn from one seed, which a failure prints.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from gms import messages as msg
from gms.core import events as ev
from gms.core import events as fx
from gms.core.device import snapshot
from gms.core.events import EpochPhase, Mode, SessionState
from gms.core.machine import DeviceMachine
from gms.core.state import WRITER_STATES, Epoch
from gms.manifest import TensorRecord, encode, layout_hash
from plumbing.errors import UnderstudyError
from plumbing.wire.messages import Message
from tests.sim.seeds import replayable, seeds

MIB = 1 << 20
CAPACITY = 10 * MIB
STEPS = 250


@dataclass
class Process:
    """A client: its connection may end long before the process does."""

    session: int
    asked: msg.AttachMsg
    is_connected: bool = True
    holds: str | None = None  # the epoch whose file it has locked
    mode: str = ""  # "rw" or "ro" once granted
    slabs: int = 0
    answers: list[str] = field(default_factory=list)  # to the attach request
    is_busy: bool = False  # a request of its own is open


class World:
    """One device, its servers one after the other, and its clients."""

    def __init__(self, seed: int, *, may_replace: bool) -> None:
        self.rng = random.Random(seed)
        self.may_replace = may_replace
        self.ids = itertools.count(1)
        self.sessions = itertools.count(1)
        self.now_ms = 0.0
        self.processes: dict[int, Process] = {}
        self.files: set[str] = set()  # epoch files on disk
        self.contents: dict[str, int] = {}  # epoch -> checkpoint version, once sealed
        self.journal: ev.JournalRecord | None = None
        self.ever_replaced = False
        self.boot()

    def boot(self) -> None:
        orphans = {e: Epoch(e, EpochPhase.ORPHANED) for e in sorted(self.files)}
        if self.journal is not None:
            orphan = Epoch(self.journal.epoch, EpochPhase.ORPHANED)
            orphan.slab_sizes, orphan.expected = [self.journal.size_bytes], self.journal
            orphans[orphan.id] = orphan
        self.machine = DeviceMachine(
            capacity_bytes=CAPACITY,
            granularity_bytes=4096,
            stall_ms=5000,
            new_epoch_id=lambda: f"{next(self.ids):032x}",
            orphans=orphans.values(),
        )
        self.device = self.machine.device
        self.driver: deque[fx.DeviceEffect] = deque()
        self.slabs: dict[str, int] = {}  # what this server's vault holds, by epoch
        self.sealed: set[str] = set()
        self.watched = set(orphans)

    # ------------------------------------------------------------------ machine and driver

    def tell(self, event: ev.DeviceEvent) -> None:
        try:
            effects = self.machine.handle(event, self.now_ms)
        except UnderstudyError:
            assert isinstance(event, ev.SessionEvent)
            self.disconnect(self.processes[event.session])
            return
        for effect in effects:
            self.perform(effect)
        self.check()

    def perform(self, effect: fx.DeviceEffect) -> None:
        if isinstance(effect, fx.Respond):
            process = self.processes.get(effect.session)
            if process is not None and process.is_connected:
                self.hear(process, effect.message if isinstance(effect, fx.SendMessage) else effect)
        elif not isinstance(effect, fx.RecordEvent):
            self.driver.append(effect)

    def hear(self, process: Process, answer: Message | fx.Respond) -> None:
        process.is_busy = isinstance(answer, msg.WaitingMsg)
        match answer:
            case fx.GrantWriting():
                process.answers.append("writing")
                process.mode, process.holds = "rw", answer.epoch
                assert answer.epoch in self.files
            case fx.SendEpoch():
                process.answers.append("attached")
                process.mode, process.holds = "ro", answer.epoch
                assert answer.epoch in self.sealed, "a reader may only see what is sealed"
                committed = self.device.committed
                assert committed is not None
                assert committed.id == answer.epoch
                wanted = process.asked.identity
                assert wanted is None or wanted["v"] == self.contents[answer.epoch]
            case msg.AllocatedMsg():
                process.slabs += 1
            case msg.CommittedMsg():
                process.mode = "ro"
                assert self.journal is not None
                assert self.journal.epoch == answer.epoch, "journalled before it is answered"
            case fx.RefuseRequest():
                process.answers.append("refused")
                self.disconnect(process)

    def complete_one(self) -> None:
        """The driver's oldest call completes; if its session has left, the call was made anyway."""
        effect = self.driver.popleft()
        match effect:
            case fx.OpenEpoch():
                self.files.add(effect.epoch)
                self.slabs[effect.epoch] = 0
                self.tell(ev.EpochOpened(effect.session))
            case fx.CreateSlab():
                self.slabs[effect.epoch] += effect.size_bytes
                self.tell(ev.SlabCreated(effect.session))
            case fx.SealEpoch():
                if self.rng.random() < 0.1:
                    error = UnderstudyError("gms.still_writable", "somebody")
                    self.tell(ev.DriverFailed(effect.session, error))
                    return
                self.sealed.add(effect.epoch)
                identity = (
                    self.device.epochs[effect.epoch].identity
                    if (effect.epoch in self.device.epochs)
                    else None
                )
                if identity:
                    self.contents[effect.epoch] = identity["v"]
                self.tell(ev.Sealed(effect.session, tensors=1))
            case fx.WriteJournal():
                if effect.session is not None and self.rng.random() < 0.1:
                    self.tell(ev.JournalFailed(effect.session, "disk full"))
                    return
                self.journal = effect.record
                if effect.session is not None:
                    self.tell(ev.Journalled(effect.session))
                else:
                    self.tell(ev.JournalKept())
            case fx.ReleaseEpoch():
                self.slabs.pop(effect.epoch, None)
                self.watched.add(effect.epoch)

    def look(self) -> None:
        """The watch finds one free file, if there is one."""
        held = {p.holds for p in self.processes.values()}
        for epoch in sorted(self.watched - held):
            self.watched.discard(epoch)
            self.files.discard(epoch)
            self.tell(ev.EpochFree(epoch))
            return

    # ------------------------------------------------------------------ what clients do

    def launch(self) -> None:
        session = next(self.sessions)
        asked = msg.AttachMsg(
            f"e{session % 3}",
            f"i{session}",
            self.rng.choice([*Mode, Mode.RW_OR_RO]),
            self.rng.choice([{"v": 1}, {"v": 1}, {"v": 2}, None]),
            wait_ms=self.rng.choice([0, 1000, 60_000]),
            replace=self.may_replace and self.rng.random() < 0.3,
        )
        self.processes[session] = Process(session, asked, is_busy=True)
        self.tell(ev.Received(session, 1, asked))

    def speak(self, process: Process) -> None:
        """The client does the next thing that a writer does, or something silly."""
        session = process.session
        if process.mode != "rw":
            if self.rng.random() < 0.05:
                self.tell(ev.Received(session, 2, msg.AllocateMsg(MIB)))
            return
        choice = self.rng.random()
        process.is_busy = choice >= 0.2
        if choice < 0.2:
            self.tell(ev.Received(session, 0, msg.ProgressMsg(self.rng.randrange(100), 100)))
        elif choice < 0.6:
            self.tell(ev.Received(session, 2, msg.AllocateMsg(self.rng.choice([1, 2, 4]) * MIB)))
        else:
            sizes = self.device.epochs[str(process.holds)].slab_sizes
            manifest = encode([TensorRecord("t", 0, 16, (4,), "float32")] if sizes else [])
            version = (process.asked.identity or {"v": 1})["v"]
            identity: dict[str, Any] = {"v": version if self.rng.random() < 0.9 else 3}
            self.tell(
                ev.Received(
                    session, 3, msg.CommitMsg(identity, manifest, layout_hash(sizes, manifest))
                )
            )

    def disconnect(self, process: Process) -> None:
        """The connection closes; the process lives on for a while, and holds what it holds."""
        if process.is_connected:
            process.is_connected = False
            self.tell(ev.Closed(process.session, "eof"))

    def crash(self) -> None:
        """The server dies: its memory goes, its files stay, every connection ends."""
        for process in self.processes.values():
            process.is_connected = False
        self.boot()

    def step(self) -> None:
        connected = [p for p in self.processes.values() if p.is_connected]
        dying = [p for p in self.processes.values() if not p.is_connected]
        idle = [p for p in connected if not p.is_busy]
        moves: list[tuple[float, Any]] = [(3, self.launch if len(self.processes) < 6 else None)]
        moves.append((12, self.complete_one if self.driver else None))
        moves.append((3, self.look if self.watched else None))
        moves.append((10, (lambda: self.speak(self.rng.choice(idle))) if idle else None))
        moves.append(
            (0.7, (lambda: self.disconnect(self.rng.choice(connected))) if connected else 0)
        )
        moves.append((2, (lambda: self.reap(self.rng.choice(dying))) if dying else None))
        moves.append((1, self.pass_time))
        moves.append((0.05, self.crash))
        possible = [(weight, move) for weight, move in moves if move]
        self.rng.choices([m for _, m in possible], [w for w, _ in possible])[0]()

    def reap(self, process: Process) -> None:
        del self.processes[process.session]

    def pass_time(self) -> None:
        self.now_ms += self.rng.choice([10, 500, 3000])
        self.tell(ev.DeadlinePassed())

    # ------------------------------------------------------------------ what must always hold

    def check(self) -> None:
        device = self.device
        phases = [epoch.phase for epoch in device.epochs.values()]
        assert phases.count(EpochPhase.STAGING) <= 1
        assert phases.count(EpochPhase.COMMITTED) <= 1
        writers = [s for s in device.sessions.values() if s.state in WRITER_STATES]
        assert len(writers) <= 1
        assert bool(writers) == (EpochPhase.STAGING in phases), "staging belongs to its writer"
        for epoch in device.epochs.values():
            assert epoch.readers <= device.sessions.keys(), "readers are sessions"
            if epoch.phase is EpochPhase.SUPERSEDED:
                assert epoch.readers, "superseded without readers is a leak"
        for session in device.sessions.values():
            if session.state is SessionState.READING:
                assert session.epoch in device.epochs, "a reader's epoch is never freed"
        owned = sum(e.size_bytes for e in device.epochs.values() if e.phase != EpochPhase.ORPHANED)
        assert owned <= CAPACITY
        if EpochPhase.ORPHANED in phases:
            assert not writers, "nobody writes while an earlier server's memory is mapped"
        if not self.may_replace:
            held = {p.holds for p in self.processes.values() if p.holds in self.files}
            physical = held | {epoch for epoch, size in self.slabs.items() if size}
            assert len(physical) <= 1, f"two copies of the weights: {physical}"
        snapshot(device, str)

    def settle(self) -> None:
        """Let all processes die and everything complete; only a committed epoch may be left."""
        for process in list(self.processes.values()):
            self.disconnect(process)
        for _ in range(200):
            for process in list(self.processes.values()):
                self.reap(process)
            if self.driver:
                self.complete_one()
            self.look()
            self.pass_time()
        assert not self.driver
        assert not self.device.sessions
        committed = {self.device.committed.id} if self.device.committed else set()
        assert set(self.device.epochs) == committed
        assert set(self.slabs) == committed
        assert self.files == committed
        assert (self.journal.epoch if self.journal else None) in (*committed, None)


@pytest.mark.slow
@pytest.mark.parametrize("may_replace", [False, True])
def test_random_schedules_keep_the_invariants(may_replace: bool):
    """Random launches, deaths, crashes and late completions; invariants after every event."""
    for seed in seeds(120):
        world = World(seed, may_replace=may_replace)
        with replayable(seed, list):
            for _ in range(STEPS):
                world.step()
            world.settle()


def test_every_attach_is_answered_exactly_once_or_its_connection_ends():
    """Over many seeds without crashes, no attach is forgotten and none is answered twice."""
    for seed in range(30):
        world = World(seed, may_replace=True)
        for _ in range(STEPS):
            world.step()
            for process in world.processes.values():
                assert len(process.answers) <= 1 or process.answers == ["writing", "refused"]
        for process in list(world.processes.values()):
            still_waits = process.session in {s.id for s in world.device.waiting} or any(
                isinstance(e, fx.OpenEpoch) for e in world.driver
            )
            assert process.answers or still_waits or not process.is_connected
