"""The event record of a process, from which logs, metrics, status and the event stream derive.

Not thread-safe on purpose: a process records from the one thread that owns its state machine, so
ids are the true order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from plumbing.service.clock import Clock, rfc3339

logger = logging.getLogger(__name__)

# Also the order of severities, lowest first, and the log level that each one maps to.
SEVERITIES: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

RING_MAX = 1024  # about an hour of failovers every ten seconds, at some 300 KiB


class Event(msgspec.Struct, frozen=True):
    """Something that happened."""

    id: int
    ts: datetime
    mono_ms: float
    type: str
    severity: str
    source: str
    message: str
    data: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON: `mono_ms` is CLOCK_MONOTONIC, `ts` RFC 3339 in UTC."""
        fields = msgspec.structs.asdict(self)
        return fields | {"ts": rfc3339(self.ts), "data": dict(self.data)}


Subscriber = Callable[[Event], None]


class EventLog:
    """A ring of events with ids from 1; each goes to the log and to all subscribers."""

    def __init__(self, source: str, clock: Clock) -> None:
        self.source = source
        self._clock = clock
        self._ring: deque[Event] = deque(maxlen=RING_MAX)
        self._subscribers: list[Subscriber] = []
        self.last_id = 0

    def record(
        self,
        type: str,  # noqa: A002 - the record's own key, in every consumer's JSON
        message: str,
        severity: str = "info",
        data: Mapping[str, Any] | None = None,
        at: tuple[datetime, float] | None = None,
    ) -> Event:
        """Append one event, log it as one line, then call every subscriber with it.

        `at`: the time of day and the clock's `now_ms` when it happened, if not now.
        """
        level = SEVERITIES[severity]
        ts, mono_ms = at or (self._clock.wall(), self._clock.now_ms())
        self.last_id += 1
        event = Event(
            id=self.last_id,
            ts=ts,
            mono_ms=mono_ms,
            type=type,
            severity=severity,
            source=self.source,
            message=message,
            data=dict(data or {}),
        )
        fields = {"event": type, "event_id": event.id, **event.data}
        logger.log(level, "%s", message, extra={"fields": fields})
        self._append(event)
        return event

    def relay(self, record: Mapping[str, Any], data: Mapping[str, Any]) -> Event:
        """Append what a child process recorded (`Event.to_dict`), with `data` added to its own.

        It keeps its times and source and gets a new id. It is not logged again: the child has done
        that, mostly to the same stream.
        """
        self.last_id += 1
        renewed = {
            "id": self.last_id,
            "ts": datetime.fromisoformat(record["ts"]),
            "data": {**record["data"], **data},
        }
        event = Event(**{**record, **renewed})
        self._append(event)
        return event

    def subscribe(self, callback: Subscriber) -> None:
        """Call `callback` with every later event."""
        self._subscribers.append(callback)

    def kept_since(self, event_id: int) -> list[Event]:
        """The events after `event_id` still in the ring, for readers that accept a gap."""
        return [event for event in self._ring if event.id > event_id]

    def newest(self) -> dict[str, Any]:
        """The newest id and record, as they are part of every status document."""
        last = self._ring[-1].to_dict() if self._ring else None
        return {"as_of_event_id": self.last_id, "last_event": last}

    def _append(self, event: Event) -> None:
        self._ring.append(event)
        for subscriber in self._subscribers:
            subscriber(event)
