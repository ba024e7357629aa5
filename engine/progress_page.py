"""How far a backend got, out of band: a counter on a page that it shares with its supervisor.

A supervisor must not take an engine for hung that makes tokens but answers late, so it does not
depend on answers. It makes the page; the process that hands tokens to clients advances the counter,
and only that one: tokens that never leave the model process are of no use to a client, and a step
of a long prefill reaches that process, too. Only whether the counter moves matters.

Best effort at both ends: without a page, progress comes with the answers (`HealthyMsg.progress`),
as with a backend that knows nothing of the page. The surprising thing: the memfd's size is sealed,
since a read behind a shortened file would end the supervisor with SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import MutableMapping

from plumbing.wire.fds import OwnedFd

PROGRESS_ENV = "UNDERSTUDY_PROGRESS"  # the number of the inherited descriptor
COUNTER_BYTES = 8
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ProgressPage:
    """The counter of one incarnation, at either end."""

    def __init__(self, page: mmap.mmap | None = None) -> None:
        """Without `page`: a counter that nobody else sees."""
        self._page = page
        memory = memoryview(page if page is not None else bytearray(COUNTER_BYTES))
        self._counter = memory[:COUNTER_BYTES].cast("Q")  # aligned, so written in one piece

    @classmethod
    def create(cls) -> tuple[ProgressPage, OwnedFd | None]:
        """The supervisor's page, and the descriptor for the backend, if there can be one."""
        try:
            with OwnedFd(os.memfd_create("progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)) as fd:
                os.ftruncate(fd.fileno(), mmap.PAGESIZE)
                fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SIZE_SEALS)
                return cls(mmap.mmap(fd.fileno(), mmap.PAGESIZE)), fd.duplicate()
        except OSError:
            return cls(), None

    @classmethod
    def take(cls, environ: MutableMapping[str, str] = os.environ) -> ProgressPage:
        """The backend's page; once, since neither variable nor descriptor is inherited further."""
        number = environ.pop(PROGRESS_ENV, "")
        if not number.isdecimal():
            return cls()
        try:
            with OwnedFd(int(number)) as fd:
                return cls(mmap.mmap(fd.fileno(), mmap.PAGESIZE))
        except (OSError, ValueError):
            return cls()

    @property
    def count(self) -> int:
        return self._counter[0]

    @count.setter
    def count(self, value: int) -> None:
        self._counter[0] = value

    def close(self) -> None:
        """Unmap it."""
        self._counter.release()
        if self._page is not None:
            self._page.close()
