"""A pod in one process: the sockets, messages and answers of a real one, and moods to misbehave.

The "backend" of the active engine is a real child process, so that its death is seen by real
pidfds. Moods: `lie` (the second engine answers something else), `overlap` (grants while the old
child lives), `stuck` (nobody is granted), `refuse` (503 during the failover instead of waiting).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

from aiohttp import web

from engine import messages as engine_messages
from gateway import messages as gateway_messages
from lockserver import messages as lock_messages
from plumbing.service.clock import SystemClock
from plumbing.wire.connection import Handler
from plumbing.wire.server import Server
from tests.helpers import free_port

clock = SystemClock()
ENGINES = ("engine-0", "engine-1")
PARTS = ("lockserver", "gateway", *ENGINES)


class FakePod:
    """Start with `async with`; `directory` then looks like a pod's."""

    def __init__(self, directory: Path, mood: str = "") -> None:
        self.directory = directory
        self.mood = mood
        self.port = free_port()
        self.token = 1
        self.states = {"engine-0": "active", "engine-1": "standby"}
        self._serving = asyncio.Event()
        self._has_refused = asyncio.Event()
        self._serving.set()
        self._child: Process | None = None
        self._left_alive: list[Process] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._event_ids = itertools.count(1)
        self._watchers: dict[str, set[Any]] = {name: set() for name in PARTS}

    @property
    def active(self) -> str:
        return next((name for name, state in self.states.items() if state == "active"), "")

    async def __aenter__(self) -> FakePod:
        self._child = await self._spawn()
        lock_path = str(self.directory / "lockserver.sock")
        handler = _Handler(self, "lockserver")
        self._servers = [Server(lock_path, lock_messages.CATALOGUE, handler, service="lockserver")]
        for name in ENGINES:
            path = str(self.directory / f"engine_{name}.sock")
            handler = _Handler(self, name)
            self._servers.append(Server(path, engine_messages.CONTROL, handler, service=name))
        path, handler = str(self.directory / "gateway.sock"), _Handler(self, "gateway")
        self._servers.append(Server(path, gateway_messages.CONTROL, handler, service="gateway"))
        for server in self._servers:
            await server.start()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._web = web.AppRunner(app, shutdown_timeout=0.01)
        await self._web.setup()
        await web.TCPSite(self._web, "127.0.0.1", self.port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._web.cleanup()
        for server in self._servers:
            await server.close()
        for child in (*self._left_alive, self._child):
            if child is not None and child.returncode is None:
                child.kill()
                await child.wait()

    def document(self, name: str) -> dict[str, Any]:
        if name == "gateway":
            return {"accepting": True, "load": {"parked_oldest_ms": 0.0}}
        if name != "lockserver":
            about = {"id": name, "role": "auto", "state": self.states[name], "pid": 1}
            return {"schema": 1, "engine": about, "inflight": 0}
        waiters = [{"engine": e} for e, state in self.states.items() if state == "standby"]
        holder = {"engine": self.active, "token": self.token} if self.active else None
        lock = {"state": "held" if holder else "releasing", "holder": holder, "waiters": waiters}
        service = {"active": {"address": f"127.0.0.1:{self.port}", "state": "lent"}}
        return {"schema": 1, "token": self.token, "locks": {"active": lock}, "service": service}

    def kill(self, target: str) -> tuple[int, float]:
        """What a real engine does with `kill`: SIGKILL, then everything that follows from it."""
        child, killed_ms = self._child, clock.now_ms()
        assert child is not None
        if self.mood != "overlap":
            child.send_signal(signal.SIGKILL)
        self._serving.clear()
        old = self.active
        self.states[old] = "dead"
        self._event(old, "engine.child_exit", {"seen_mono_ms": clock.now_ms(), "pid": child.pid})
        task = asyncio.get_running_loop().create_task(self._fail_over(old, child))
        self._tasks.add(task)
        return child.pid, killed_ms

    async def _fail_over(self, old: str, child: Process) -> None:
        if self.mood == "stuck":
            return
        new = next(name for name in ENGINES if name != old)
        if self.mood == "overlap":
            self._left_alive.append(child)
        else:
            await child.wait()
        if self.mood == "refuse":
            await self._has_refused.wait()  # clients stream without pause, so one comes
        fenced_ms = clock.now_ms()
        self._grant(new)
        data = {"lock": "active", "engine": new, "token": self.token, "fenced_mono_ms": fenced_ms}
        self._event("lockserver", "lock.granted", {**data, "lost_mono_ms": fenced_ms})
        self._child = await self._spawn()
        self.states[new] = "waking"
        self._event(new, "engine.state", {"from": "standby", "to": "waking"})
        self.states[new] = "active"
        self._event(new, "engine.state", {"from": "waking", "to": "active"})
        self._serving.set()
        self.states[old] = "standby"

    def _grant(self, engine: str) -> None:
        self.token += 1
        incarnation = f"{engine}-{self.token:016x}"
        for conn in self._watchers["lockserver"]:
            conn.send(lock_messages.GrantedMsg("active", engine, incarnation, self.token))

    def _event(self, source: str, kind: str, data: dict[str, Any]) -> None:
        about = {"id": next(self._event_ids), "type": kind, "source": source}
        record = {**about, "mono_ms": clock.now_ms(), "data": data}
        for conn in self._watchers[source]:
            conn.send(lock_messages.EventMsg(record))

    @staticmethod
    async def _spawn() -> Process:
        code = "import signal; signal.pause()"
        return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", code)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.mood == "refuse" and not self._serving.is_set():
            self._has_refused.set()
            return web.json_response({"error": {}}, status=503)
        await self._serving.wait()
        engine = self.active
        headers = {
            "Content-Type": "text/event-stream",
            "X-Understudy-Engine": engine,
            "X-Understudy-Token": str(self.token),
        }
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the client has left
            for number in range(8):
                word = f"{number} " if (self.mood, engine) != ("lie", "engine-1") else "x "
                finish = "length" if number == 7 else None
                choice: dict[str, Any] = {"finish_reason": finish, "text": word}
                if "chat" in request.path:
                    choice = {"finish_reason": finish, "delta": {"content": word}}
                await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                await asyncio.sleep(0.002)  # a token takes a moment, so that kills meet streams
                await self._serving.wait()  # … which go on at the next engine
            await response.write(b"data: [DONE]\n\n")
        return response


class _Handler(Handler):
    """The socket of one part."""

    def __init__(self, pod: FakePod, name: str) -> None:
        self._pod = pod
        self._name = name

    def received(self, conn: Any, message: Any, request_id: int, fds: list[Any]) -> None:
        wire = lock_messages if self._name == "lockserver" else engine_messages
        if message.TYPE == "kill":
            pid, killed_ms = self._pod.kill(message.target)
            conn.send(engine_messages.KillingMsg(pid, killed_ms), request_id)
            return
        if message.TYPE == "watch":
            self._pod._watchers[self._name].add(conn)
        conn.send(wire.StatusReplyMsg(self._pod.document(self._name)), request_id)

    def closed(self, conn: Any, reason: str) -> None:
        self._pod._watchers[self._name].discard(conn)
