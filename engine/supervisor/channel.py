"""The supervisor's end of the socketpair to the backend: questions, answers, unasked words.

Owns request ids. Must not know what an answer means. The surprising thing: the channel's end is no
death, that is what pidfds are for; but its end *after* the last death says that the backend's last
words have been read.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence

from engine.messages import CHANNEL
from plumbing.errors import ProtocolError
from plumbing.wire.client import from_socket
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import FaultMsg, Message

OnReply = Callable[[Message], None]


class Channel:
    """Callbacks come from the loop: `on_word` for what nobody asked for, `on_closed` once."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_word: Callable[[Message], None],
        on_fault: Callable[[str], None],
        on_closed: Callable[[str], None],
    ) -> None:
        """Own `sock`. `on_fault` hears of answers that are errors or make no sense."""
        self._on_word = on_word
        self._on_fault = on_fault
        self._on_closed = on_closed
        self._ids = itertools.count(1)
        self._asked: dict[int, tuple[Message, type[Message], OnReply]] = {}
        self._conn: Connection = from_socket(sock, CHANNEL, self)
        self.is_closed = False

    def ask(
        self,
        message: Message,
        answer: type[Message],
        on_reply: OnReply,
        fds: Sequence[OwnedFd] = (),
    ) -> None:
        """Send `message` (takes `fds`) and call `on_reply` with the `answer` it must have."""
        request_id = next(self._ids)
        self._asked[request_id] = (message, answer, on_reply)
        self._conn.send(message, request_id, fds)

    def close(self) -> None:
        self._conn.close("the supervisor closed the channel")

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        pass

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)  # no message of the backend carries any
        if request_id == 0:
            if isinstance(message, FaultMsg):
                self._on_fault(f"the backend refuses to go on: {message.message} [{message.code}]")
            else:
                self._on_word(message)
            return
        if request_id not in self._asked:
            raise ProtocolError("engine.unasked_answer", f"nobody asked request {request_id}")
        asked, answer, on_reply = self._asked.pop(request_id)
        if isinstance(message, FaultMsg):
            self._on_fault(
                f"the backend failed at {asked.TYPE}: {message.message} [{message.code}]"
            )
        elif not isinstance(message, answer):
            self._on_fault(f"the backend answered {asked.TYPE} with {message.TYPE}")
        else:
            on_reply(message)

    def closed(self, conn: Connection, reason: str) -> None:
        self.is_closed = True
        self._on_closed(reason)
