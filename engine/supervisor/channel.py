"""The socketpair to the backend, and our end of it: requests, replies, unsolicited messages; and
canaries, real inferences with a known result.

`BackendChannel` owns request ids, and does not know what a reply means. The surprising thing: the
end of the channel is not a death, which pidfds report; but its end *after* the last death means
that the backend's last messages have been read.

A waking backend gets its canary over the channel. One that serves behind a gateway gets it through
its private socket, as an HTTP request, which also finds a backend whose HTTP side is stuck. Without
a gateway requests arrive on a socket that other engines have too, and only the channel reaches this
one. Only a verdict in the answer's body ends an HTTP canary: it is repeated until the owner's
patience ends, because a busy machine fails in the same way. If no memory is left for a socket, the
canary takes the channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from engine.messages import CHANNEL, CanaryMsg, RunCanaryMsg
from engine.schema import EngineLastCanary
from plumbing import gateway_protocol as hop
from plumbing.errors import DISK, ProtocolError, is_shortage
from plumbing.service.clock import rfc3339
from plumbing.service.events import EventLog
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
        self.is_closed = True

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
        self.is_closed = False
        return theirs

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
        self.is_closed = True
        self._on_closed(reason)


Done = Callable[[bool, str], object]
RETRY_S = 0.1


class Canaries:
    """One at a time."""

    def __init__(self, channel: BackendChannel, log: EventLog) -> None:
        self.private_path: str | None = None  # where the backend serves, since it was woken
        self.last: EngineLastCanary | None = None
        self.problem: str | None = None  # why the one that is on its way has no answer yet
        self._channel, self._log = channel, log
        self._by_http: asyncio.Task[None] | None = None  # while it is on its way

    def gate(self, on_done: Done) -> None:
        """Over the channel, before the backend serves: call `on_done` with its verdict."""
        self._channel.ask(
            RunCanaryMsg(), CanaryMsg, lambda reply: self._done(on_done, reply.ok, reply.detail)
        )

    def check(self, on_done: Done) -> None:
        """One while the backend serves, and is idle."""
        if self.private_path is None:
            self.gate(on_done)
            return
        asking = self._ask_by_http(self.private_path, on_done)
        self._by_http = asyncio.get_running_loop().create_task(asking)
        self._by_http.add_done_callback(_check)

    def stop(self) -> None:
        """The answer of the one that is on its way is ignored."""
        if self._by_http is not None:
            self._by_http.cancel()
        self._by_http = self.problem = None

    async def _ask_by_http(self, path: str, on_done: Done) -> None:
        answer = b""
        while True:
            try:
                answer = await answer_from(path)
                body = answer.partition(b"\r\n\r\n")[2]
                verdict = msgspec.json.decode(body, type=CanaryMsg)
            except OSError as error:
                if is_shortage(error):  # of this process: the backend is not to blame
                    self._by_http = self.problem = None
                    self.gate(on_done)
                    return
                self.problem = f"no answer from {path}: {error.strerror}"
            except msgspec.DecodeError:
                self.problem = f"{path} answered a canary without a verdict: {answer[:64]!r}"
            else:
                self._by_http = self.problem = None
                self._done(on_done, verdict.ok, verdict.detail)
                return
            await asyncio.sleep(RETRY_S)

    def _done(self, on_done: Done, ok: bool, detail: str) -> None:
        verdict = "passed" if ok else "failed"
        event = self._log.record(
            "engine.canary",
            f"canary {verdict}" + (f": {detail}" if detail else ""),
            "info" if ok else "error",
            {"ok": ok, "detail": detail},
        )
        self.last = EngineLastCanary(ok, rfc3339(event.ts))
        on_done(ok, detail)


def _check(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()  # raises what only a bug of ours can raise


REQUEST = (
    f"POST {hop.CANARY_PATH} HTTP/1.1\r\nHost: engine\r\n{hop.GATEWAY}: {hop.VERSION}\r\n"
    "Content-Length: 0\r\nConnection: close\r\n\r\n"
).encode()


async def answer_from(path: str) -> bytes:
    """What the backend at `path` answers to a canary, to the end of the connection.

    Raises:
        OSError: there is no connection, or it broke.
    """
    # Not with a socket of our own: at a timeout uvloop would close it, and so would its object.
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(REQUEST)
        return await reader.read()
    finally:
        writer.transport.abort()  # everything was read, or nothing will be
