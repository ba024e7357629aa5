"""A whole pod whose engines are told to sleep and to wake.

Every report of an engine is kept with the instant at which it came, on the clock of the clients, so
that the phases of a wake add up to what a client sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.core.events import State
from engine.messages import CONTROL
from plumbing.errors import RemoteError, UnreachableError, WaitTimeoutError
from plumbing.pod.messages import EngineReportMsg, SetGoalMsg, Tier
from plumbing.pod.paths import engine_socket
from plumbing.wire.connection import Connection, Handler, connect
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import FaultMsg, Message
from understudy.drill.clients import Target, clock
from understudy.drill.run import Drill
from understudy.status.gather import engine_parts

BY = "hack"
CHANGE_S = 180.0  # longer than any budget of a sleep or a wake


class EngineTiers(Handler):
    """A connection to the control socket of `engine`, made by `to`."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.reports: list[tuple[float, EngineReportMsg]] = []
        self._changed = asyncio.Event()
        self._answers: dict[int, asyncio.Future[EngineReportMsg]] = {}
        self._end = ""
        self._conn: Connection

    @classmethod
    async def to(cls, directory: str, engine: str) -> EngineTiers:
        """Raises UnreachableError."""
        made = cls(engine)
        made._conn = await connect(engine_socket(directory, engine), CONTROL, made)
        await made.set_goal(None)
        return made

    def close(self) -> None:
        self._conn.close("done")

    @property
    def state(self) -> State:
        return State(self.reports[-1][1].state)

    async def set_goal(self, goal: Tier | None) -> None:
        """Give it a goal; None: only get its reports.

        Raises:
            RemoteError: it refuses; UnreachableError, WaitTimeoutError.
        """
        number = len(self._answers) + 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._conn.send(SetGoalMsg(goal, BY), number)
        try:
            async with asyncio.timeout(CHANGE_S):
                await answer
        except TimeoutError:
            raise self._late("answer") from None

    async def until(self, since_ms: float, *states: State) -> float:
        """When it first reported one of `states` after `since_ms`; waits for that.

        Raises:
            UnreachableError, WaitTimeoutError.
        """
        what = f"be {' or '.join(states)}"
        return await self._until(lambda report: report.state in states, since_ms, what)

    async def until_offloaded(self, *, is_last: bool) -> None:
        """Until no process of it maps weights; of the last engine, until their memory is free.

        Raises:
            UnreachableError, WaitTimeoutError.
        """
        now_ms = self.reports[-1][0]
        await self._until(
            lambda report: report.tier is Tier.OFFLOADED and not (is_last and report.fault),
            now_ms,
            "be offloaded",
        )

    async def _until(
        self, is_so: Callable[[EngineReportMsg], bool], since_ms: float, what: str
    ) -> float:
        try:
            async with asyncio.timeout(CHANGE_S):
                while True:
                    for at_ms, report in self.reports:
                        if at_ms >= since_ms and is_so(report):
                            return at_ms
                    if self._end:
                        raise UnreachableError("wire.closed", f"{self.engine}: {self._end}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self._late(what) from None

    def _late(self, what: str) -> WaitTimeoutError:
        last = self.reports[-1][1] if self.reports else None
        text = f"{self.engine} did not {what} within {CHANGE_S:g} s: {last}"
        return WaitTimeoutError("bench.late", text)

    # ------------------------------------------------------------------ wire.Handler

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        answer = self._answers.get(request_id)
        match message:
            case EngineReportMsg():
                self.reports.append((clock.now_ms(), message))
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case FaultMsg() if answer is not None and not answer.done():
                answer.set_exception(RemoteError(message.code, message.message))
        self._changed.set()

    def closed(self, conn: Connection, reason: str) -> None:
        self._end = reason
        self._changed.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(UnreachableError("wire.closed", reason))


@dataclass(frozen=True, slots=True)
class StandingPod:
    """The active engine, the standby, and the prompts with the answers that both must give."""

    drill: Drill
    target: Target
    active: EngineTiers
    standby: EngineTiers

    @classmethod
    async def of(cls, directory: Path, drill: Drill, target: Target) -> StandingPod:
        names = [part.name for part in engine_parts(directory)]
        tiers = [await EngineTiers.to(str(directory), name) for name in names]
        active = next(each for each in tiers if each.state == State.ACTIVE)
        standby = next(each for each in tiers if each is not active)
        return cls(drill, target, active, standby)

    def close(self) -> None:
        self.active.close()
        self.standby.close()
