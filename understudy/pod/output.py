"""The output of a pod: the terminal of `understudy up`, and the logs of the containers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

LINES_MAX = 10_000  # some megabyte
FLUSH_S = 1.0  # how long the end waits for a reader

LOG_MAX_BYTES = 16 * 1024 * 1024  # with one rotation: at most twice this per container on disk
LINE_MAX_BYTES = 64 * 1024  # longer lines are split, to bound memory
READ_BYTES = 64 * 1024  # the size of a pipe
TAIL_LINES = 20  # enough to find the error of a failed start


@contextlib.contextmanager
def terminal(fd: int = 1, lines_max: int = LINES_MAX) -> Iterator[Callable[[str], None]]:
    """What writes a line to the descriptor `fd`, and never blocks.

    A terminal stopped with Ctrl-S, or a pager at its first page, blocks its writer. In the event
    loop that would stop probes, restarts and SIGTERM handling. So a thread writes, and lines are
    queued up to a limit; beyond it they are dropped. The logs have them all.
    """
    lines: queue.Queue[str | None] = queue.Queue(lines_max)

    def write() -> None:
        while (line := lines.get()) is not None:
            with contextlib.suppress(OSError):  # the reader has closed it
                os.write(fd, f"{line}\n".encode(errors="replace"))

    def say(line: str) -> None:
        with contextlib.suppress(queue.Full):
            lines.put_nowait(line)

    writer = threading.Thread(target=write, name="terminal", daemon=True)
    writer.start()
    try:
        yield say
    finally:
        with contextlib.suppress(queue.Full):
            lines.put(None, timeout=FLUSH_S)
        writer.join(FLUSH_S)


class ContainerLog:
    """Copies the lines of one container to the file `path` and, after its name, to `say`.

    Owns the read end of the container's pipe. It must never stop reading, or the container
    blocks in a write: when the disk is full or the terminal closed, that copy is lost and reading
    goes on. The pipe is not asyncio's because a grandchild that inherited it would hide the exit.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        say: Callable[[str], None],
        max_bytes: int = LOG_MAX_BYTES,
    ) -> None:
        self.path = path
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._prefix = name
        self._say = say
        self._max_bytes = max_bytes
        self._file_bytes = path.stat().st_size if path.exists() else 0
        self._readers: dict[int, bytearray] = {}  # a pipe per process that may still write

    def open_pipe(self) -> int:
        """A new pipe; the caller closes the returned write end once the child has it."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._readers[reading] = bytearray()
        asyncio.get_running_loop().add_reader(reading, self._readable, reading)
        return writing

    def close(self) -> None:
        """Drain the pipes and stop reading."""
        for reading in list(self._readers):
            self._readable(reading)
            if reading in self._readers:
                self._end(reading)

    def note(self, text: str) -> None:
        """Add a line of the runner's, in order with the container's output."""
        self._write([text])

    def last_error(self) -> str:
        """The message of the last `error: …` line, or else the last line."""
        own = [line for line in self.tail if not line.startswith("(runner) ")]
        errors = [line for line in own if line.startswith("error: ")]
        return (errors or own or ["no output"])[-1].removeprefix("error: ")

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
        with contextlib.suppress(OSError):  # a full disk: see the module docstring
            self._keep("".join(f"{line}\n" for line in lines).encode())
        for line in lines:
            with contextlib.suppress(OSError):  # a closed terminal
                self._say(f"{self._prefix} | {line}")

    def _keep(self, block: bytes) -> None:
        if self._file_bytes and self._file_bytes + len(block) > self._max_bytes:
            os.replace(self.path, self.path.with_suffix(".log.1"))
            self._file_bytes = 0
        with open(self.path, "ab") as file:
            file.write(block)
        self._file_bytes += len(block)
