"""The engines of all models: their reports go to the core with their evidence, goals go to them.

`EngineLink` is the connection to one engine's supervisor. The last goal is said again on every
connection. A supervisor that is stopped keeps its connection, so it is asked once in a while, and
sooner while a goal of ours is not obeyed yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import asdict

from plumbing.errors import ProtocolError
from plumbing.pod.messages import (
    GOAL_CATALOGUE,
    EngineReportMsg,
    GoalGeneration,
    PoolGoal,
    PoolWord,
    SetGoalMsg,
    Tier,
)
from plumbing.pod.paths import engine_socket
from plumbing.service.clock import Clock
from plumbing.text import duration
from plumbing.wire.connection import Connection
from plumbing.wire.messages import FaultMsg, Message
from pool.client.link import KeptLink
from pool.core.events import EngineLost, EngineSaid, PoolEvent
from pool.server.locks import WitnessWatch


class EngineSide:
    """One link for each engine."""

    def __init__(
        self,
        directory: str,
        models: Mapping[str, Sequence[str]],
        clock: Clock,
        feed: Callable[[PoolEvent], None],
    ) -> None:
        """`models`: the engines of each."""
        self.witnesses = WitnessWatch(directory, feed)
        self.links = {
            engine: EngineLink(directory, engine, model, clock, feed, self.witnesses)
            for model, engines in models.items()
            for engine in engines
        }

    @property
    def problems(self) -> Iterator[str]:
        for engine, link in self.links.items():
            if link.problem is not None:
                yield f"{engine}: {link.problem}"
        if self.witnesses.problem is not None:
            yield self.witnesses.problem

    def start(self) -> list[asyncio.Task[None]]:
        """Take up the evidence of an earlier pool, and connect to all engines."""
        self.witnesses.recover(self._owner)
        return [link.start() for link in self.links.values()]

    def look(self) -> None:
        """Call this every second or so."""
        for link in self.links.values():
            link.look()

    def tell(
        self, engine: str, goal: Tier, generation: GoalGeneration, *, is_kill: bool = False
    ) -> None:
        if goal is not Tier.COLD:
            self.witnesses.withdraw(engine)
        self.links[engine].tell(goal, generation, is_kill=is_kill)

    def bases(self, device: str) -> int | None:
        """What their processes have there beside weights and KV memory; None: not known of all."""
        total = 0
        for link in self.links.values():
            word = link.said.pool if link.said is not None else None
            if word is None or link.said is None or not link.said.incarnation:
                continue
            if not word.base_bytes:
                return None
            total += word.base_bytes.get(device, 0)
        return total

    def close(self) -> None:
        self.witnesses.close()

    def _owner(self, incarnation: str) -> str | None:
        engine = incarnation.rpartition("-")[0]
        return engine if engine in self.links else None


BY = "pool"  # who wants it, in the engine's status and events
ANSWER_MS = 3_000.0  # a supervisor answers within a millisecond, and is never blocked
LOOK_MS, IDLE_LOOK_MS = 1_000.0, 10_000.0


class EngineLink(KeptLink):
    """`feed` gets its reports, and that it is lost; `witnesses` their evidence."""

    def __init__(
        self,
        directory: str,
        engine: str,
        model: str,
        clock: Clock,
        feed: Callable[[PoolEvent], None],
        witnesses: WitnessWatch,
    ) -> None:
        super().__init__(engine_socket(directory, engine), GOAL_CATALOGUE)
        self.engine, self.model, self._clock = engine, model, clock
        self._feed, self._witnesses = feed, witnesses
        self.said: EngineReportMsg | None = None  # its last word, while it is connected
        self._goal = SetGoalMsg()
        self._asked_ms: float | None = None  # since when an answer is due
        self._heard_ms = 0.0
        self._request = 0

    @property
    def goal(self) -> Tier | None:
        return self._goal.goal

    def tell(self, goal: Tier, generation: GoalGeneration, *, is_kill: bool = False) -> None:
        """Say this now, and on every connection from now on. `is_kill`: wait for nothing that still
        runs."""
        self._goal = SetGoalMsg(goal, BY, PoolGoal(self.model, generation, is_kill))
        self._ask(self._goal)

    def look(self) -> None:
        """Call this every second or so."""
        now_ms = self._clock.now_ms()
        if self._asked_ms is not None and now_ms - self._asked_ms > ANSWER_MS:
            silent = duration(now_ms - self._asked_ms)
            self.drop(f"its supervisor has not answered for {silent}")
        elif self._asked_ms is None:
            every_ms = IDLE_LOOK_MS if self._is_obeyed else LOOK_MS
            if now_ms - self._heard_ms > every_ms:
                self._ask(SetGoalMsg())

    @property
    def _is_obeyed(self) -> bool:
        wanted, said = self._goal.pool, self.said
        if wanted is None:
            return True
        return said is not None and said.pool is not None and said.tier == self._goal.goal

    def _ask(self, question: SetGoalMsg) -> None:
        if self.conn is not None:
            self._request += 1
            if self._asked_ms is None:
                self._asked_ms = self._clock.now_ms()
            self.conn.send(question, self._request)

    def begin(self, conn: Connection) -> None:
        self._ask(self._goal)

    def lose(self, reason: str) -> None:
        was_heard = self.said is not None
        self.said = self._asked_ms = None
        if was_heard:
            self._witnesses.suspect(self.engine)
            self._feed(EngineLost(self.engine))

    def refused(self, error: FaultMsg, request_id: int) -> None:
        self._answered(request_id)

    def _answered(self, request_id: int) -> None:
        if request_id == self._request:
            self._asked_ms = None
        self._heard_ms = self._clock.now_ms()

    def hear(self, message: Message, request_id: int) -> None:
        self._answered(request_id)
        match message:
            case EngineReportMsg(pool=PoolWord() as word) if word.model == self.model:
                self.said, self.problem = message, message.fault or None
                self._report(message, word)
            case EngineReportMsg():
                found = f"model {message.pool.model}" if message.pool else "no model's name"
                self.problem = f"it runs with {found}; start it with --model-name {self.model}"
            case _:
                raise ProtocolError("pool.not_an_answer", f"engines do not send {message.TYPE}")

    def _report(self, am: EngineReportMsg, word: PoolWord) -> None:
        engine, witnesses = self.engine, self._witnesses
        if am.incarnation and word.witness is not None:
            witnesses.keep(engine, am.incarnation, word.witness)
        witnesses.trust(am.incarnation)
        witnesses.suspect(engine, but=am.incarnation)
        said = {**asdict(am), **asdict(word), "engine": engine, "goal_seen": word.generation}
        self._feed(EngineSaid(**{name: said[name] for name in EngineSaid.__struct_fields__}))
