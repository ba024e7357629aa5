"""A pod of engines whose ranks load their weights, each from its own device's memory service.

The real machines of the devices and of every incarnation's way to its weights, in an order that one
seed draws: connects, grants, allocations, commits, attaches, completions, deaths and relaunches,
and the hazards that a test allows. Checked after every step, in physical terms: one copy per device
unless an operator has dropped the first, nothing committed is lost or altered, a whole engine has
one checkpoint. When the faults stop, everything must settle without the help of any deadline: a
schedule in which nothing can happen any more while somebody could be whole is a deadlock.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from engine.core.loading import Loading, Role
from gms import messages as msg
from gms.core import events as ev
from gms.core.region import S
from tests.sim import faults
from tests.sim.faults import Hazard
from tests.sim.gms_device import MIB, SLAB_BYTES, Copy, Move, SimDevice
from tests.sim.loader_lock import LoaderLock
from tests.sim.tp_engine import Engine
from tests.sim.tp_rank import EOF, KEEPS, SLABS, At, Rank

SETTLE_STEPS = 20_000
SLOW_DEATH = 0.85  # how often an exiting process is not the one that gets on
RETRY_MS = 1000  # time that settling may let pass at once: enough for every retry of a server
PATIENCE = 5  # times that settling lets pass in a row

ROOMY, TIGHT = 64 * MIB, (SLABS + 1) * SLAB_BYTES  # many copies; one copy and a bit


class Deadlock(AssertionError):
    """Nothing can happen any more, and some engine that could be whole is not."""


class World:
    loading_type: Callable[[Role], Loading] = Loading
    device_type: type[SimDevice] = SimDevice
    hazards = Hazard.DEATHS | Hazard.DRIVER

    def __init__(
        self,
        seed: int,
        roles: Sequence[Role],
        devices: int,
        *,
        has_barrier: bool | None = None,
        in_container: bool | None = None,
        hazards: Hazard | None = None,
        is_tight: bool = False,
    ) -> None:
        """`None` leaves to the seed what kind of pod this is; `is_tight`: two copies do not fit."""
        self.rng = random.Random(seed)
        drawn = [self.rng.random() < 0.7, self.rng.random() < 0.5]
        self.has_barrier = drawn[0] if has_barrier is None else has_barrier
        self.in_container = drawn[1] if in_container is None else in_container
        self.hazards = self.hazards if hazards is None else hazards
        # Somebody restarts engines that have an old checkpoint, in the end. Where only one copy
        # fits, or only one engine may write, nobody else could make way for the new one.
        has_shadow = any(not role.may_write for role in roles)
        self.has_operator = is_tight or has_shadow or self.rng.random() < 0.5
        self.is_tight = is_tight
        self.version = 1  # of the checkpoint on disk
        self.now_ms = 0.0
        self.trace: list[str] = []
        self.processes: list[Rank] = []
        self.held_back: set[tuple[str, int]] = set()  # ranks that a test keeps from doing anything
        self.whole_total = 0
        self._exits: set[str] = set()
        self._sessions: dict[int, Rank] = {}
        self._numbers = itertools.count(1)
        self.devices = [self._device(number) for number in range(devices)]
        self.loader = LoaderLock()
        self.engines = [
            Engine(self, f"engine-{number}", role, devices) for number, role in enumerate(roles)
        ]

    def _device(self, number: int) -> SimDevice:
        return self.device_type(
            f"HOST-{number}",
            self._deliver,
            lambda: {p.holds for p in self.processes if p.number == number and p.holds},
            capacity_bytes=TIGHT if self.is_tight else ROOMY,
        )

    def identity(self, version: int, rank: int) -> dict[str, Any]:
        """What a rank says that its weights are."""
        return {"version": version, "rank": rank, "ranks": len(self.devices)}

    # ------------------------------------------------------------------ what its parts ask

    def new_supervisor(self) -> str:
        return f"{next(self._numbers):016x}"

    def new_incarnation(self, engine: str) -> str:
        return f"{engine}-{next(self._numbers):016x}"

    def open_session(self, rank: Rank) -> int:
        session = next(self._numbers)
        self._sessions[session] = rank
        return session

    def close_session(self, rank: Rank) -> None:
        """One side ends the connection; the server notices later."""
        if rank.session is not None and self._sessions.pop(rank.session, None) is not None:
            rank.device.closing.append(rank.session)

    def cut_session(self, rank: Rank) -> None:
        """Neither side ends it, and both see it end."""
        self.close_session(rank)
        rank.inbox.append((EOF, None))

    def crash(self, device: SimDevice, how: Callable[[], None] | None = None) -> None:
        """A server dies: every session with it ends, after what had been sent."""
        (how or device.crash)()
        number = self.devices.index(device)
        for session, rank in list(self._sessions.items()):
            if rank.number == number:
                del self._sessions[session]
                rank.inbox.append((EOF, None))

    def _deliver(self, session: int, answer: Any, copy: Copy | None) -> None:
        rank = self._sessions.get(session)
        if rank is None or isinstance(answer, msg.WaitingMsg):
            return
        rank.inbox.append((answer, copy))
        if isinstance(answer, ev.RefuseRequest):  # the server closes after it
            self.close_session(rank)

    def may_restart(self, engine: Engine) -> bool:
        """A container starts again once everything in it is dead; a bare process at once."""
        mine = [p for p in self.processes if p.engine is engine]
        return not (self.in_container and mine)

    # ------------------------------------------------------------------ a schedule

    def moves(self) -> list[Move]:
        """Everything that may come next without a fault."""
        found: list[Move] = []
        for engine in self.engines:
            found += engine.moves()
        exits = [(f"{p.name} is gone", p.reap) for p in self.processes if p.at is At.DYING]
        self._exits = {name for name, _ in exits}
        found += exits
        for device in self.devices:
            found += device.moves()
            stale = device.stale(self.version) if Hazard.CHECKPOINT in self.hazards else None
            if stale is not None:
                found.append((f"DROP on {device.name}", lambda d=device, s=stale: d.drop(s)))
        return found

    def step(self, fault_rate: float = 0.0) -> bool:
        """One thing happens; False: nothing can."""
        moves = faults.of(self) if self.rng.random() < fault_rate else self.moves()
        if not moves:
            return False
        if self.rng.random() < SLOW_DEATH:  # exiting takes long, beside everything else
            moves = [m for m in moves if m[0] not in self._exits] or moves
        name, move = self.rng.choice(moves)
        self.trace.append(name)
        move()
        if self.rng.random() < 0.05:
            self.pass_time(self.rng.choice((1, 10, 100)))
        self.check()
        return True

    def pass_time(self, ms: float) -> None:
        self.now_ms += ms
        for device in self.devices:
            device.pass_time(self.now_ms)

    def run(self, steps: int, fault_rate: float) -> None:
        for _ in range(steps):
            self.step(fault_rate)

    # ------------------------------------------------------------------ the end

    @property
    def expected_whole(self) -> list[Engine]:
        """A shadow never writes: without an engine that may, it waits for ever, which is right."""
        return self.engines if any(e.role.may_write for e in self.engines) else []

    def settle(self) -> None:
        """The faults stop: every engine that can be whole becomes so, and nothing else is left."""
        self.trace.append("-- faults stop --")
        for engine in self.engines:
            engine.is_stopped = False
            if self.has_operator and engine.is_outdated:
                engine.fail("restarted by its operator")
        self._come_to_rest()
        missing = [e.name for e in self.expected_whole if not e.is_whole]
        if missing:
            where = [f"{p.name} {p.at}" for p in self.processes]
            raise Deadlock(f"{missing} cannot become whole: {where}")
        self._check_rest()

    def _come_to_rest(self) -> None:
        patience = PATIENCE
        for _ in range(SETTLE_STEPS):
            if self.step():
                patience = PATIENCE
            elif patience == 0:
                return
            else:
                patience -= 1
                self.pass_time(RETRY_MS)
        raise Deadlock(f"no end after {SETTLE_STEPS} steps")

    def _check_rest(self) -> None:
        """What is left is what is in use."""
        assert self.loader.is_free, "somebody keeps the loader lock"
        for number, device in enumerate(self.devices):
            state = device.machine
            mine = {p.session for p in self.processes if p.number == number}
            assert set(state.sessions) == mine, "every process has its session, and nobody else"
            states = {session.state for session in state.sessions.values()}
            assert states <= {S.READING, S.WAITING}, states
            committed = {state.committed.id} if state.committed else set()
            read = {epoch.id for epoch in state.regions.values() if state.is_held(epoch)}
            assert set(state.regions) == device.files == committed | read
            assert committed <= set(device.vault) <= committed | read, "a leak"
            assert (device.journal.epoch if device.journal else None) in (*committed, None)
            if not self.expected_whole:
                assert not committed
                assert [s.reason for s in state.waiting] == ["not_committed"] * len(self.engines)
            elif self.has_operator:
                assert read == committed, "everybody has the newest weights"

    # ------------------------------------------------------------------ what must always hold

    def check(self) -> None:
        for number, device in enumerate(self.devices):
            self._check_copies(device)
            mine = [p for p in self.processes if p.number == number]
            device.check_not_lost([p.holds for p in mine if p.at in KEEPS])
        for engine in self.engines:
            if engine.is_whole:
                self.whole_total += 1
                contents = {frozenset(rank.copy.contents) for rank in engine.ranks if rank.copy}
                assert len(contents) == 1, f"{engine.name} is whole with mixed weights: {contents}"

    def copies(self, device: SimDevice) -> list[Copy]:
        """Every physical copy on a device, a dying process's included."""
        number = self.devices.index(device)
        mapped = [p.copy for p in self.processes if p.number == number and p.copy]
        every = dict.fromkeys([*device.vault.values(), *device.offered.values(), *mapped])
        return [copy for copy in every if copy.slab_sizes]

    def _check_copies(self, device: SimDevice) -> None:
        copies = self.copies(device)
        assert len(copies) <= 1 or device.was_dropped, f"doubled on {device.name}: {copies}"
