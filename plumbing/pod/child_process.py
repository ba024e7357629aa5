"""A child process of a supervisor, started and watched on its loop.

Not asyncio's subprocess: on uvloop, each start that fails for lack of descriptors loses up to three
more (tried), and such a start is retried for ever.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence

from plumbing.wire.fds import OwnedFd


class ChildProcess:
    """A running child; `wait` for its end before it is dropped."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> None:
        """Start it; `pass_fds` are lent, and have the same numbers there.

        Raises:
            OSError: there is no such program, or no room for a process or its descriptors; nothing
                of the attempt is left.
        """
        self._popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=dict(environ), pass_fds=pass_fds
        )
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        try:
            self._pidfd = OwnedFd(os.pidfd_open(self._popen.pid))
            self._loop.add_reader(self._pidfd.fileno(), self._has_ended)
        except BaseException:
            self._popen.kill()  # nobody could watch it
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

    def terminate(self) -> None:
        self._popen.terminate()

    def kill(self) -> None:
        self._popen.kill()

    def _has_ended(self) -> None:
        self._loop.remove_reader(self._pidfd.fileno())
        self._pidfd.close()
        self._ended.set_result(self._popen.wait())
