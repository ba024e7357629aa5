"""A server, in a process of its own, whose memory fails or blocks when a test says so."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from tests.gms.bench import GmsProcess
from tests.helpers import until


class FaultyGms(GmsProcess):
    """See `faulty_server` for its commands."""

    def __init__(self, directory: str, granularity_bytes: int | None = None, **more: Any) -> None:
        super().__init__(directory, **more)
        self.granularity_bytes = granularity_bytes

    def start(self) -> FaultyGms:
        words = [self.directory, self.device_bytes, self.stall_s]
        words += [] if self.granularity_bytes is None else [self.granularity_bytes]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gms.faulty_server", *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "UNDERSTUDY_PARENT_PID": str(os.getpid())},
        )
        until(self.is_up, "the server's hello")
        return self

    def tell(self, command: str) -> None:
        """Give it a command; obeyed when this returns."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()
        self.hear("ok")

    def hear(self, line: str) -> None:
        """Wait for it to say `line`."""
        assert self.process is not None
        assert self.process.stdout is not None
        found = self.process.stdout.readline().decode().strip()
        assert found == line, f"{line!r} was awaited and {found!r} came"

    def stop(self) -> None:
        super().stop()
        assert self.process is not None
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
