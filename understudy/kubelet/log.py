"""What a container writes: prefixed with its name for people, kept in `<dir>/log/<name>.log`.

Owns the pipe's reading end and the log file. It must never stop reading: a process whose pipe is
full stops in the middle of a write. So a full disk or a closed terminal costs the copy that
cannot be written, never the reading. The pipe is our own instead of asyncio's because a grandchild
that inherited it would otherwise hide its parent's exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

LOG_MAX_BYTES = 16 * 1024 * 1024  # with one rotation: at most twice this per container on disk
LINE_MAX_BYTES = 64 * 1024  # a longer line is cut into pieces rather than collected in memory
READ_BYTES = 64 * 1024  # the size of a pipe
TAIL_LINES = 20  # enough to find the sentence that a failed start ended with


class ContainerLog:
    """Copies the lines of one container to a file and to `say` (both may fail, reading may not)."""

    def __init__(self, name: str, path: Path, say: Callable[[str], None], max_bytes: int) -> None:
        self.path = path
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._prefix = name
        self._say = say
        self._max_bytes = max_bytes
        self._file_bytes = path.stat().st_size if path.exists() else 0
        self._readers: dict[int, bytearray] = {}  # one pipe per process that may still write

    def open_pipe(self) -> int:
        """A new pipe; its writing end is the caller's, to be closed once the child has it."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._readers[reading] = bytearray()
        asyncio.get_running_loop().add_reader(reading, self._readable, reading)
        return writing

    def close(self) -> None:
        """Take what is still in the pipes and stop reading."""
        for reading in list(self._readers):
            self._readable(reading)
            if reading in self._readers:
                self._end(reading)

    def note(self, text: str) -> None:
        """A line of the runner's own about this container, kept in order with its output."""
        self._write([text])

    def last_error(self) -> str:
        """The container's last word: the sentence of its last `error: …` line, else that line."""
        own = [line for line in self.tail if not line.startswith("(runner) ")]
        errors = [line for line in own if line.startswith("error: ")]
        return (errors or own or ["it wrote nothing"])[-1].removeprefix("error: ")

    def _readable(self, reading: int) -> None:
        try:
            piece = os.read(reading, READ_BYTES)
        except BlockingIOError:
            return
        if not piece:
            self._end(reading)
            return
        pending = self._readers[reading]
        pending += piece
        *lines, rest = bytes(pending).split(b"\n")
        while len(rest) > LINE_MAX_BYTES:
            lines.append(rest[:LINE_MAX_BYTES])
            rest = rest[LINE_MAX_BYTES:]
        self._readers[reading] = bytearray(rest)
        self._write([line.decode("utf-8", "replace") for line in lines])

    def _end(self, reading: int) -> None:
        rest = self._readers.pop(reading)
        asyncio.get_running_loop().remove_reader(reading)
        os.close(reading)
        if rest:
            self._write([rest.decode("utf-8", "replace")])

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        self.tail.extend(lines)
        with contextlib.suppress(OSError):  # a full disk: see the file's head
            self._keep("".join(f"{line}\n" for line in lines).encode())
        for line in lines:
            with contextlib.suppress(OSError):  # a terminal that is gone
                self._say(f"{self._prefix} | {line}")

    def _keep(self, block: bytes) -> None:
        if self._file_bytes and self._file_bytes + len(block) > self._max_bytes:
            os.replace(self.path, self.path.with_suffix(".log.1"))
            self._file_bytes = 0
        with open(self.path, "ab") as file:
            file.write(block)
        self._file_bytes += len(block)
