"""A program's child process, and the times that a pod has to stop.

Kubernetes, systemd and `understudy up` are told the same `GRACE_MS`: change all of them together.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from plumbing.wire.fds import OwnedFd

GRACE_MS = 45_000
ENDING_MS = 2_000  # of it: for the errors of streams that are left, for dying trees, for exits
DRAIN_MS = GRACE_MS - ENDING_MS


class ChildProcess:
    """A running child, started and watched on its supervisor's loop; `wait` for its end before it
    is dropped.

    Not asyncio's subprocess: on uvloop, each start that fails for lack of descriptors loses up to
    three more (tried), and such a start is retried for ever.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], **options: Any) -> None:
        """Start it; `options` are more of `Popen`'s.

        Raises:
            OSError: there is no such program, or no room for a process or its descriptors; nothing
                of the attempt is left.
        """
        more = {"stdin": subprocess.DEVNULL, "env": dict(environ), **options}
        self._popen = subprocess.Popen(command, **more)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        try:
            self._pidfd = OwnedFd(os.pidfd_open(self._popen.pid))
            self._loop.add_reader(self._pidfd.fileno(), self._has_ended)
        except BaseException:
            self._popen.kill()  # it could not be watched
            self._popen.wait()
            raise

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; a signal is negative."""
        return self._popen.returncode

    async def wait(self) -> int:
        """Its returncode, once it has ended."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Harmless once it has ended."""
        self._popen.send_signal(number)

    def _has_ended(self) -> None:
        self._loop.remove_reader(self._pidfd.fileno())
        self._pidfd.close()
        self._ended.set_result(self._popen.wait())
