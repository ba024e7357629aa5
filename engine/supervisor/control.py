"""The control socket: backends register there, users ask for status, drain and rehearsed deaths,
and set the engine's goal.

Owns what is refused, and the connections that receive every change of the engine (`Goals`). What
follows from a request or a goal is `engine/core`. `kill supervisor` is answered before it happens,
every other kill after.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from engine import messages as msg
from engine.core.events import Shall, State, Terminate
from engine.core.lifecycle import HOLDING, tier_of
from engine.supervisor.engine import Engine
from engine.supervisor.hub import shortage
from engine.supervisor.incarnation import Incarnation
from engine.supervisor.settings import HOST_PREFIX
from engine.supervisor.tree import MAIN
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.pod.messages import EngineReportMsg, SetGoalMsg, Tier
from plumbing.pod.models import device_of
from plumbing.pod.observers import PartServer
from plumbing.service import procfs
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message

SUPERVISOR = "supervisor"
BACKEND_PREFIX = "backend-"
FAREWELL_S = 2.0  # for the commands that asked for the end: they print a line and exit


class Control(Handler):
    """Serves `engine`'s control socket; descriptors are lent."""

    def __init__(self, engine: Engine, status: Callable[[], dict[str, Any]]) -> None:
        self._engine = engine
        self._goals = Goals(engine)
        self._drainers: set[Connection] = set()
        self._no_drainers = asyncio.Event()
        what = engine.settings.control_path, msg.CONTROL, self, engine.log, status
        self.server = PartServer(*what, service="engine", elsewhere="--dir or --engine-id")

    async def farewell(self) -> None:
        """Report the end to every `engine drain` and wait until these have exited, for a moment:
        with this container's first process the kernel kills those that run inside of it."""
        for conn in self._drainers:
            conn.send(msg.OkMsg("exited"))
        if self._drainers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._no_drainers.wait(), FAREWELL_S)

    def closed(self, conn: Connection, reason: str) -> None:
        self._goals.leave(conn)
        self._drainers.discard(conn)
        if not self._drainers:
            self._no_drainers.set()

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        try:
            self._answer(conn, message, request_id, fds)
        except OSError as error:
            raise UnderstudyError(
                "engine.shortage", shortage(f"answer {message.TYPE}", error)
            ) from error
        finally:
            close_all(fds)

    def _answer(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        match message:
            case msg.RegisterMsg():
                lifeline = fds[0].fileno() if fds else None
                self._named(message.incarnation).tree.register(message.name, message.pid, lifeline)
                conn.send(msg.OkMsg(), request_id)
            case msg.MayLoadMsg():
                self._named(message.incarnation).may_load(
                    message.ranks, lambda load: conn.send(load, request_id)
                )
            case msg.AttachedMsg():
                self._named(message.incarnation).attached(
                    message.rank, message.identity, message.place or ""
                )
                conn.send(msg.OkMsg(), request_id)
            case msg.FaultReportMsg():
                self._named(message.incarnation).broken(message)
                conn.send(msg.OkMsg(), request_id)
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

    def _rehearse(self, message: msg.KillMsg) -> msg.KillingMsg:
        """Kill or stop the process that is named."""
        target, engine, running = message.target, self._engine, self._engine.incarnation
        name = target.removeprefix(BACKEND_PREFIX) if target != "backend" else MAIN
        pids = running.tree.pids() if running is not None else {}
        pid = pids.get(name)
        if running is None or pid is None:
            names = [f"{BACKEND_PREFIX}{each}" for each in pids]
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
        """End this supervisor as a SIGKILL from outside would."""
        if message.is_stop:
            raise UnderstudyError(
                "engine.no_such_rehearsal",
                "a stopped supervisor is detected by its liveness probe: send it SIGSTOP yourself",
            )
        self._engine.log.record("engine.rehearsal", "ending this supervisor, as requested")
        conn.send(msg.KillingMsg(os.getpid(), self._engine.clock.now_ms()), request_id)
        os.kill(os.getpid(), signal.SIGKILL)


NO_NEWS = {"token": 0, "goal_by": "", "since_ms": 0, "in_flight": 0}  # of a report
FAULT_CHARS_MAX = 4096


class Goals:
    """Answers `shall`, and reports what the engine is to all who have asked.

    To a pool, in a pod with models, also sizes: weights and KV memory in equal shards on the ranks'
    devices, and what the processes take beside them, measured once when the backend is prepared. On
    a GPU the kernel shows nothing of that, so it stays unknown here.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watchers: set[Connection] = set()
        self._told: EngineReportMsg | None = None
        self._measured: tuple[str, dict[str, int]] = ("", {})  # of which incarnation
        # Before it is written down: a pool waits for it.
        engine.listeners.insert(0, self._changed)
        # A pool that heard of requests waits for their end.
        engine.history.on_idle = lambda: self._tell(self.report())

    def shall(self, conn: Connection, message: SetGoalMsg, request_id: int) -> None:
        """Take a goal, if there is one, and tell `conn` of every change from now on.

        Raises:
            UnderstudyError: `engine.other_model`, `engine.cannot_rest`, `engine.no_such_tier`.
        """
        pool = message.pool
        if pool is not None:
            self._check_model(pool.model)
        if message.goal is not None:
            self._check(message.goal)
            by = message.by or "an unnamed client"
            generation, is_kill = (pool.generation, pool.is_kill) if pool else (None, False)
            self._engine.post(Shall(message.goal, by, generation, is_kill))
        self._watchers.discard(conn)
        self._changed()  # for the others; this one hears it once, as the answer
        conn.send(self.report(), request_id)
        self._watchers.add(conn)

    def leave(self, conn: Connection) -> None:
        self._watchers.discard(conn)

    def report(self) -> EngineReportMsg:
        """What the engine is now."""
        engine, now, running = self._engine, self._engine.lifecycle.now, self._engine.incarnation
        prepared = running.prepared if running is not None else None
        places = running.loading.places if running is not None else ()
        in_pool = running is not None and prepared is not None and engine.settings.model
        return EngineReportMsg(
            engine=engine.settings.engine,
            incarnation=now.incarnation or "",
            token=now.token,
            state=now.state.value,
            tier=tier_of(now.state, is_away=now.is_away),
            goal=now.shall.goal,
            goal_by=now.shall.by,
            since_ms=round(engine.history.spent_ms),
            in_flight=engine.history.in_flight,
            can_rest=now.can_rest and not self._cannot_rest(),
            fault=self._fault()[:FAULT_CHARS_MAX],
            model=engine.settings.model,
            generation=now.generation,
            base_bytes=self._base_bytes(running, places) if running and in_pool else {},
            weights_bytes=shards(prepared.weights_bytes, places) if prepared else {},
            kv_bytes=shards(prepared.kv_bytes, places) if prepared else {},
            can_resume=prepared is not None and prepared.continuation != "",
            is_permanent=now.exit_code is not None,
            is_leaving=now.is_leaving,
            is_machine=bool(engine.machine_fault),
        )

    def _changed(self) -> None:
        report = self.report()
        said = replace(report, **NO_NEWS)
        if said != self._told:
            self._told = said
            self._tell(report)

    def _tell(self, report: EngineReportMsg) -> None:
        for conn in tuple(self._watchers):
            conn.send(report)

    def _check_model(self, model: str) -> None:
        settings = self._engine.settings
        if model != settings.model:
            of = f"is an engine of {settings.model}" if settings.model else "has no model's name"
            raise UnderstudyError(
                "engine.other_model",
                f"{settings.engine} {of}, not of {model}: start it with --model-name {model}, or"
                " name another engine in the pool file",
            )

    def _check(self, goal: Tier) -> None:
        """Whether this engine can obey, as far as is known yet."""
        settings, running = self._engine.settings, self._engine.incarnation
        if goal is Tier.AWAKE or (goal is Tier.COLD and not settings.is_remote):
            return
        why = self._cannot_rest()
        if why:
            raise UnderstudyError("engine.cannot_rest", why)
        prepared = running.prepared if running is not None else None
        if goal is Tier.OFFLOADED and prepared is not None and prepared.cannot_offload:
            why = f"{settings.engine} can be `warm` or `awake`: {prepared.cannot_offload}"
            raise UnderstudyError("engine.no_such_tier", why)

    def _cannot_rest(self) -> str:
        """Why this engine cannot rest, as far as is known yet, or nothing."""
        settings, running = self._engine.settings, self._engine.incarnation
        if settings.is_remote:
            return f"{settings.engine} cannot sleep, because it reaches its lock server over TCP"
        if running is None or running.prepared is None or running.can_rest:
            return ""
        return f"{settings.engine} cannot sleep: its {settings.backend} backend does not support it"

    def _fault(self) -> str:
        """Why it is not at its goal; "" while it is, or is on its way."""
        now, running = self._engine.lifecycle.now, self._engine.incarnation
        if now.state is State.DEAD:
            return "" if now.is_meant else now.reason
        note = running.note if running is not None else ""
        if now.shall.goal is not Tier.AWAKE and now.state in HOLDING:
            return self._cannot_rest() or note
        return note

    def _base_bytes(self, running: Incarnation, places: Sequence[str]) -> dict[str, int]:
        if self._measured[0] != running.id:
            private = sum(procfs.private_bytes(pid) or 0 for pid in running.tree.everyone())
            hosts = places and all(place.startswith(HOST_PREFIX) for place in places)
            self._measured = running.id, shards(private, places) if hosts else {}
        return self._measured[1]


def shards(total_bytes: int, places: Sequence[str]) -> dict[str, int]:
    """In equal parts, by device; rounded up, so that nothing is booked too small."""
    part = -(-total_bytes // len(places)) if places else 0
    found: dict[str, int] = {}
    for device in map(device_of, places):
        found[device] = found.get(device, 0) + part
    return found
