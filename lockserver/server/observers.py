"""Who looks on: connections that asked for events, and the grants that are remembered for people.

Owns the observers and the last grants. Observers never queue and never hold; one that does not read
is dropped by its connection's limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from lockserver.messages import EventMsg, StatusReplyMsg, WatchMsg
from plumbing.part.observe import KEPT_BYTES_MAX
from plumbing.service.clock import rfc3339
from plumbing.service.events import Event, EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.messages import Message

LAST_GRANTS = 20


class Observers:
    """All observers of one server; subscribes itself to `events`."""

    def __init__(self, events: EventLog) -> None:
        self.last_grants: deque[dict[str, Any]] = deque(maxlen=LAST_GRANTS)
        self._events = events
        self._conns: set[Connection] = set()
        events.subscribe(self._publish)

    def join(
        self, conn: Connection, watch: WatchMsg, request_id: int, document: Mapping[str, Any]
    ) -> None:
        """Tell `conn` how things stand, what it asked for of the past, then all that happens."""
        conn.limit_queue(KEPT_BYTES_MAX)
        conn.send(StatusReplyMsg(dict(document)), request_id)
        kept = [] if watch.since is None else self._events.kept_since(watch.since)
        for event in kept:
            conn.send(EventMsg(event.to_dict()))
        self._conns.add(conn)

    def leave(self, conn: Connection) -> None:
        self._conns.discard(conn)

    def tell(self, message: Message) -> None:
        for conn in tuple(self._conns):
            conn.send(message)

    def _publish(self, event: Event) -> None:
        if event.type == "lock.granted":
            self.last_grants.append({**event.data, "ts": rfc3339(event.ts)})
        if self._conns:
            self.tell(EventMsg(event.to_dict()))
