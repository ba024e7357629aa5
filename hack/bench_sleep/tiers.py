"""One engine's control socket: tells it how much of it shall be resident, hears what it is.

Every word of the engine is kept with the instant at which it came, on the clock of the clients, so
that the phases of a wake add up to what a client sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.core.events import State
from engine.messages import CONTROL
from plumbing.errors import RemoteError, UnreachableError, WaitTimeoutError
from plumbing.part.paths import engine_socket
from plumbing.part.tier import AmMsg, ShallMsg, Tier
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import FaultMsg, Message
from plumbing.wire.unix_connection import connect
from understudy.drill.clients import clock

BY = "hack.bench_sleep"
CHANGE_S = 180.0  # longer than any budget of a rest or a wake, and than a start of vLLM


class EngineTiers(Handler):
    """A connection to the engine `engine` of the pod in `directory`, made by `to`."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.words: list[tuple[float, AmMsg]] = []
        self._changed = asyncio.Event()
        self._answers: dict[int, asyncio.Future[AmMsg]] = {}
        self._end = ""
        self._conn: Connection

    @classmethod
    async def to(cls, directory: str, engine: str) -> EngineTiers:
        """Raises UnreachableError."""
        made = cls(engine)
        made._conn = await connect(engine_socket(directory, engine), CONTROL, made)
        await made.shall(None)
        return made

    def close(self) -> None:
        self._conn.close("done")

    @property
    def now(self) -> AmMsg:
        return self.words[-1][1]

    async def shall(self, goal: Tier | None) -> None:
        """Give it a goal; None: only look on.

        Raises:
            RemoteError: it refuses; UnreachableError, WaitTimeoutError.
        """
        number = len(self._answers) + 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._conn.send(ShallMsg(goal, BY), number)
        try:
            async with asyncio.timeout(CHANGE_S):
                await answer
        except TimeoutError:
            raise self._late("answer") from None

    async def until(self, state: State, since_ms: float) -> float:
        """When it said first, after `since_ms`, that it is in `state`; waits for that.

        Raises:
            UnreachableError, WaitTimeoutError.
        """
        return await self._until(lambda am: am.state == state, since_ms, f"be {state}")

    async def until_away(self, *, is_last: bool) -> None:
        """Until nothing of it maps weights; of the last engine, until their memory is free.

        Raises:
            UnreachableError, WaitTimeoutError.
        """
        now_ms = self.words[-1][0]
        away = Tier.OFFLOADED
        await self._until(
            lambda am: am.tier is away and not (is_last and am.fault), now_ms, "be offloaded"
        )

    async def until_gone(self) -> None:
        """Until it has no process any more.

        Raises:
            UnreachableError, WaitTimeoutError.
        """
        now_ms = self.words[-1][0]
        await self._until(lambda am: am.state == State.DEAD and not am.incarnation, now_ms, "end")

    async def until_up(self) -> None:
        """Until it serves or stands by.

        Raises:
            UnreachableError, WaitTimeoutError.
        """
        up = (State.ACTIVE, State.STANDBY)
        await self._until(lambda am: am.state in up, self.words[-1][0], "start")

    async def _until(self, is_so: Callable[[AmMsg], bool], since_ms: float, what: str) -> float:
        try:
            async with asyncio.timeout(CHANGE_S):
                while True:
                    for at_ms, am in self.words:
                        if at_ms >= since_ms and is_so(am):
                            return at_ms
                    if self._end:
                        raise UnreachableError("wire.closed", f"{self.engine}: {self._end}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self._late(what) from None

    def _late(self, what: str) -> WaitTimeoutError:
        am = self.now if self.words else None
        text = f"{self.engine} did not {what} within {CHANGE_S:g} s: {am}"
        return WaitTimeoutError("bench.late", text)

    # ------------------------------------------------------------------ wire.Handler

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        answer = self._answers.get(request_id)
        match message:
            case AmMsg():
                self.words.append((clock.now_ms(), message))
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
