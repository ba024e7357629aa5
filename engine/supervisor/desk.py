"""What the control socket may ask of an engine, and what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from engine.core.events import Event, Terminate
from engine.core.lifecycle import Lifecycle
from engine.messages import (
    Attached,
    Broken,
    FaultReport,
    Kill,
    Killing,
    Leftover,
    Load,
    MayLoad,
    Register,
)
from engine.supervisor.launch import Launch
from engine.supervisor.tree import MAIN
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog

SUPERVISOR = "supervisor"
BACKEND_PREFIX = "backend-"
KILLED = 128 + signal.SIGKILL  # what shells report of a process that SIGKILL ended


class Desk:
    """Implements `control.Desk` for one supervisor."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        current: Callable[[], Launch | None],
        *,
        post: Callable[[Event], None],
        status: Callable[[], dict[str, Any]],
        log: EventLog,
        clock: Clock,
    ) -> None:
        """`current` is the incarnation that runs, if any."""
        self.status = status
        self._lifecycle = lifecycle
        self._current = current
        self._post = post
        self._log = log
        self._clock = clock

    def leave(self, cause: str) -> str:
        before = self._lifecycle.state
        self._post(Terminate(cause))
        return f"{before.value} → {self._lifecycle.state.value}"

    def register(self, message: Register, lifeline: int | None) -> None:
        launch = self._launch_of(message.incarnation)
        launch.tree.register(message.name, message.pid, lifeline)

    def may_load(self, message: MayLoad, reply: Callable[[Load], None]) -> None:
        launch = self._launch_of(message.incarnation)
        objection = launch.loading.objection(message.rank, message.ranks)
        if objection is not None:
            raise ProtocolError("engine.bad_rank", objection)
        launch.may_load(message.rank, message.ranks, reply)

    def attached(self, message: Attached) -> None:
        self._launch_of(message.incarnation).attached(message.rank, message.identity)

    def broken(self, message: Broken) -> None:
        self._launch_of(message.incarnation).broken(
            FaultReport(message.code, message.message, message.permanent, message.exit_code)
        )

    def leftover(self, message: Leftover) -> None:
        self._launch_of(message.incarnation).leftover(message.path)

    def rehearse(self, message: Kill) -> Killing:
        """Kill or stop what is named; the supervisor itself only says that it is about to end."""
        target = message.target
        if target == SUPERVISOR:
            if message.is_stop:
                raise UnderstudyError(
                    "engine.no_such_rehearsal",
                    "a supervisor that is stopped is found by its liveness probe: send it SIGSTOP",
                )
            pid = os.getpid()
            self._log.record("engine.rehearsal", "about to end itself, as it was asked to")
            return Killing(pid, self._clock.now_ms())
        launch = self._current()
        name = target.removeprefix(BACKEND_PREFIX) if target != "backend" else MAIN
        found = launch.tree.pid_of(name) if launch is not None else None
        if launch is None or found is None:
            known = [f"{BACKEND_PREFIX}{each}" for each in launch.tree.pids()] if launch else []
            raise UnderstudyError(
                "engine.unknown_target",
                f"there is no {target!r} to kill; there are {', '.join([*known, SUPERVISOR])}",
                target=target,
            )
        launch.rehearsed_ms = self._clock.now_ms()
        launch.tree.signal_one(found, signal.SIGSTOP if message.is_stop else signal.SIGKILL)
        did = "stopped" if message.is_stop else "killed"
        data = {"target": target, "child_pid": found, "is_stop": message.is_stop}
        self._log.record("engine.rehearsal", f"{did} {target} (pid {found})", data=data)
        return Killing(found, launch.rehearsed_ms)

    def end_at_once(self) -> None:
        """As a SIGKILL from outside would. PID 1 of a namespace is deaf to its own: it exits."""
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(KILLED)

    def _launch_of(self, incarnation: str) -> Launch:
        launch = self._current()
        if launch is None or launch.incarnation != incarnation:
            running = launch.incarnation if launch else "none"
            raise ProtocolError(
                "engine.stale_incarnation",
                f"{incarnation} is over, {running} runs now; this process must end",
                incarnation=incarnation,
            )
        return launch
