"""Watches the files of unowned memory until the kernel says that they are free.

Nothing announces the release of a flock, so the watch polls: every millisecond for the first second
(a killed process is usually gone by then), then every ten. A try costs microseconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from gms import epoch_file
from gms.server.driver_thread import DriverThread
from plumbing.errors import UnderstudyError, explain_shortage
from plumbing.service.clock import Clock
from plumbing.service.procfs import holders_of

FAST_MS, FAST_FOR_MS = 1.0, 1000.0
SLOW_MS = 10.0
HOLDERS_AFTER_MS = 100.0  # a scan of /proc takes milliseconds: only for those that linger
HOLDERS_EVERY_MS = 1000.0

logger = logging.getLogger(__name__)


class MemoryWatch:
    """Watches epochs or KV pools by their ids: calls `free(name)` once for each that is free, and
    `holders(name, pids)` while it waits. `look` says whether a file is free; that of an epoch is
    then removed, while a KV pool outlives its holders.

    A file that cannot be opened counts as held: `failed(name, message)` is called once for each
    error, and `problem` holds it while it lasts.
    """

    def __init__(
        self,
        clock: Clock,
        thread: DriverThread,
        path_of: Callable[[str], str],
        free: Callable[[str], None],
        holders: Callable[[str, tuple[int, ...]], None],
        failed: Callable[[str, str], object],
        *,
        what: str = "epoch",
        blocked: str = "load",
        look: Callable[[str], bool] = epoch_file.remove_if_free,
    ) -> None:
        self._clock, self._thread, self._path_of = clock, thread, path_of
        self._free, self._holders, self._failed = free, holders, failed
        self._what, self._blocked, self._look = what, blocked, look
        self._since_ms: dict[str, float] = {}
        self._scan_ms: dict[str, float] = {}
        self._problems: dict[str, str] = {}  # by name, of the last try
        self._reported: set[tuple[str, str]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def problem(self) -> str | None:
        """Why it is unknown whether one of them is still mapped."""
        return next(iter(self._problems.values()), None)

    def add(self, name: str) -> None:
        """Watch the file of `name` from now on."""
        now_ms = self._clock.now_ms()
        self._since_ms[name] = now_ms
        self._scan_ms[name] = now_ms + HOLDERS_AFTER_MS
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(0, self._try)

    def discard(self, name: str) -> None:
        """Stop watching the file of `name`."""
        self._since_ms.pop(name, None)
        self._scan_ms.pop(name, None)
        self._problems.pop(name, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._since_ms.clear()

    def _try(self) -> None:
        self._timer = None
        now_ms = self._clock.now_ms()
        freed = [name for name in self._since_ms if self._is_gone(name)]
        for name in freed:
            self.discard(name)
        for name in self._since_ms:
            if self._scan_ms[name] <= now_ms:
                self._scan_ms[name] = now_ms + HOLDERS_EVERY_MS
                self._find_holders(name)
        if self._since_ms:
            is_fresh = any(now_ms - since < FAST_FOR_MS for since in self._since_ms.values())
            delay_s = (FAST_MS if is_fresh else SLOW_MS) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._try)
        for name in freed:
            self._free(name)
        for problem in self._problems.items():
            if problem not in self._reported:
                self._reported.add(problem)
                self._failed(*problem)

    def _is_gone(self, name: str) -> bool:
        path = self._path_of(name)
        try:
            is_free = self._look(path)
        except OSError as error:  # out of descriptors, for one: not known is not free
            self._problems[name] = (
                f"cannot check whether {self._what} {name} is still mapped, so no engine may "
                f"{self._blocked} until {path} can be checked: {explain_shortage(error.errno)}"
            )
            return False
        self._problems.pop(name, None)
        return is_free

    def _find_holders(self, name: str) -> None:
        path = self._path_of(name)

        def find() -> tuple[int, ...]:
            try:
                found = os.stat(path)
            except OSError:
                return ()
            # Not ourselves: this watch may be trying the lock on the loop.
            mine = os.getpid()
            return tuple(pid for pid in holders_of(found.st_dev, found.st_ino) if pid != mine)

        def failed(error: UnderstudyError) -> None:
            logger.debug("could not find the holders of %s: %s", name, error)

        self._thread.submit(find, lambda pids: self._holders(name, pids), failed)
