"""The socketpair to the backend, and our end of it: requests, replies, unsolicited messages.

`BackendChannel` owns request ids, and does not know what a reply means. The surprising thing: the
end of the channel is not a death, which pidfds report.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from engine.messages import CHANNEL
from plumbing.errors import DISK, ProtocolError
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import FaultMsg, Message

Reply = TypeVar("Reply", bound=Message)


class BackendChannel(Handler):
    """Callbacks run on the loop: `on_message` for unsolicited messages, `on_closed` once,
    with the reason."""

    def __init__(
        self,
        *,
        on_message: Callable[[Message], None],
        on_fault: Callable[[str, bool], None],
        on_closed: Callable[[str], None],
    ) -> None:
        """`on_fault` gets errors, and replies of the wrong type, as a sentence, and whether that is
        the machine's fault."""
        self._on_message = on_message
        self._on_fault = on_fault
        self._on_closed = on_closed
        self._ids = itertools.count(1)
        self._asked: dict[int, tuple[Message, type[Message], Callable[[Any], object]]] = {}
        self._conn: Connection | None = None

    def open(self) -> socket.socket:
        """Make the channel; the result is the backend's end, which the caller owns.

        Raises:
            OSError: there is no descriptor or memory for it.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            undo.callback(theirs.close)
            self._conn = Connection(ours, CHANNEL, self)
            undo.pop_all()
        return theirs

    def close(self) -> None:
        """Hear nothing more from a backend that is gone."""
        if self._conn is not None:
            self._conn.close("the backend is gone")

    def ask(
        self,
        message: Message,
        reply: type[Reply],
        on_reply: Callable[[Reply], object],
        fds: Sequence[OwnedFd] = (),
    ) -> None:
        """Send `message` (takes `fds`) and call `on_reply` with the reply that it must have."""
        assert self._conn is not None
        request_id = next(self._ids)
        self._asked[request_id] = (message, reply, on_reply)
        self._conn.send(message, request_id, fds)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)  # no message of the backend carries any
        if request_id and request_id not in self._asked:
            raise ProtocolError("engine.unasked_answer", f"there is no request {request_id}")
        asked = self._asked.pop(request_id) if request_id else None
        if isinstance(message, FaultMsg):
            did = f"failed at {asked[0].TYPE}" if asked is not None else "gave up"
            text = f"the backend {did}: {message.message} [{message.code}]"
            self._on_fault(text, bool(message.details.get(DISK)))
        elif asked is None:
            self._on_message(message)
        elif not isinstance(message, asked[1]):
            self._on_fault(f"the backend replied to {asked[0].TYPE} with {message.TYPE}", False)
        else:
            asked[2](message)

    def closed(self, conn: Connection, reason: str) -> None:
        self._on_closed(reason)
