"""A lock server in its own process, as a pod runs it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

from lockserver.messages import CATALOGUE
from plumbing.errors import UnderstudyError
from plumbing.pod.cli import ask_status
from plumbing.pod.paths import lockserver_socket
from plumbing.service import procfs
from plumbing.wire.fds import OwnedFd
from tests.helpers import free_port, http_get, run_command, until

COMMAND = (sys.executable, "-m", "lockserver.cli")


def run_command_of(directory: str, *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """`lockserver WORDS… --dir DIRECTORY`, as a user runs it."""
    return run_command([*COMMAND, *words, "--dir", directory], **how)


class ServerProcess:
    """`lockserver serve` on `directory`; `start` after a kill is a restart.

    `command` runs `lockserver`; a test may run it under another program, or in a namespace.
    """

    def __init__(self, directory: str, *flags: str) -> None:
        self.directory = directory
        self.flags = flags
        self.command: tuple[str, ...] = COMMAND
        self.http_port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.log_path = os.path.join(directory, "log.txt")

    def start(self) -> None:
        self.spawn()
        until(self._answers, "the lock server to answer")

    def spawn(self) -> int:
        """Start it without waiting for it; returns its pid."""
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [
                    *(*self.command, "serve", "--dir", self.directory),
                    *("--http-port", str(self.http_port), *self.flags),
                ],
                stderr=log,
                stdout=log,
            )
        return self.pid

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        with contextlib.suppress(UnderstudyError, ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", self.http_port)).close()  # the last to start
            return bool(self.status())
        return False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def status(self) -> dict[str, Any]:
        return ask_status(lockserver_socket(self.directory), CATALOGUE)

    def get(self, path: str) -> tuple[int, str]:
        return http_get(self.http_port, path)

    def lock(self, name: str = "active") -> dict[str, Any]:
        document: dict[str, Any] = self.status()["locks"][name]
        return document

    def log(self) -> str:
        with open(self.log_path) as log:
            return log.read()

    def suspend(self) -> None:
        """SIGSTOP; returns once it runs no more."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def close(self) -> None:
        if self.process is not None:
            self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        assert self.process is not None
        below: list[OwnedFd] = []
        for pid in procfs.descendants(self.pid):
            with contextlib.suppress(ProcessLookupError):
                below.append(OwnedFd(os.pidfd_open(pid)))
        self.process.send_signal(number)
        self.process.wait()
        self.process = None
        for server in below:  # under `unshare` it dies a moment after what has been waited for
            select.select([server], [], [])
            server.close()
