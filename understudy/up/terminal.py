"""What `understudy up` prints, written by a thread of its own.

Owns the lines that nobody has read yet, as many as have room. A terminal that is stopped with
Ctrl-S, or a pager that is at its first page, takes no more than a pipe holds. Whoever wrote to it
from the event loop would stop there, and with him the probes, the restarts and SIGTERM. What has no
room is left out here and told of later; the containers' logs have it.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from types import TracebackType

PENDING_MAX_BYTES = 1 << 20  # some ten thousand lines: more than anybody scrolls back
LAST_WORDS_S = 1.0  # how long the end waits for a reader


class Terminal:
    """Lines to the descriptor `fd`, which stays the caller's. `say` never waits."""

    def __init__(self, fd: int = 1, pending_max_bytes: int = PENDING_MAX_BYTES) -> None:
        self._fd = fd
        self._room_bytes = pending_max_bytes
        self._pending: deque[bytes] = deque()
        self._left_out = 0
        self._is_closing = False
        self._is_broken = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write, name="terminal", daemon=True)

    def __enter__(self) -> Terminal:
        self._writer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._writer.join(LAST_WORDS_S)

    def say(self, line: str) -> None:
        raw = f"{line}\n".encode(errors="replace")
        with self._changed:
            if self._is_broken:
                return
            if self._left_out or len(raw) > self._room_bytes:
                self._left_out += 1  # as what was before it: there is one gap, and it is told of
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
            except OSError:  # whoever read this is gone, and nobody comes after him
                with self._changed:
                    self._is_broken = True
                    self._pending.clear()
                return
            with self._changed:
                self._room_bytes += len(raw)
                if self._left_out and not self._pending:
                    note = f"({self._left_out} lines are not shown: nobody read them in time)\n"
                    self._left_out = 0
                    self._append(note.encode())

    def _write_all(self, raw: bytes) -> None:
        while raw:
            try:
                raw = raw[os.write(self._fd, raw) :]
            except BlockingIOError:  # who shares it with us has made it so
                select.select([], [self._fd], [])
