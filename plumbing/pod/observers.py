"""Both ends of observing a part: the server that answers, and programs that ask or watch parts.

A part sends each observer its status once and then every event. Nothing waits for an observer: one
that reads more slowly than events are recorded is dropped when its queue is full. It can connect
again and ask from the last id it saw.

`ask` sends one request; `PeerWatch` watches and reconnects. Callers bring the catalogue and the
messages. A watch survives the death of the process it watches, because that is what drills cause;
events missed in between are not replayed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plumbing.errors import UnreachableError, WaitTimeoutError
from plumbing.pod.messages import EventMsg, StatusMsg, StatusReplyMsg, WatchMsg
from plumbing.service.events import Event, EventLog
from plumbing.wire.connection import Connection, Handler, KeptConnection, connect
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Catalogue, FaultMsg, Message
from plumbing.wire.server import Server
from plumbing.wire.sockets import no_descriptors

# All events that a process keeps, each with the longest message there is: they are sent at once,
# and wait in the connection's queue until the observer reads them.
KEPT_BYTES_MAX = 4 * 1024 * 1024


class PartServer(Server):
    """The control socket of a part. It answers observers; all other messages are the handler's."""

    def __init__(
        self,
        path: str,
        catalogue: Catalogue,
        handler: Handler,
        events: EventLog,
        status: Callable[[], dict[str, Any]],
        **options: Any,
    ) -> None:
        """`options`: of `Server`."""
        super().__init__(path, catalogue, handler, **options)
        self._events, self._status = events, status
        self._observers: dict[int, Connection] = {}
        events.subscribe(self._publish)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if not isinstance(message, StatusMsg | WatchMsg):
            super().received(conn, message, request_id, fds)
            return
        try:
            reply = StatusReplyMsg(self._status())
        except OSError as error:
            raise no_descriptors("look at its own state", error) from error
        if isinstance(message, WatchMsg):
            self._observers[conn.id] = conn
            conn.limit_queue(KEPT_BYTES_MAX)
        conn.send(reply, request_id)
        if isinstance(message, WatchMsg) and message.since is not None:
            for event in self._events.kept_since(message.since):
                conn.send(EventMsg(event.to_dict()))

    def closed(self, conn: Connection, reason: str) -> None:
        self._observers.pop(conn.id, None)
        super().closed(conn, reason)

    def tell_observers(self, message: Message) -> None:
        """Send `message` to all that watch."""
        for conn in tuple(self._observers.values()):
            conn.send(message)

    def _publish(self, event: Event) -> None:
        if self._observers:
            self.tell_observers(EventMsg(event.to_dict()))


ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer and the pid of its sender (0 if that is in another PID namespace)."""

    message: Message
    pid: int


class _Asker(Handler):
    """Handles one question: the first message received, or the reason why none was."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        if self.answer.done():
            return
        if isinstance(message, FaultMsg):
            self.answer.set_exception(message.to_error())
        elif request_id:
            self.answer.set_result(message)

    def closed(self, conn: Connection, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(
                UnreachableError("wire.closed", f"the peer closed the connection: {reason}")
            )


async def ask(
    path: str, catalogue: Catalogue, question: Message, timeout_s: float = ASK_TIMEOUT_S
) -> Answered:
    """Connect to `path`, ask, and disconnect.

    Raises:
        UnreachableError: nothing listens there, or the peer disconnected.
        RemoteError: the peer answered with an error.
        WaitTimeoutError: no answer in time.
    """
    asker = _Asker()
    conn = await connect(path, catalogue, asker, deadline_s=timeout_s)
    try:
        conn.send(question, request_id=1)
        async with asyncio.timeout(timeout_s):
            return Answered(await asker.answer, conn.peer.pid)
    except TimeoutError as error:
        raise WaitTimeoutError(
            "pod.no_answer", f"{path} accepted the request and did not answer in {timeout_s:g} s"
        ) from error
    finally:
        conn.close("asked")
        asker.answer.cancel()


class PeerWatch(KeptConnection):
    """A standing `watch` on one socket: `on_message` gets every message; lost peers are redialled.

    `on_lost` is called when a connection ends, unless by `close`, and at each failed attempt.
    """

    def __init__(
        self,
        path: str,
        catalogue: Catalogue,
        question: Message,
        on_message: Callable[[Message], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(path, catalogue)
        self._question, self._on_message, self._on_lost = question, on_message, on_lost
        self._task = asyncio.create_task(self.run(), name=f"watch {path}")

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def begin(self, conn: Connection) -> None:
        conn.send(self._question, request_id=1)

    def hear(self, message: Message, request_id: int) -> None:
        self._on_message(message)

    def lose(self, reason: str) -> None:
        self._on_lost()

    def _failed(self, why: str) -> None:
        self._on_lost()
