"""Those who watch a device's server: its events, from where each says, for as long as it stays.

An observer holds nothing and nobody waits for it. One that reads more slowly than events come is
dropped when its share of our memory is used up; it can ask again from the last id that it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gms import messages as msg
from plumbing.errors import ProtocolError
from plumbing.service.events import Event, EventLog
from plumbing.wire.connection import Connection

# All events that are kept, each as long as the longest sentence of a driver makes it. Sessions have
# 32 MiB, because a manifest may be 16.
QUEUED_BYTES_MAX = 4 * 1024 * 1024


class Observers:
    """The watches of `log`; `status` is what each is told first."""

    def __init__(self, log: EventLog, status: Callable[[], dict[str, Any]]) -> None:
        self._log, self._status = log, status
        self._watching: dict[int, Callable[[], None]] = {}  # how to end each, by connection

    def watch(self, conn: Connection, message: msg.WatchMsg, request_id: int) -> None:
        """Tell `conn` what is, what it missed, and from now on what happens.

        Raises:
            ProtocolError: `gms.unexpected_message`, it watches already.
        """
        if conn.id in self._watching:
            raise ProtocolError("gms.unexpected_message", "this connection watches already")

        def tell(event: Event) -> None:
            conn.send(msg.EventMsg(event.to_dict()))

        conn.limit_queue(QUEUED_BYTES_MAX)
        conn.send(msg.StatusReplyMsg(self._status()), request_id)
        if message.since is not None:
            for event in self._log.kept_since(message.since):
                tell(event)
        self._watching[conn.id] = self._log.subscribe(tell)

    def left(self, conn: int) -> None:
        """The connection has ended, whether it watched or not."""
        end = self._watching.pop(conn, None)
        if end is not None:
            end()
