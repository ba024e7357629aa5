"""What every part of one supervisor shares: settings, clock, event log, named timers, the inbox of
the lifecycle, and what a shortage means.

Every callback (a pidfd, the channel, the lock, a signal, a timer) only posts an event. Events are
handled one after the other; an effect that causes further events posts them too.
"""

from __future__ import annotations

import asyncio
import errno
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from engine.core.events import EngineEvent
from engine.supervisor.settings import EngineSettings
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from plumbing.service.init import SHORTAGE
from plumbing.wire.sockets import no_descriptors


class EngineHub(ABC):
    """Of one engine. At most one timer of each name is running."""

    def __init__(self, settings: EngineSettings, clock: Clock) -> None:
        self.settings, self.clock = settings, clock
        self.log = EventLog(settings.engine, clock)
        self._inbox: deque[EngineEvent] = deque()
        self._is_handling = self._is_closed = False
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @abstractmethod
    def handle(self, event: EngineEvent) -> None:
        """Let the lifecycle judge `event`, and perform what follows."""

    def post(self, event: EngineEvent) -> None:
        """Handle `event` after those posted before it."""
        self._inbox.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._inbox:
                self.handle(self._inbox.popleft())
        finally:
            self._is_handling = False

    def after(self, name: str, delay_ms: float, callback: Callable[[], None]) -> None:
        """Call `callback` in `delay_ms`, instead of what `name` was going to do."""
        self.cancel(name)
        if not self._is_closed:
            loop = asyncio.get_running_loop()
            self._timers[name] = loop.call_later(max(0.0, delay_ms) / 1000, callback)

    def cancel(self, *names: str) -> None:
        for name in names:
            handle = self._timers.pop(name, None)
            if handle is not None:
                handle.cancel()

    def close(self) -> None:
        """End all timers, and start no more."""
        self._is_closed = True
        self.cancel(*self._timers)


def shortage(what: str, error: OSError) -> str:
    """Why `what` is not possible for now, as a sentence; the caller tries again.

    A supervisor holds far fewer descriptors than its limit. Having none left is a defect of ours,
    which ends it at once; an init starts it again, for ever.
    """
    reason = no_descriptors(what, error)
    if error.errno == errno.EMFILE:
        os.write(2, f"error: {reason}\n".encode())
        os._exit(SHORTAGE)
    return reason.message
