"""What engines had queued when they died: the pages of those that have greeted this process."""

from __future__ import annotations

import contextlib
import os

from plumbing.pod.paths import engine_queue
from plumbing.pod.queue_page import QueueReader, attempt_name


class EngineQueues:
    """One open page for each engine; the next incarnation's takes its place."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._process = int.from_bytes(os.urandom(8))  # attempts of other processes are not ours
        self._pages: dict[str, QueueReader] = {}

    def name(self, attempt: int) -> bytes:
        """What an engine is told that this attempt is called."""
        return attempt_name(self._process, attempt)

    def greeted(self, engine: str) -> None:
        """Open its page, if it has one."""
        old = self._pages.pop(engine, None)
        if old is not None:
            old.close()
        with contextlib.suppress(OSError):  # then each of its requests is charged with its death
            self._pages[engine] = QueueReader(engine_queue(self._directory, engine))

    def queued(self) -> frozenset[int]:
        """Attempts that no engine has scheduled."""
        found = (page.queued(self._process) for page in self._pages.values())
        return frozenset().union(*found)
