"""Those that show what an engine is are told once for all that changes together, and after its
effects: to write a status down takes longer than they do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """Tells `listeners`, in their order, in the next turn of the event loop."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[], object]] = []
        self._due: asyncio.Handle | None = None

    def note(self) -> None:
        """Something has changed."""
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._tell)

    def close(self) -> None:
        """Tell now what is due."""
        if self._due is not None:
            self._due.cancel()
            self._tell()

    def _tell(self) -> None:
        self._due = None
        for listener in self.listeners:
            listener()
