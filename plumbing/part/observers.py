"""The observers of one process: connections that get its status once and then every event.

An observer holds nothing, and nothing waits for it: one that reads more slowly than events are
recorded is dropped when its queue is full. It can connect again and ask from the last id it saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plumbing.part.observe import EventMsg, StatusReplyMsg
from plumbing.service.events import Event, EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.messages import Message

# All events that a process keeps, each with the longest message there is: they are sent at once,
# and wait in the connection's queue until the observer reads them.
KEPT_BYTES_MAX = 4 * 1024 * 1024


class Observers:
    """The connections that watch one process; subscribes itself to `events`."""

    def __init__(self, events: EventLog, status: Callable[[], dict[str, Any]]) -> None:
        self._events, self._status = events, status
        self._conns: dict[int, Connection] = {}
        events.subscribe(self._publish)

    def __len__(self) -> int:
        return len(self._conns)

    def join(self, conn: Connection, since: int | None, request_id: int) -> None:
        """Send `conn` the status, the kept events after `since` (None: none), then each new one."""
        conn.limit_queue(KEPT_BYTES_MAX)
        conn.send(StatusReplyMsg(self._status()), request_id)
        for event in [] if since is None else self._events.kept_since(since):
            conn.send(EventMsg(event.to_dict()))
        self._conns[conn.id] = conn

    def leave(self, conn: Connection) -> None:
        """`conn` has closed; harmless where it did not watch."""
        self._conns.pop(conn.id, None)

    def send(self, message: Message) -> None:
        """Send `message` to all of them."""
        for conn in tuple(self._conns.values()):
            conn.send(message)

    def _publish(self, event: Event) -> None:
        if self._conns:
            self.send(EventMsg(event.to_dict()))
