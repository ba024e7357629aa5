"""The output of `understudy up`, written by a thread of its own.

A terminal stopped with Ctrl-S, or a pager at its first page, blocks its writer. In the event loop
that would stop probes, restarts and SIGTERM handling. So lines are buffered up to a limit; beyond
it they are dropped and counted. The containers' logs have them all.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque

PENDING_MAX_BYTES = 1 << 20  # some ten thousand lines
FLUSH_S = 1.0  # how long the end waits for a reader


class Terminal:
    """Writes lines to the descriptor `fd`, which stays the caller's. `say` never blocks."""

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
