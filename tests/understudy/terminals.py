"""A command of `understudy` in a terminal of its own."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl

ROWS, COLUMNS = 40, 120
WAIT_S = 30.0


class Terminal:
    """The command in a terminal of its own; what it writes is read as it comes."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen(
            [sys.executable, "-m", "understudy.cli.main", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        self._seen = ""

    def sees(self, words: str) -> None:
        """Read until `words` have been written, with what moves the cursor left out."""
        end = time.monotonic() + WAIT_S
        while words not in self._seen:
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert ready, f"waited in vain for {words!r} after {self._seen[-2000:]!r}"
            raw = os.read(self.master, 65536).decode(errors="replace")
            self._seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw)
        self._seen = self._seen.partition(words)[2]


@contextlib.contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    opened = Terminal(*words)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.master)
        os.close(opened.slave)
