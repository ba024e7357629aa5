"""A stand-in for an engine that rests: the lock, the control socket and the private HTTP socket.

`python -m tests.gateway.resting_engine DIR ENGINE`. It obeys `shall` as an engine does: its private
socket is gone while it rests, and answers are those of a stub engine. What a test wants of it are
files in DIR: while `ENGINE.no_STATE` exists it does not enter this state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from plumbing.pod.messages import GOAL_CATALOGUE, EngineReportMsg, SetGoalMsg, Tier
from plumbing.pod.paths import engine_http_socket, engine_socket
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.server import Server
from tests.gateway.stub_engine import StubEngine
from tests.helpers import auntil, until
from tests.lockserver.engines import Engine

BELOW = (Tier.COLD, Tier.OFFLOADED, Tier.WARM)


class RestingEngine(Handler):
    """One engine in this process."""

    def __init__(self, directory: str, name: str) -> None:
        self.directory, self.name = directory, name
        self.state, self.goal, self.by, self.seen = "standby", Tier.AWAKE, "", 0
        self.since_ms, self.token = _now_ms(), 0
        self.engine = Engine(directory, name)
        self.engine.on_granted = self._granted
        self.http: StubEngine | None = None
        self._listeners: set[Connection] = set()
        self._changed = asyncio.Event()
        self._server = Server(
            engine_socket(directory, name), GOAL_CATALOGUE, self, service="engine"
        )

    async def run(self) -> None:
        await self._server.start()
        async with self.engine:
            self.engine.launch()
            self.engine.want("active")
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self._go_on()

    def _granted(self, lock: str, incarnation: str, token: int) -> None:
        if incarnation == self.engine.incarnation and self.state == "standby":
            self.token = token
            self._enter("waking" if self.goal is Tier.AWAKE else "resting")
            self._changed.set()

    async def _go_on(self) -> None:
        """Step by step towards the goal."""
        while True:
            below = self.goal in BELOW
            after = {
                "active": "draining" if below else None,
                "draining": "releasing",
                "releasing": "resting",
                "resting": None if below else "waking",
                "waking": "active",
            }.get(self.state)
            if after is None:
                return
            wait = Path(self.directory, f"{self.name}.no_{after}")
            await auntil(lambda wait=wait: not wait.exists(), "the test to let it go on")
            if after == "releasing":
                await auntil(self._is_drained, "requests to end")
                assert self.http is not None
                self.http.die()
            if after == "active":
                path = engine_http_socket(self.directory, self.name)
                self.http = StubEngine(path, self.name, self.token)
                await self.http.start()
            self._enter(after)

    def _is_drained(self) -> bool:
        return self.http is not None and not self.http.open_connections

    def _enter(self, state: str) -> None:
        self.state, self.since_ms = state, _now_ms()
        for conn in tuple(self._listeners):
            conn.send(self._am())

    def _am(self) -> EngineReportMsg:
        return EngineReportMsg(
            engine=self.name,
            incarnation=self.engine.incarnation or "",
            token=self.token,
            state=self.state,
            tier=Tier.AWAKE if self.state == "active" else Tier.WARM,
            goal=self.goal,
            goal_by=self.by,
            goal_seen=self.seen,
            since_ms=round(_now_ms() - self.since_ms),
            kv_bytes=0,
            in_flight=0,
            can_rest=True,
        )

    # ------------------------------------------------------------------ as the wire's handler

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        assert isinstance(message, SetGoalMsg)
        self._listeners.add(conn)
        if message.goal is not None:
            self.goal, self.by, self.seen = message.goal, message.by, self.seen + 1
            self._changed.set()
        conn.send(self._am(), request_id)

    def closed(self, conn: Connection, reason: str) -> None:
        self._listeners.discard(conn)


class RestingEngineProcess:
    """A `RestingEngine` in its own process."""

    def __init__(self, directory: str, name: str = "engine-0") -> None:
        self.directory, self.name = directory, name
        self.process = subprocess.Popen([sys.executable, "-m", __name__, directory, name])

    def shall(self, goal: Tier | None = None) -> EngineReportMsg:
        with BlockingClient(engine_socket(self.directory, self.name), GOAL_CATALOGUE) as client:
            reply = client.request(SetGoalMsg(goal, "test")).message
        assert isinstance(reply, EngineReportMsg)
        return reply

    def reaches(self, state: str) -> None:
        def is_there() -> bool:
            with contextlib.suppress(Exception):  # not up yet
                return self.shall().state == state
            return False

        until(is_there, f"{self.name} to be {state}")

    @contextlib.contextmanager
    def kept_from(self, state: str):
        """Within this block it does not enter `state`."""
        path = Path(self.directory, f"{self.name}.no_{state}")
        path.touch()
        try:
            yield
        finally:
            path.unlink()

    def kill(self) -> None:
        """It, and the backend that dies with it."""
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


def _now_ms() -> float:
    return time.monotonic() * 1000


if __name__ == "__main__":
    asyncio.run(RestingEngine(*sys.argv[1:3]).run())
