"""The control socket: where backends register and users ask for status, drain, rehearse deaths.

Owns what is refused there. Must not know what follows from a request. The surprising thing:
`kill supervisor` is answered before it happens, every other kill after.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

from engine import messages as msg
from engine.core.events import Terminate
from engine.supervisor.engine import Engine
from engine.supervisor.goals import Goals
from engine.supervisor.incarnation import Incarnation
from engine.supervisor.tree import MAIN
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.pod.observers import Observers
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.server import Server

SUPERVISOR = "supervisor"
BACKEND_PREFIX = "backend-"
FAREWELL_S = 2.0  # for the commands that asked for the end: they print a line and exit
SPARE_FDS = 4  # so that at the limit two more may connect, and ask what is wrong
KILLED = 128 + signal.SIGKILL  # what shells report of a process that SIGKILL ended


class Control(Handler):
    """Serves `engine`'s control socket; descriptors are lent."""

    def __init__(self, engine: Engine, status: Callable[[], dict[str, Any]]) -> None:
        self._engine = engine
        self._status = status
        self._observers = Observers(engine.log, status)
        self._goals = Goals(engine)
        self._drainers: set[Connection] = set()
        self._no_drainers = asyncio.Event()
        self.server = Server(
            engine.settings.control_path, msg.CONTROL, self, service="engine", spare_fds=SPARE_FDS
        )
        engine.on_tick = self.server.reserve.refill

    async def farewell(self) -> None:
        """Report the end to every `engine drain` and wait until these have exited, for a moment:
        with this container's first process the kernel kills those that run inside of it."""
        for conn in self._drainers:
            conn.send(msg.OkMsg("exited"))
        if self._drainers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._no_drainers.wait(), FAREWELL_S)

    def closed(self, conn: Connection, reason: str) -> None:
        self._observers.leave(conn)
        self._goals.leave(conn)
        self._drainers.discard(conn)
        if not self._drainers:
            self._no_drainers.set()

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        try:
            self._answer(conn, message, request_id, fds)
        finally:
            close_all(fds)

    def _answer(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        match message:
            case msg.RegisterMsg():
                self._register(conn, message, fds[0].fileno() if fds else None)
                conn.send(msg.RegisteredMsg(), request_id)
            case msg.MayLoadMsg():
                self._may_load(conn, message, request_id)
            case msg.AttachedMsg():
                self._named(message.incarnation).attached(
                    message.rank, message.identity, message.place or ""
                )
                conn.send(msg.OkMsg(), request_id)
            case msg.BrokenMsg():
                self._named(message.incarnation).broken(message)
                conn.send(msg.OkMsg(), request_id)
            case msg.LeftoverMsg():
                self._named(message.incarnation)
                self._engine.leftovers.reported(message.path)
                conn.send(msg.OkMsg(), request_id)
            case msg.StatusMsg():
                conn.send(msg.StatusReplyMsg(self._status()), request_id)
            case msg.WatchMsg():
                self._observers.join(conn, message.since, request_id)
            case msg.SetGoalMsg():
                self._goals.shall(conn, message, request_id)
            case msg.LeaveMsg():
                before = self._engine.lifecycle.state
                may_resume = self._engine.lock.is_continued and not message.finish
                self._engine.post(Terminate("drain", may_resume))
                now = self._engine.lifecycle.state_of_departure
                self._drainers.add(conn)
                self._no_drainers.clear()
                conn.send(msg.OkMsg(f"{before.value} → {now.value}"), request_id)
            case msg.KillMsg(target="supervisor"):
                self._end(conn, message, request_id)
            case msg.KillMsg():
                conn.send(self._rehearse(message), request_id)
            case _:
                raise ProtocolError(
                    "engine.not_a_request", f"{message.TYPE} is not a request to an engine"
                )

    def _named(self, incarnation: str) -> Incarnation:
        running = self._engine.incarnation
        if running is None or running.id != incarnation:
            raise ProtocolError(
                "engine.stale_incarnation",
                f"{incarnation} is over, {running.id if running else 'none'} is running now;"
                " this process must exit",
                incarnation=incarnation,
            )
        return running

    def _register(self, conn: Connection, message: msg.RegisterMsg, lifeline: int | None) -> None:
        # The kernel reports 0 for a peer in another PID namespace.
        if conn.peer.pid not in (0, message.pid):
            raise ProtocolError(
                "engine.false_pid", f"pid {conn.peer.pid} registers itself as pid {message.pid}"
            )
        self._named(message.incarnation).tree.register(message.name, message.pid, lifeline)

    def _may_load(self, conn: Connection, message: msg.MayLoadMsg, request_id: int) -> None:
        incarnation = self._named(message.incarnation)
        objection = incarnation.loading.objection(message.rank, message.ranks)
        if objection is not None:
            raise ProtocolError("engine.bad_rank", objection)
        incarnation.may_load(message.rank, message.ranks, lambda load: conn.send(load, request_id))

    def _rehearse(self, message: msg.KillMsg) -> msg.KillingMsg:
        """Kill or stop the process that is named."""
        target, engine, running = message.target, self._engine, self._engine.incarnation
        name = target.removeprefix(BACKEND_PREFIX) if target != "backend" else MAIN
        pid = running.tree.pid_of(name) if running is not None else None
        if running is None or pid is None:
            names = [f"{BACKEND_PREFIX}{each}" for each in running.tree.pids()] if running else []
            raise UnderstudyError(
                "engine.unknown_target",
                f"there is no {target!r} to kill; choose from {', '.join([*names, SUPERVISOR])}",
                target=target,
            )
        running.rehearsed_ms = engine.clock.now_ms()
        running.tree.signal_one(pid, signal.SIGSTOP if message.is_stop else signal.SIGKILL)
        did = "stopped" if message.is_stop else "killed"
        data = {"target": target, "child_pid": pid, "is_stop": message.is_stop}
        engine.log.record("engine.rehearsal", f"{did} {target} (pid {pid})", data=data)
        return msg.KillingMsg(pid, running.rehearsed_ms)

    def _end(self, conn: Connection, message: msg.KillMsg, request_id: int) -> None:
        """End this supervisor as a SIGKILL from outside would. PID 1 of a namespace is not killed
        by its own signal: it exits."""
        if message.is_stop:
            raise UnderstudyError(
                "engine.no_such_rehearsal",
                "a stopped supervisor is detected by its liveness probe: send it SIGSTOP yourself",
            )
        self._engine.log.record("engine.rehearsal", "ending this supervisor, as requested")
        conn.send(msg.KillingMsg(os.getpid(), self._engine.clock.now_ms()), request_id)
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(KILLED)
