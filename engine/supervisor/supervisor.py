"""The process around one engine: sockets, signals, and an end with a reason.

Owns what must be there before the first launch and be closed after the last. What the engine does
is `runner.py`, why it does it is `engine/core`. The surprising thing: an exception in any callback
ends the process. A supervisor that is wrong about itself is worse than none, and its death is a
thing that the whole pod is built to survive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from engine.core import probes
from engine.core.events import Terminate, TerminateNow
from engine.supervisor.control import Control
from engine.supervisor.departure import depart
from engine.supervisor.desk import Desk
from engine.supervisor.runner import Runner
from engine.supervisor.settings import Settings
from engine.supervisor.tree import become_subreaper
from plumbing.service.clock import Clock, SystemClock
from plumbing.service.http import HttpServer, Probe
from plumbing.service.signals import SignalInbox


class Supervisor:
    """Runs one engine from its first launch to its departure."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._settings = settings
        clock = clock or SystemClock()
        self._runner = runner = Runner(settings, clock)
        desk = Desk(
            runner.lifecycle,
            lambda: runner.launch,
            post=runner.post,
            status=runner.status,
            log=runner.log,
            clock=clock,
        )
        self._control = Control(settings.control_path, desk, runner.log)
        self._http = HttpServer(
            settings.config["http_host"],
            settings.http_port,
            probes={name: self._prober(name) for name in probes.TABLE},
            status=runner.status,
            metrics=runner.metrics.page,
            events=runner.log,
        )

    async def run(self) -> None:
        """Run until told to end, or until no relaunch can help.

        Raises:
            UnderstudyError: why the engine ended, with the exit code; also a port or a socket
                that is in use.
        """
        become_subreaper()
        runner, loop = self._runner, asyncio.get_running_loop()
        loop.set_exception_handler(self._crash)
        signals = SignalInbox(loop)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._control.server.start()
            await self._http.start()
            for coroutine in (runner.lock.client.run(), self._heed(signals)):
                task = loop.create_task(coroutine)
                task.add_done_callback(self._ended)
                tasks.append(task)
            runner.start()
            ending = await runner.exit
        finally:
            runner.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            signals.close()
            await self._http.stop()
            await self._control.server.close()
            await runner.state_file.close()
            await runner.leftovers.close()
        is_loop = runner.relauncher.verdict is not None
        depart(self._settings, ending, runner.last_fault, is_loop=is_loop)

    async def _heed(self, signals: SignalInbox) -> None:
        await signals.get()
        self._runner.post(Terminate())
        while True:
            await signals.get()
            self._runner.post(TerminateNow())

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Neither task ends by itself: what ended it ends us."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._runner.exit.done():
            self._runner.exit.set_exception(error)

    def _crash(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody caught; a peer that went away is none of ours."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        is_ours = isinstance(error, Exception) and not isinstance(error, OSError)
        if error is not None and is_ours and not self._runner.exit.done():
            self._runner.exit.set_exception(error)

    def _prober(self, endpoint: str) -> Callable[[], Probe]:
        return lambda: self._runner.probe(endpoint)
