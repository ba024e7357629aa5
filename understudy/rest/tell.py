"""Tells all engines of a pod to rest, or to be awake, and waits until the active one is there.

The shell around `order.py`: one connection to each engine's control socket. One that ends is made
again, since an engine may be relaunched meanwhile, and told again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from functools import partial

from plumbing.errors import RemoteError, UnderstudyError
from plumbing.pod.messages import GOAL_CATALOGUE, EngineReportMsg, SetGoalMsg
from plumbing.wire.connection import Connection, Handler, connect
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import FaultMsg, Message
from understudy.rest.order import GoalOrder

BY = "understudy"
OTHERS_S = 2.0  # for the engines that nobody waits for: one that is stopped never answers
RETRY_S = 0.1  # a restarted supervisor takes some 200 ms to listen again
LOOK, TELL = 1, 2  # the requests on each connection


class _Line(Handler):
    """The connection to one engine."""

    def __init__(self, name: str, order: GoalOrder, changed: asyncio.Event) -> None:
        self.ended = asyncio.Event()
        self.is_over = False  # what it ends with is no news
        self._name, self._order, self._changed = name, order, changed

    def opened(self, conn: Connection) -> None:
        conn.send(SetGoalMsg(), LOOK)
        conn.send(SetGoalMsg(self._order.goal, BY), TELL)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        match message:
            case EngineReportMsg():
                self._order.heard(self._name, message, is_answer=request_id == TELL)
            case FaultMsg():
                self._order.refused(self._name, RemoteError(message.code, message.message))
        self._changed.set()

    def closed(self, conn: Connection, reason: str) -> None:
        if self.is_over:
            return
        self._order.lost(self._name, reason)
        self.ended.set()
        self._changed.set()


async def tell(order: GoalOrder, paths: Mapping[str, str], timeout_s: float) -> tuple[str, float]:
    """Give the order to the engines at these control sockets: what was done, and the ms it took.

    Raises:
        UnderstudyError: refused, overridden, nobody there, or `pod.goal_timeout`.
    """
    begun, changed = time.monotonic(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        keep = partial(_keep_telling, order, changed)
        lines = [tasks.create_task(keep(name, path)) for name, path in paths.items()]
        try:
            async with asyncio.timeout(timeout_s):
                while (result := _verdict(order)) is None:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            result = order.late(timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OTHERS_S):
                while isinstance(result, str) and not order.is_heard_by_all:
                    changed.clear()
                    await changed.wait()
        for line in lines:
            line.cancel()
    if isinstance(result, UnderstudyError):
        raise result
    return result, (time.monotonic() - begun) * 1000


def _verdict(order: GoalOrder) -> str | UnderstudyError | None:
    try:
        return order.verdict()
    except UnderstudyError as error:  # not out of the task group, which would wrap it
        return error


async def _keep_telling(order: GoalOrder, changed: asyncio.Event, name: str, path: str) -> None:
    while True:
        line = _Line(name, order, changed)
        try:
            conn = await connect(path, GOAL_CATALOGUE, line)
        except UnderstudyError as error:
            order.lost(name, error.message)
            changed.set()
        else:
            try:
                await line.ended.wait()
            finally:
                line.is_over = True
                conn.close("told")
        await asyncio.sleep(RETRY_S)
