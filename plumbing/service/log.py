"""Logs: one line per event on stderr, JSON for machines, aligned text for people.

`configure` is called once, by a command. Library code only does `logging.getLogger(__name__)` and
may pass `extra={"fields": {...}}`: the keys below become keys of the line, the rest go in `data`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

from plumbing.errors import UsageError
from plumbing.service.clock import rfc3339
from plumbing.service.log_stream import PatientlessHandler

# The keys that a log line may have at its top level, besides ts, level, logger, msg, component.
KEYS = (
    "event",
    "event_id",
    "engine_id",
    "role",
    "state",
    "device_uuid",
    "session",
    "lock",
    "token",
    "pid",
    "child_pid",
    "child",
    "duration_ms",
    "error_code",
)

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
        return json.dumps(line, default=str, ensure_ascii=False)


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


def configure(
    component: str,
    level: str | None = None,
    format: str | None = None,  # noqa: A002 - the flag and LOG_FORMAT have this name
    **constants: Any,
) -> None:
    """Send this process's logs to stderr; `constants` (engine_id, …) are on every JSON line.

    Arguments beat LOG_LEVEL and LOG_FORMAT; the default is `info`, and JSON unless on a terminal.

    Raises:
        UsageError: a level or a format that does not exist.
    """
    chosen_level = (level or os.environ.get("LOG_LEVEL") or "INFO").upper()
    default_format = "text" if sys.stderr.isatty() else "json"
    chosen_format = (format or os.environ.get("LOG_FORMAT") or default_format).lower()
    if chosen_level not in LEVELS:
        raise UsageError(
            "service.bad_log_level",
            f"log level {chosen_level!r} does not exist; use one of {', '.join(LEVELS).lower()}",
        )
    if chosen_format not in FORMATS:
        raise UsageError(
            "service.bad_log_format",
            f"log format {chosen_format!r} does not exist; use one of {', '.join(FORMATS)}",
        )
    handler = PatientlessHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(component, constants) if chosen_format == "json" else TextFormatter(component)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(chosen_level)


def _timestamp(record: logging.LogRecord) -> str:
    return rfc3339(datetime.fromtimestamp(record.created, UTC))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", None)
    return dict(fields) if isinstance(fields, dict) else {}
