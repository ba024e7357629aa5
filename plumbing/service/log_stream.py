"""A stream of log lines that never waits for its reader.

A pipe holds 64 KiB. Whoever reads a process's logs may stop (a pager, a node whose disk is full),
and a process that waits to tell what it did does nothing else: a lock server was seen to stand
still after forty events. So a line for which there is no room is dropped, and counted; the count
is the first thing that is said when there is room again.
"""

from __future__ import annotations

import logging
import select
from typing import TextIO

# What a pipe takes without waiting once poll says that it takes anything (man 7 pipe: PIPE_BUF), in
# characters of up to four bytes.
CHUNK_CHARS = 4096 // 4


class PatientlessHandler(logging.StreamHandler[TextIO]):
    """Writes a record if its stream takes it now."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.dropped = 0
        self._is_torn = False  # a line was begun and not ended

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.dropped and self._write(self.format(_confession(self.dropped))):
                self.dropped = 0
            if self.dropped or not self._write(self.format(record)):
                self.dropped += 1
        except Exception:
            self.handleError(record)

    def _write(self, line: str) -> bool:
        """Whether all of it was taken."""
        text = f"{self.terminator if self._is_torn else ''}{line}{self.terminator}"
        for start in range(0, len(text), CHUNK_CHARS):
            if not self._has_room():
                self._is_torn = self._is_torn or start > 0
                return False
            self.stream.write(text[start : start + CHUNK_CHARS])
            self.stream.flush()
        self._is_torn = False
        return True

    def _has_room(self) -> bool:
        try:
            fd = self.stream.fileno()
        except (OSError, ValueError):  # no file behind it
            return True
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        return bool(poll.poll(0))


def _confession(count: int) -> logging.LogRecord:
    message = f"{count} log lines were dropped, because nobody read them"
    fields = {"fields": {"event": "log.dropped", "lines": count}}
    return logging.makeLogRecord(
        {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": message}
        | fields
    )
