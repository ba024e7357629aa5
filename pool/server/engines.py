"""The engines of all models: their reports go to the core with their evidence, goals go to them.

`EngineLink` is the connection to one engine's supervisor. The last goal is said again on every
connection. A supervisor that is stopped keeps its connection, so it is asked once in a while, and
sooner while a goal of ours is not obeyed yet.

`WitnessWatch` tries witnesses while there is a reason to. One that is found free is sealed, as by
the lock server, so that none can join it any more. The lock server alone removes witnesses, after
it has found them free, so one that was heard of and is gone was free, too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import asdict

from lockserver.client import witness
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.pod.messages import (
    GOAL_CATALOGUE,
    EngineReportMsg,
    PoolGoal,
    PoolWord,
    SetGoalMsg,
    Tier,
    WitnessRef,
)
from plumbing.pod.paths import engine_socket
from plumbing.service.clock import Clock
from plumbing.text import duration
from plumbing.wire.connection import Connection
from plumbing.wire.messages import Message
from pool.client.link import KeptLink
from pool.core.events import EngineDead, EngineLost, EngineSaid, PoolEvent, TellEngine
from pool.core.states import FAULT_CHARS_MAX

Feed = Callable[[PoolEvent], None]


class EngineSide:
    """One link for each engine."""

    def __init__(
        self, directory: str, models: Mapping[str, Sequence[str]], clock: Clock, feed: Feed
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

    def start(self) -> list[asyncio.Task[None]]:
        """Connect to all engines."""
        return [link.start() for link in self.links.values()]

    def look(self) -> None:
        """Call this every second or so."""
        for link in self.links.values():
            link.look()

    def tell(self, told: TellEngine) -> None:
        if told.goal is not Tier.COLD:
            self.witnesses.withdraw(told.engine)
        self.links[told.engine].tell(told)

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
        feed: Feed,
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

    def tell(self, told: TellEngine) -> None:
        """Say this now, and on every connection from now on."""
        said = PoolGoal(self.model, told.generation, is_kill=bool(told.kill))
        self._goal = SetGoalMsg(told.goal, BY, said)
        self._ask(self._goal)

    def look(self) -> None:
        """Call this every second or so."""
        now_ms = self._clock.now_ms()
        if self._asked_ms is not None and now_ms - self._asked_ms > ANSWER_MS:
            silent = duration(now_ms - self._asked_ms)
            self.drop(f"its supervisor has not answered for {silent}")
        elif self._asked_ms is None:
            is_obeyed = self.goal is None or (self.said is not None and self.said.tier == self.goal)
            if now_ms - self._heard_ms > (IDLE_LOOK_MS if is_obeyed else LOOK_MS):
                self._ask(SetGoalMsg())

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

    def refused(self, error: UnderstudyError, request_id: int) -> None:
        self._answered(request_id)

    def _answered(self, request_id: int) -> None:
        if request_id == self._request:
            self._asked_ms = None
        self._heard_ms = self._clock.now_ms()

    def hear(self, message: Message, request_id: int) -> None:
        self._answered(request_id)
        match message:
            case EngineReportMsg(pool=PoolWord() as word) if word.model == self.model:
                fault = message.fault[:FAULT_CHARS_MAX]
                self.said, self.problem = message, fault or None
                self._witnesses.heard(self.engine, message.incarnation, word.witness)
                said = {**asdict(message), **asdict(word), "engine": self.engine, "fault": fault}
                names = EngineSaid.__struct_fields__
                self._feed(EngineSaid(**{name: said[name] for name in names}))
            case EngineReportMsg():
                found = f"model {message.pool.model}" if message.pool else "no model's name"
                self.problem = f"it runs with {found}; start it with --model-name {self.model}"
            case _:
                raise ProtocolError("pool.not_an_answer", f"engines do not send {message.TYPE}")


# Small processes die within milliseconds, and some need half a minute; who is hung may be so for
# days. A try takes 50 us of a CPU, so it is dense only where a model waits for the answer: during
# a failover none does, and the engines need the CPU.
DENSE_S, DENSE_FOR_S = 0.001, 1.0
SLOW_S, SLOW_FOR_S = 0.010, 60.0
RARE_S = 0.1
RANDOM_CHARS = 16  # of an incarnation


class WitnessWatch:
    """The witnesses in `directory`; `feed` gets `EngineDead` once for each that is free, and once
    for each question."""

    def __init__(self, directory: str, feed: Feed) -> None:
        self._directory, self._feed = directory, feed
        self._asked: dict[str, int] = {}  # by engine, the newest question
        self._heard: dict[str, tuple[str, WitnessRef]] = {}  # by incarnation, with its engine
        self._suspects: set[str] = set()  # incarnations whose witness is tried now
        self._newest_s = 0.0  # when the last reason to try has come
        self._timer: asyncio.TimerHandle | None = None

    def heard(self, engine: str, incarnation: str, ref: WitnessRef | None) -> None:
        """This incarnation lives, with this witness; there is a reason to think that earlier ones
        of its engine are dead.

        Raises:
            UnderstudyError: `pool.bad_witness`, it is not the file that the engine says.
        """
        if incarnation and ref is not None:
            if ref.name != witness.name_of(incarnation):
                raise UnderstudyError(
                    "pool.bad_witness", f"{ref.name!r} is not the witness of {incarnation}"
                )
            self._heard[incarnation] = engine, ref
        self._suspects.discard(incarnation)
        self.suspect(engine, but=incarnation)

    def suspect(self, engine: str, *, but: str = "") -> None:
        """There is a reason to think that the incarnations of `engine` are dead, but for one."""
        mine = {each for each, (name, _) in self._heard.items() if name == engine and each != but}
        if not mine <= self._suspects:
            self._newest_s = asyncio.get_running_loop().time()
        self._suspects |= mine
        self._arm()

    def ask(self, engine: str, number: int) -> None:
        """Its supervisor has stopped it: answer once all of its processes are dead."""
        self._asked[engine] = number
        self._newest_s = asyncio.get_running_loop().time()
        self.close()  # the next try may be far
        self.suspect(engine)

    def withdraw(self, engine: str) -> None:
        """It may start again."""
        self._asked.pop(engine, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None and (self._suspects or self._asked):
            loop = asyncio.get_running_loop()
            waited_s = loop.time() - self._newest_s
            delay_s = SLOW_S if waited_s < SLOW_FOR_S else RARE_S
            if self._asked and waited_s < DENSE_FOR_S:
                delay_s = DENSE_S
            self._timer = loop.call_later(delay_s, self._try)

    def _try(self) -> None:
        self._timer = None
        for incarnation in tuple(self._suspects):
            engine, ref = self._heard[incarnation]
            if self._is_free(ref.name, ref.dev, ref.ino):
                del self._heard[incarnation]
                self._suspects.discard(incarnation)
                self._feed(EngineDead(engine, incarnation))
        for engine, number in [each for each in self._asked.items() if self._has_none(each[0])]:
            del self._asked[engine]
            self._feed(EngineDead(engine, "", number))
        self._arm()

    def _has_none(self, engine: str) -> bool:
        """Whether no witness of this engine is left that anybody may hold, heard of or not."""
        if any(name == engine for name, _ in self._heard.values()):
            return False
        stem = f"{witness.PREFIX}{engine}_"
        names = [name for name in os.listdir(self._directory) if name.startswith(stem)]
        names = [name for name in names if len(name) == len(stem) + RANDOM_CHARS]
        files = (witness.identify(os.path.join(self._directory, name))[0] for name in names)
        return all(each is None or self._is_free(each.name, each.dev, each.ino) for each in files)

    def _is_free(self, name: str, dev: int, ino: int) -> bool:
        path = os.path.join(self._directory, name)
        state = witness.probe(path, dev, ino)
        return state is witness.WitnessState.FREE or not os.path.lexists(path)
