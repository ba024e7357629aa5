"""Health against simulated engines and clients, in virtual time.

The engine works in steps that nothing interrupts; its counter moves at the end of each. The watch
is the real one, asked over a simulated channel. Clients keep it busy, give up, retry, come in
bursts, or stay away.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.events import EngineEvent, Failed
from engine.core.health import ANSWER_MS, HANG_ALONE_MS, HANG_MS, IDLE_CANARY_MS, INTERVAL_MS, Signs
from engine.messages import HealthyMsg
from engine.supervisor.engine import HealthWatch

LAG_MS = 60  # the longest way of an answer; also how late a timer is
LOOK_MS = INTERVAL_MS + 2 * LAG_MS
# From the first look at a request of which nothing comes: `hang_ms` while there are requests, and
# `hang_ms` more for the canary once they have gone.
BOUND_SEEN_MS = 2 * HANG_MS + 3 * LOOK_MS
BOUND_STEADY_MS = HANG_MS + 3 * LOOK_MS
# From the hang, also when no look ever meets a request: the canary that comes by itself.
BOUND_MS = IDLE_CANARY_MS + BOUND_SEEN_MS
BATCH = 4
PATTERNS = ("steady", "retrying", "bursts", "ambush")


class World:
    """Virtual time, in milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def now_ms(self) -> float:
        return self.now

    def at(self, moment_ms: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (moment_ms, next(self._order), call))

    def run(self, until_ms: float, is_over: Callable[[], bool]) -> None:
        while self._due and not is_over():
            moment_ms, _, call = heapq.heappop(self._due)
            if moment_ms > until_ms:
                return
            self.now = moment_ms
            call()


@dataclass(eq=False)
class Work:
    """A request, or the canary."""

    steps: int
    done: Callable[[], None] = field(default=lambda: None)
    is_canary: bool = False


class Engine:
    """Batched steps, first come first served, until it hangs."""

    def __init__(self, world: World, rng: random.Random, hangs_ms: float, counts: bool) -> None:
        self._world, self._rng, self._hangs_ms = world, rng, hangs_ms
        self._counts_canary = counts  # vLLM counts it as a request and a step, the reference not
        # What is healthy at most: where the canary's steps show nothing, two come between signs.
        slowest_ms = (HANG_MS - 2 * LOOK_MS) / (1 if counts else 2)
        self._step_ms = rng.choice((20, 200, 1000, slowest_ms))
        self._is_busy = False
        self.work: list[Work] = []
        self.progress = 0

    @property
    def in_flight(self) -> int:
        return sum(self._counts_canary or not work.is_canary for work in self.work)

    def submit(self, work: Work) -> None:
        self.work.append(work)
        self._step()

    def cancel(self, work: Work) -> None:
        if work in self.work:
            self.work.remove(work)

    def _step(self) -> None:
        if self._is_busy or not self.work:
            return
        self._is_busy = True
        batch = self.work[:BATCH]
        ends_ms = self._world.now + self._rng.uniform(self._step_ms / 4, self._step_ms)
        if ends_ms < self._hangs_ms:
            self._world.at(ends_ms, lambda: self._stepped(batch))

    def _stepped(self, batch: list[Work]) -> None:
        self._is_busy = False
        is_seen = self._counts_canary or not all(work.is_canary for work in batch)
        self.progress += is_seen
        for work in batch:
            work.steps -= 1
            if not work.steps and work in self.work:
                self.work.remove(work)
                work.done()
        self._step()


class Clients:
    """One pattern of load."""

    def __init__(self, world: World, rng: random.Random, engine: Engine, pattern: str) -> None:
        self._world, self._rng, self._engine = world, rng, engine
        self.patience_ms = math.inf
        self.before_canary: Callable[[], object] = lambda: None
        start = getattr(self, f"_{pattern}")
        world.at(rng.uniform(0, 2_000), start)

    def _ask(self, then: Callable[[], None] = lambda: None) -> None:
        """One request; `then` once it is answered or given up."""
        work = Work(self._rng.randint(1, 12))
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._engine.cancel(work)
                then()

        work.done = end
        if self.patience_ms < math.inf:
            self._world.at(self._world.now + self.patience_ms, end)
        self._engine.submit(work)

    def _steady(self) -> None:
        for _ in range(self._rng.randint(1, 6)):
            self._ask(lambda: self._world.at(self._world.now, self._again))

    def _again(self) -> None:
        self._ask(lambda: self._world.at(self._world.now, self._again))

    def _retrying(self) -> None:
        self.patience_ms = self._rng.choice((5, 100, 300, 1_500, 2_900, 5_000))
        pause_ms = self._rng.choice((1, 100, 300, 700, 5_000))

        def again() -> None:
            self._ask(lambda: self._world.at(self._world.now + pause_ms, again))

        again()

    def _bursts(self) -> None:
        self.patience_ms = self._rng.choice((math.inf, 400, 4_000))
        for _ in range(self._rng.randint(1, 20)):
            self._ask()
        # Often just when the idle canary comes.
        pause_ms = self._rng.choice((500, 10_000, IDLE_CANARY_MS - 100, IDLE_CANARY_MS + 100))
        self._world.at(self._world.now + pause_ms, self._bursts)

    def _ambush(self) -> None:
        """A burst that comes just before each canary, after the last look."""
        self.before_canary = lambda: [self._ask() for _ in range(self._rng.randint(0, 20))]


class Simulation:
    """A watch, its engine and its clients; `verdict` is its time and its reason."""

    def __init__(
        self, seed: int, pattern: str, hangs_ms: float = math.inf, answer_ms: float = LAG_MS
    ) -> None:
        """`answer_ms`: the longest way of a question and its answer."""
        self.rng = random.Random(seed)
        self._way_ms = answer_ms / 2
        self.world = World()
        self.hangs_ms = hangs_ms
        self.engine = Engine(self.world, self.rng, hangs_ms, self.rng.random() < 0.5)
        self.verdict: tuple[float, str] | None = None
        self.seen_ms: float | None = None  # the first look that met a request after the hang
        self.clients = Clients(self.world, self.rng, self.engine, pattern)
        config = {
            "answer_ms": ANSWER_MS,
            "hang_ms": HANG_MS,
            "hang_alone_ms": HANG_ALONE_MS,
            "idle_canary_ms": IDLE_CANARY_MS,
        }
        self._timer = 0
        self.canary = self._run_canary
        self.settings, self.clock = SimpleNamespace(config=config), self.world
        self.channel = self
        self.signs = lambda: Signs(self.engine.progress)
        self.answered = lambda healthy: None
        HealthWatch(self, self)

    def run(self, until_ms: float) -> None:
        self.world.run(until_ms, lambda: self.verdict is not None)

    # ------------------------------------------------------------------ as hub, and as session

    def post(self, event: EngineEvent) -> None:
        assert isinstance(event, Failed)
        self.verdict = (self.world.now, event.message)

    def after(self, name: str, delay_ms: float, call: Callable[[], None]) -> None:
        self._timer += 1
        mine = self._timer
        late_ms = self.rng.uniform(0, LAG_MS)

        def ring() -> None:
            if mine == self._timer:
                call()

        self.world.at(self.world.now + max(0.0, delay_ms) + late_ms, ring)

    def cancel(self, name: str) -> None:
        self._timer += 1

    def ask(self, message: object, reply: type, answered: Callable[[HealthyMsg], None]) -> None:
        def look() -> None:
            healthy = HealthyMsg(self.engine.in_flight)
            if self.seen_ms is None and healthy.in_flight and self.world.now >= self.hangs_ms:
                self.seen_ms = self.world.now
            back_ms = self.world.now + self.rng.uniform(0, self._way_ms)
            self.world.at(back_ms, lambda: answered(healthy))

        self.world.at(self.world.now + self.rng.uniform(0, self._way_ms), look)

    def _run_canary(self, done: Callable[[bool, str], None]) -> None:
        self.clients.before_canary()
        canary = Work(1, lambda: done(True, ""), is_canary=True)
        self.world.at(self.world.now + 1, lambda: self.engine.submit(canary))


seeds = st.integers(0, 2**32)


@pytest.mark.parametrize("answer_ms", [LAG_MS, 2_500])
@pytest.mark.parametrize("pattern", PATTERNS)
@settings(deadline=None, max_examples=40, derandomize=True)
@given(seed=seeds)
def test_healthy_engine_is_never_judged(pattern, answer_ms, seed):
    """Two minutes of any load on an engine whose slowest step is within the limit: no verdict; also
    on a machine so busy that an answer takes up to 2.5 s."""
    simulation = Simulation(seed, pattern, answer_ms=answer_ms)
    simulation.run(120_000)
    assert simulation.verdict is None


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(deadline=None, max_examples=60, derandomize=True)
@given(seed=seeds, hangs_ms=st.floats(0, 70_000))
def test_hung_engine_is_judged_within_the_bound(pattern, seed, hangs_ms):
    """It hangs at any moment under any load: judged after the hang, and within the bounds."""
    simulation = Simulation(seed, pattern, hangs_ms)
    simulation.run(hangs_ms + BOUND_MS)
    assert simulation.verdict is not None
    judged_ms, _ = simulation.verdict
    assert judged_ms >= hangs_ms
    if simulation.seen_ms is not None:
        assert judged_ms - simulation.seen_ms <= BOUND_SEEN_MS
    if pattern == "steady":
        assert judged_ms - max(hangs_ms, 2_000) <= BOUND_STEADY_MS
