"""A whole pod whose engines are told to sleep and to wake.

Every state of an engine is kept with its instant, on the clock of the clients, so that the phases
of a wake add up to what a client sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.core.events import State
from plumbing.pod.messages import GOAL_CATALOGUE, EngineReportMsg, SetGoalMsg, Tier
from plumbing.pod.observers import ask
from plumbing.pod.paths import engine_sockets
from understudy.drill.clients import Target
from understudy.drill.killer import wait_for
from understudy.drill.observer import Observer
from understudy.drill.records import Records
from understudy.drill.run import Drill

BY = "hack"
ANSWER_S = 10.0
CHANGE_S = 180.0  # longer than any budget of a sleep or a wake
POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class EngineTiers:
    """The engine with the control socket `path`; `records`: what its observer sees of it."""

    engine: str
    path: str
    records: Records

    async def set_goal(self, goal: Tier | None) -> EngineReportMsg:
        """Give it a goal, and get its report; None: only that.

        Raises:
            RemoteError: it refuses; UnreachableError.
        """
        answer = await ask(self.path, GOAL_CATALOGUE, SetGoalMsg(goal, BY), ANSWER_S)
        assert isinstance(answer.message, EngineReportMsg)  # the catalogue has no other answer
        return answer.message

    async def until(self, since_ms: float, *states: State) -> float:
        """When it first was in one of `states` after `since_ms`; waits for that.

        Raises:
            WaitTimeoutError: `bench.late`.
        """

        async def look() -> float | str:
            seen = [each for each in self.records.moments if each.part == self.engine]
            at_ms = (e.at_ms for e in seen if e.at_ms >= since_ms and e.state in states)
            return next(at_ms, f"it is {seen[-1].state if seen else 'unknown'}")

        what = f"{self.engine} was not {' or '.join(states)}"
        return await wait_for(look, CHANGE_S, "bench.late", what, poll_s=POLL_S)

    async def until_offloaded(self, *, is_last: bool) -> None:
        """Until no process of it maps weights; of the last engine, until their memory is free.

        Raises:
            WaitTimeoutError: `bench.late`.
        """

        async def look() -> str | None:
            report = await self.set_goal(None)
            is_done = report.tier is Tier.OFFLOADED and not (is_last and report.fault)
            return None if is_done else f"it is {report.tier}, {report.fault}"

        what = f"{self.engine} was not offloaded"
        await wait_for(look, CHANGE_S, "bench.late", what, poll_s=POLL_S)


@dataclass(frozen=True, slots=True)
class StandingPod:
    """The active engine, the standby, and the prompts with the answers that both must give."""

    drill: Drill
    target: Target
    active: EngineTiers
    standby: EngineTiers
    observer: Observer

    @classmethod
    async def of(cls, directory: Path, drill: Drill, target: Target) -> StandingPod:
        paths, records = engine_sockets(directory), Records()
        observer = Observer(directory, paths, records)
        first, second = (EngineTiers(name, path, records) for name, path in paths.items())
        is_first = (await first.set_goal(None)).state == State.ACTIVE
        active, standby = (first, second) if is_first else (second, first)
        return cls(drill, target, active, standby, observer)

    async def close(self) -> None:
        await self.observer.close()
