"""The event stream, `/events`: server-sent events with a snapshot first and resumption by id.

No reader can slow the process down: each has a bounded queue, and one that is too slow loses the
oldest events and gets their number (`event: dropped`). The snapshot's `id:` is the reader's
position: for a reader that resumes, the id it resumes from, so that a stream that breaks during the
replay resumes there again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from plumbing.errors import UsageError
from plumbing.service.events import SEVERITIES, Event, EventLog
from plumbing.service.http_connection import GetProtocol, GetRequest
from plumbing.text import to_json

HEARTBEAT_S = 15.0  # below the 30–60 s after which proxies cut a silent connection
QUEUE_MAX = 256  # events kept for a slow reader; about 80 KiB
DIGITS_MAX = 19  # of an id; int() refuses more than some thousand digits
READERS_MAX = 32  # open pages and a few programs


@dataclass(frozen=True, slots=True)
class Filter:
    """The events that a reader asked for: `types` are globs, none means all."""

    types: tuple[str, ...] = ()
    min_severity: str = "debug"

    @classmethod
    def parse(cls, types: str, min_severity: str) -> Filter:
        severity = {"": "debug", "warn": "warning"}.get(min_severity, min_severity)
        if severity not in SEVERITIES:
            raise UsageError(
                "service.bad_severity",
                f"min_severity is {min_severity!r}; use one of {', '.join(SEVERITIES)}",
            )
        return cls(tuple(part for part in types.split(",") if part), severity)

    def wants(self, event: Event) -> bool:
        if SEVERITIES[event.severity] < SEVERITIES[self.min_severity]:
            return False
        return not self.types or any(fnmatchcase(event.type, glob) for glob in self.types)


class EventQueue:
    """The queue between the event log and one connection."""

    def __init__(self, wanted: Filter) -> None:
        self._wanted = wanted
        self._queue: deque[Event] = deque(maxlen=QUEUE_MAX)
        self._arrived = asyncio.Event()
        self.dropped = 0

    def put(self, event: Event) -> None:
        if not self._wanted.wants(event):
            return
        if len(self._queue) == self._queue.maxlen:
            self.dropped += 1  # the deque drops its oldest by itself
        self._queue.append(event)
        self._arrived.set()

    async def frames(self) -> bytes:
        """The next event and any notice of drops; a heartbeat if none comes in HEARTBEAT_S."""
        if not self._queue:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._arrived.wait()
        if not self._queue:
            return b": heartbeat\n\n"
        parts = []
        if self.dropped:
            parts.append(frame("dropped", {"dropped": self.dropped}))
            self.dropped = 0
        # One at a time, so that a slow connection loses events here, where they are counted.
        parts.append(event_frame(self._queue.popleft()))
        return b"".join(parts)


def frame(kind: str, document: dict[str, Any], event_id: int | None = None) -> bytes:
    head = f"id: {event_id}\n" if event_id is not None else ""
    body = to_json(document)
    return f"{head}event: {kind}\ndata: {body}\n\n".encode()


def event_frame(event: Event) -> bytes:
    return frame(event.type, event.to_dict(), event.id)


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """What a reader asked for: which events, and the id of the last one that it has."""

    filter: Filter
    position: int | None

    @classmethod
    def of(cls, request: GetRequest) -> StreamRequest:
        """Raises:
        UsageError: an invalid query.
        """
        query = request.query
        wanted = Filter.parse(query.get("types", ""), query.get("min_severity", ""))
        return cls(wanted, _position(query.get("since") or request.headers.get("last-event-id")))


async def stream(
    reader: GetProtocol,
    wanted: StreamRequest,
    headers: Mapping[str, str],
    events: EventLog,
    status: Callable[[], dict[str, Any]],
) -> None:
    """Answer one reader until this is cancelled, because it has disconnected or the server ends."""
    reader.send_head(
        {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # nginx would keep the events until its buffer is full
            **headers,
        }
    )
    # From here to the subscription nothing awaits: no event falls between snapshot and stream.
    position = wanted.position
    missed = events.since(position) if position is not None else None
    snapshot = {**status(), "as_of_event_id": events.last_id}
    queue = EventQueue(wanted.filter)
    unsubscribe = events.subscribe(queue.put)
    stands_at = events.last_id if position is None or missed is None else position
    try:
        await reader.write(frame("snapshot", snapshot, stands_at))
        for event in missed or ():
            if wanted.filter.wants(event):
                await reader.write(event_frame(event))
        while True:
            await reader.write(await queue.frames())
    finally:
        unsubscribe()


def _position(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > DIGITS_MAX:
        raise UsageError("service.bad_since", f"since is {text!r}; it must be the id of an event")
    return int(text)
