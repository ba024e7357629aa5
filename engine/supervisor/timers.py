"""Named timers of one supervisor: setting one again replaces it, closing ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timers:
    """Named timers, of which at most one of each name is running."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handles: dict[str, asyncio.TimerHandle] = {}
        self._is_closed = False

    def after(self, name: str, delay_ms: float, callback: Callable[[], None]) -> None:
        """Call `callback` in `delay_ms`, instead of what `name` was going to do."""
        self.cancel(name)
        if not self._is_closed:
            self._handles[name] = self._loop.call_later(max(0.0, delay_ms) / 1000, callback)

    def cancel(self, name: str) -> None:
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.cancel()

    def close(self) -> None:
        self._is_closed = True
        for name in list(self._handles):
            self.cancel(name)
