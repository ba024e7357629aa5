"""Logs: one line per event on stderr, as JSON or aligned text, and never waiting for its reader.

`configure` is called once, by a command. Library code only does `logging.getLogger(__name__)` and
may pass `extra={"fields": {...}}`: the keys below become keys of the line, the rest go in `data`.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from plumbing.errors import UsageError
from plumbing.service.clock import rfc3339
from plumbing.text import to_json

# The keys that a log line may have at its top level, besides ts, level, logger, msg, component.
KEYS = (
    *("event", "event_id", "engine_id", "role", "state", "device_uuid", "session", "lock", "token"),
    *("pid", "child_pid", "child", "duration_ms", "error_code"),
)

# What a pipe accepts without blocking once poll reports room (man 7 pipe: PIPE_BUF), in characters
# of up to four bytes.
CHUNK_CHARS = 4096 // 4

FORMATS = ("json", "text")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, component: str, constants: dict[str, Any]) -> None:
        super().__init__()
        self._component = component
        self._constants = constants

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            "component": self._component,
            **self._constants,
        }
        extra: dict[str, Any] = {}
        for key, value in _fields(record).items():
            (line if key in KEYS else extra)[key] = value
        if extra:
            line["data"] = extra
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return to_json(line)


class TextFormatter(logging.Formatter):
    """Aligned text; a traceback, if any, follows on lines of its own."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        event = str(fields.pop("event", ""))
        shown = " ".join(f"{k}={v}" for k, v in fields.items() if v is not None and k != "event_id")
        parts = (
            _timestamp(record)[11:23],
            f"{record.levelname:7}",
            f"{self._component:10}",
            f"{event:18}" if event else "",
            record.getMessage(),
            f"({shown})" if shown else "",
        )
        text = " ".join(part for part in parts if part)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class NonBlockingHandler(logging.StreamHandler[TextIO]):
    """Writes a record only if its stream accepts it now; otherwise counts it as dropped.

    A pipe holds 64 KiB. When the reader of a process's logs stops (a pager, a node whose disk is
    full), a process that waited to log would do nothing else: a lock server was seen to stand still
    after forty events. The count is logged first once there is room again.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.dropped = 0
        self._is_torn = False  # a line was begun and not finished

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.dropped and self._write(self.format(_dropped_notice(self.dropped))):
                self.dropped = 0
            if self.dropped or not self._write(self.format(record)):
                self.dropped += 1
        except OSError:  # such as a full disk
            self.dropped += 1
        except Exception:
            self.handleError(record)

    def _write(self, line: str) -> bool:
        """Whether the whole line was written."""
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


def configure(component: str, **constants: Any) -> None:
    """Send this process's logs to stderr; `constants` (engine_id, …) are on every JSON line.

    By LOG_LEVEL and LOG_FORMAT; the default is `info`, and JSON unless on a terminal.

    Raises:
        UsageError: a level or a format that does not exist.
    """
    level = (os.environ.get("LOG_LEVEL") or "INFO").upper()
    default_format = "text" if sys.stderr.isatty() else "json"
    form = (os.environ.get("LOG_FORMAT") or default_format).lower()
    if level not in LEVELS:
        raise UsageError(
            "service.bad_log_level",
            f"log level {level!r} does not exist; use one of {', '.join(LEVELS).lower()}",
        )
    if form not in FORMATS:
        raise UsageError(
            "service.bad_log_format",
            f"log format {form!r} does not exist; use one of {', '.join(FORMATS)}",
        )
    handler = NonBlockingHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(component, constants) if form == "json" else TextFormatter(component)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def is_our_fault(record: logging.LogRecord) -> bool:
    """A filter of aiohttp's log, in which each request that it refuses is an error with a stack
    trace that quotes it: users' text, and as many lines as they like."""
    error = record.exc_info[1] if record.exc_info else None
    return not type(error).__module__.startswith("aiohttp.")


def _timestamp(record: logging.LogRecord) -> str:
    return rfc3339(datetime.fromtimestamp(record.created, UTC))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", None)
    return dict(fields) if isinstance(fields, dict) else {}


def _dropped_notice(count: int) -> logging.LogRecord:
    message = f"{count} log lines were dropped because they were not read, or could not be written"
    fields = {"fields": {"event": "log.dropped", "lines": count}}
    return logging.makeLogRecord(
        {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": message}
        | fields
    )
