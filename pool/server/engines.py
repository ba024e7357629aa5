"""The engines of all models: their reports go to the core with their evidence, goals go to them.

`EngineLink` is the connection to one engine's supervisor. The last goal is said again on every
connection, and the supervisor reports every change by itself. Nothing asks it whether it still
runs: that is its init's business, which replaces one that hangs, and then this connection ends.

`WitnessWatch` tries witnesses while there is a reason to: of an incarnation that it was told of,
the file that had its name then. One that is found free is sealed, as by the lock server, so that
none can join it any more. The lock server alone removes witnesses, after it has found them free, so
one that was heard of and is gone was free, too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from lockserver.client import witness
from plumbing.errors import ProtocolError
from plumbing.pod.messages import GOAL_CATALOGUE, EngineReportMsg, PoolGoal, SetGoalMsg, Tier
from plumbing.pod.paths import engine_socket
from plumbing.service.clock import Timer
from plumbing.wire.connection import Connection
from plumbing.wire.messages import Message
from pool.client.link import KeptLink
from pool.core.events import EngineDead, EngineLost, EngineSaid, PoolEvent, TellEngine
from pool.core.states import FAULT_CHARS_MAX

Feed = Callable[[PoolEvent], None]


class EngineSide:
    """One link for each engine."""

    def __init__(self, directory: str, models: Mapping[str, Sequence[str]], feed: Feed) -> None:
        """`models`: the engines of each."""
        self.witnesses = WitnessWatch(directory, feed)
        self.links = {
            engine: EngineLink(directory, engine, model, feed, self.witnesses)
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

    def tell(self, told: TellEngine) -> None:
        if told.goal is not Tier.COLD:
            self.witnesses.withdraw(told.engine)
        self.links[told.engine].tell(told)

    def close(self) -> None:
        self.witnesses.close()


BY = "pool"  # who wants it, in the engine's status and events


class EngineLink(KeptLink):
    """`feed` gets its reports, and that it is lost; `witnesses` their evidence."""

    def __init__(
        self, directory: str, engine: str, model: str, feed: Feed, witnesses: WitnessWatch
    ) -> None:
        super().__init__(engine_socket(directory, engine), GOAL_CATALOGUE)
        self.engine, self.model = engine, model
        self._feed, self._witnesses = feed, witnesses
        self._goal = SetGoalMsg()

    @property
    def goal(self) -> Tier | None:
        return self._goal.goal

    def tell(self, told: TellEngine) -> None:
        """Say this now, and on every connection from now on."""
        said = PoolGoal(self.model, told.generation, is_kill=bool(told.kill))
        self._goal = SetGoalMsg(told.goal, BY, said)
        if self.conn is not None:
            self.begin(self.conn)

    def begin(self, conn: Connection) -> None:
        conn.send(self._goal, 1)

    def lose(self, reason: str) -> None:
        self._witnesses.suspect(self.engine)
        self._feed(EngineLost(self.engine))

    def hear(self, message: Message, request_id: int) -> None:
        match message:
            case EngineReportMsg() if message.model == self.model:
                fault = message.fault[:FAULT_CHARS_MAX]
                self.problem = fault or None
                self._witnesses.heard(self.engine, message.incarnation)
                self._feed(EngineSaid(replace(message, engine=self.engine, fault=fault)))
            case EngineReportMsg():
                found = f"model {message.model}" if message.model else "no model's name"
                self.problem = f"it runs with {found}; start it with --model-name {self.model}"
            case _:
                raise ProtocolError("pool.not_an_answer", f"engines do not send {message.TYPE}")


# Small processes die within milliseconds, and some need half a minute; who is hung may be so for
# days. So the pause is a hundredth of what it has waited. A try takes 50 us of a CPU, so it is
# dense only where a model waits for the answer: during a failover none does, and the engines need
# the CPU.
DENSE_S, SLOW_S, RARE_S = 0.001, 0.010, 0.1
RANDOM_CHARS = 16  # of an incarnation


class WitnessWatch:
    """The witnesses in `directory`; `feed` gets `EngineDead` once for each that is free, and once
    for each question."""

    def __init__(self, directory: str, feed: Feed) -> None:
        self._directory, self._feed = directory, feed
        self._asked: dict[str, int] = {}  # by engine, the newest question
        self._heard: dict[str, tuple[str, witness.WitnessFile]] = {}  # by incarnation
        self._suspects: set[str] = set()  # incarnations whose witness is tried now
        self._newest_s = 0.0  # when the last reason to try has come
        self._timer = Timer(self._try)
        self.close = self._timer.cancel

    def heard(self, engine: str, incarnation: str) -> None:
        """This incarnation lives; there is a reason to think that earlier ones of its engine are
        dead. One without a file has no process yet, or none any more, and its engine says which."""
        if incarnation and incarnation not in self._heard:
            file = self._file(witness.name_of(incarnation))
            if file.ino:
                self._heard[incarnation] = engine, file
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
        self.suspect(engine)

    def withdraw(self, engine: str) -> None:
        """It may start again."""
        self._asked.pop(engine, None)

    def _arm(self) -> None:
        if self._suspects or self._asked:
            waited_s = asyncio.get_running_loop().time() - self._newest_s
            delay_s = max(DENSE_S if self._asked else SLOW_S, waited_s / 100)
            self._timer.soon(min(delay_s, RARE_S))

    def _try(self) -> None:
        for incarnation in tuple(self._suspects):
            engine, file = self._heard[incarnation]
            if self._is_free(file):
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
        return all(self._is_free(self._file(name)) for name in names)

    def _file(self, name: str) -> witness.WitnessFile:
        """That has this name now."""
        found, _ = witness.identify(os.path.join(self._directory, name))
        return found or witness.WitnessFile(name, 0, 0)

    def _is_free(self, file: witness.WitnessFile) -> bool:
        path = os.path.join(self._directory, file.name)
        state = witness.probe(path, file.dev, file.ino)
        return state is witness.WitnessState.FREE or not os.path.lexists(path)
