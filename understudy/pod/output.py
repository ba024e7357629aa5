"""The output of a pod: the terminal of `understudy up`, and the logs of the containers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

PENDING_MAX_BYTES = 1 << 20  # some ten thousand lines
FLUSH_S = 1.0  # how long the end waits for a reader

LOG_MAX_BYTES = 16 * 1024 * 1024  # with one rotation: at most twice this per container on disk
LINE_MAX_BYTES = 64 * 1024  # longer lines are split, to bound memory
READ_BYTES = 64 * 1024  # the size of a pipe
TAIL_LINES = 20  # enough to find the error of a failed start


class Terminal:
    """Writes lines to the descriptor `fd`, which stays the caller's. `say` never blocks.

    A terminal stopped with Ctrl-S, or a pager at its first page, blocks its writer. In the event
    loop that would stop probes, restarts and SIGTERM handling. So a thread writes, and lines are
    buffered up to a limit; beyond it they are dropped and counted. The logs have them all.
    """

    def __init__(self, fd: int = 1, pending_max_bytes: int = PENDING_MAX_BYTES) -> None:
        self._fd = fd
        self._room_bytes = pending_max_bytes
        self._pending: deque[bytes] = deque()
        self._dropped = 0
        self._is_closing = False
        self._is_broken = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write, name="terminal", daemon=True)

    def __enter__(self) -> Terminal:
        self._writer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._writer.join(FLUSH_S)

    def say(self, line: str) -> None:
        raw = f"{line}\n".encode(errors="replace")
        with self._changed:
            if self._is_broken:
                return
            if self._dropped or len(raw) > self._room_bytes:
                self._dropped += 1  # until the gap has been reported
                return
            self._append(raw)

    def _append(self, raw: bytes) -> None:
        self._pending.append(raw)
        self._room_bytes -= len(raw)
        self._changed.notify()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._is_closing:
                    self._changed.wait()
                if not self._pending:
                    return
                raw = self._pending.popleft()
            try:
                self._write_all(raw)
            except OSError:  # the reader has closed it
                with self._changed:
                    self._is_broken = True
                    self._pending.clear()
                return
            with self._changed:
                self._room_bytes += len(raw)
                if self._dropped and not self._pending:
                    note = f"({self._dropped} lines dropped: the terminal did not read them)\n"
                    self._dropped = 0
                    self._append(note.encode())

    def _write_all(self, raw: bytes) -> None:
        while raw:
            try:
                raw = raw[os.write(self._fd, raw) :]
            except BlockingIOError:  # made non-blocking by a process that shares it
                select.select([], [self._fd], [])


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
