"""The process around one engine: sockets, signals, and an exit with a reason.

Owns what must exist before the first launch and be closed after the last. What the engine does is
`engine.py`, why it does it is `engine/core`. The surprising thing: an exception in any callback
ends the process. A supervisor that is wrong about itself is worse than none, and its death is what
the whole pod is built to survive.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from engine.core import probes
from engine.core.events import Terminate, TerminateNow
from engine.supervisor.control import Control
from engine.supervisor.engine import Engine
from engine.supervisor.settings import EngineSettings
from engine.supervisor.state_file import EngineStateFile
from engine.supervisor.status import EngineStatus
from plumbing.errors import GivenUpError, UsageError
from plumbing.service.clock import SystemClock
from plumbing.service.http import HttpServer
from plumbing.service.process import become_subreaper
from plumbing.service.signals import SignalInbox

EXIT_USAGE = 2
# A host that signals every process, and the runner that it signals too, tell this one twice.
SAME_ORDER_MS = 1_000.0
# Keys of the loop's report of an exception that no callback of ours raised.
ELSEWHERE = frozenset({"transport", "task", "future"})


class EngineSupervisor:
    """Runs one engine from its first launch to its exit."""

    def __init__(self, settings: EngineSettings) -> None:
        self._engine = engine = Engine(settings, SystemClock())
        self._state_file = EngineStateFile(engine)
        status = EngineStatus(engine, self._state_file)
        self._control = Control(engine, status.document)
        self._http = HttpServer(
            settings.config["http_host"],
            settings.http_port,
            probes={name: functools.partial(status.probe, name) for name in probes.TABLE},
            status=status.document,
            metrics=engine.metrics.page,
            events=engine.log,
            allowed_hosts=settings.config["http_allowed_host"],
            yield_ms=settings.config["yield_ms"],
        )
        status.sockets = self._control.server, self._http

    async def run(self) -> None:
        """Run until asked to exit, or until no relaunch can help.

        Raises:
            UnderstudyError: why the engine ended, with the exit code; also a port or a socket
                that is in use.
        """
        become_subreaper()
        engine, loop = self._engine, asyncio.get_running_loop()
        loop.set_exception_handler(self._crash)
        signals = SignalInbox()
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._control.server.start()
            await self._http.start()
            for coroutine in (engine.lock.run(), self._heed(signals)):
                task = loop.create_task(coroutine)
                task.add_done_callback(self._ended)
                tasks.append(task)
            engine.start()
            await engine.exit
        finally:
            engine.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            signals.close()
            await self._http.stop()
            await self._control.farewell()
            await self._control.server.close()
            self._state_file.close()
        _depart(engine)

    async def _heed(self, signals: SignalInbox) -> None:
        await signals.get()
        engine = self._engine
        engine.post(Terminate(may_resume=engine.lock.is_continued))
        told_ms = engine.clock.now_ms()
        while True:
            await signals.get()
            if engine.clock.now_ms() - told_ms > SAME_ORDER_MS:
                engine.post(TerminateNow())

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Neither task ends by itself: what ended it ends us."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._engine.exit.done():
            self._engine.exit.set_exception(error)

    def _crash(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An uncaught exception. In a callback it is our fault, an OSError too: what a peer does to
        a connection is handled there, and only HTTP's own tasks may raise its end."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        is_peers = isinstance(error, OSError) and not ELSEWHERE.isdisjoint(context)
        if isinstance(error, Exception) and not is_peers and not self._engine.exit.done():
            self._engine.exit.set_exception(error)


def _depart(engine: Engine) -> None:
    """Return for a requested exit; otherwise raise its reason.

    Raises:
        UnderstudyError: the reason, with its exit code.
    """
    now, fault = engine.lifecycle.now, engine.last_fault
    if now.is_leaving:
        return
    code = "engine.crash_loop" if engine.verdict else fault.code if fault else "engine.cannot_go_on"
    raise (UsageError if now.exit_code == EXIT_USAGE else GivenUpError)(code, now.reason)
