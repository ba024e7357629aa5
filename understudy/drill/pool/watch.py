"""Watches a pool: the states of its models, its switches, the bounds that it states.

Kills are triggered by what is seen here. A pool that is killed is dialled again; what happened
meanwhile shows in the states that its successor names first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from plumbing.errors import UnderstudyError
from plumbing.part.observe import EventMsg, StatusMsg, StatusReplyMsg, WatchMsg
from plumbing.part.paths import pool_socket
from plumbing.part.peers import PeerWatch, ask
from plumbing.service.clock import SystemClock
from plumbing.wire.messages import Message
from pool.messages import CATALOGUE
from understudy.drill.pool.records import BoundSeen, PoolDrillRecords, PoolMoment, PoolSwitch

STATED_EVERY_S = 1.0  # how often the bounds are asked for: they change with costs and requests
SWITCH_TIMES = ("wait_ms", "drain_ms", "release_ms", "raise_ms")

clock = SystemClock()


async def pool_status(directory: Path) -> dict[str, Any]:
    """The pool's status document.

    Raises:
        UnderstudyError: it does not answer.
    """
    answer = (await ask(pool_socket(str(directory)), CATALOGUE, StatusMsg())).message
    return answer.document if isinstance(answer, StatusReplyMsg) else {}


class PoolWatch:
    """Writes into `records` from its making until `close`."""

    def __init__(self, directory: Path, records: PoolDrillRecords) -> None:
        self.states: dict[str, str] = {}
        self.is_on = False  # whether the pool is connected, so that phases are seen
        self._directory, self._records = directory, records
        self._waiting: list[tuple[str, Collection[str], asyncio.Future[str]]] = []
        path = pool_socket(str(directory))
        self._watch = PeerWatch(path, CATALOGUE, WatchMsg(), self._received, self._lost)
        self._stating = asyncio.create_task(self._state_bounds())

    async def close(self) -> None:
        self._stating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._stating
        await self._watch.close()
        for *_, future in self._waiting:
            future.cancel()

    async def entered(self, phase: str, models: Collection[str], timeout_s: float) -> str | None:
        """The next of `models` that enters `phase`; None: none did in time."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiting = (phase, models, future)
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return None
        finally:
            self._waiting.remove(waiting)

    # ------------------------------------------------------------------ what the pool says

    def _received(self, message: Message) -> None:
        match message:
            case StatusReplyMsg():
                self.is_on = True
                self._learn(message.document)
            case EventMsg():
                record = message.record
                data = record.get("data") or {}
                at_ms = float(record.get("mono_ms") or clock.now_ms())
                if record.get("type") == "pool.model":
                    self._note(at_ms, str(data["model"]), str(data["to"]), str(data["cause"]))
                elif record.get("type") == "pool.switch":
                    times = (float(data[name]) for name in SWITCH_TIMES)
                    victims = tuple(map(str, data["victims"]))
                    switch = PoolSwitch(at_ms, str(data["model"]), victims, *times)
                    self._records.switches.append(switch)

    def _lost(self) -> None:
        self.is_on = False

    def _learn(self, document: Mapping[str, Any]) -> None:
        now_ms = clock.now_ms()
        for each in document.get("models") or ():
            at_ms = now_ms - float(each.get("for_ms") or 0.0)
            self._note(at_ms, each["model"], each["state"], str(each.get("reason") or ""))
            self._records.bounds.append(BoundSeen(now_ms, each["model"], each.get("bound_ms")))

    def _note(self, at_ms: float, model: str, state: str, reason: str) -> None:
        if self.states.get(model) == state:
            return
        self.states[model] = state
        self._records.moments.append(PoolMoment(at_ms, model, state, reason))
        for phase, models, future in self._waiting:
            if phase == state and model in models and not future.done():
                future.set_result(model)

    async def _state_bounds(self) -> None:
        while True:
            with contextlib.suppress(UnderstudyError):  # it was killed; the next one answers
                document = await pool_status(self._directory)
                now_ms = clock.now_ms()
                self._records.bounds += [
                    BoundSeen(now_ms, each["model"], each.get("bound_ms"))
                    for each in document.get("models") or ()
                ]
            await asyncio.sleep(STATED_EVERY_S)
