"""The socketpair to the backend, and our end of it: requests, replies, unsolicited messages; and
canaries, real inferences with a known result.

`BackendChannel` owns request ids, and does not know what a reply means. The surprising thing: the
end of the channel is not a death, which pidfds report; but its end *after* the last death means
that the backend's last messages have been read.

A waking backend gets its canary over the channel. One that serves behind a gateway gets it through
its private socket, as an HTTP request, which also finds a backend whose HTTP side is stuck. Without
a gateway requests arrive on a socket that other engines have too, and only the channel reaches this
one. Only a verdict in the answer's body ends an HTTP canary: it is repeated until the owner's
patience ends, because a busy machine fails in the same way. If the backend has no such path, or
no memory is left for a socket, the canary takes the channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
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
        """The one before the backend serves: call `on_done` with its verdict."""
        self._ask_channel(on_done, is_idle=False)

    def check(self, on_done: Done) -> None:
        """One while the backend serves, and is idle."""
        if self.private_path is None:
            self._ask_channel(on_done, is_idle=True)
            return
        asking = self._ask_by_http(self.private_path, on_done)
        self._by_http = asyncio.get_running_loop().create_task(asking)
        self._by_http.add_done_callback(_check)

    def stop(self) -> None:
        """Nobody waits for the one that is on its way any more."""
        if self._by_http is not None:
            self._by_http.cancel()
        self._by_http = self.problem = None

    def _ask_channel(self, on_done: Done, *, is_idle: bool) -> None:
        def answered(reply: CanaryMsg) -> None:
            self._done(on_done, reply.ok, reply.detail, is_idle=is_idle)

        self._channel.ask(RunCanaryMsg(), CanaryMsg, answered)

    async def _ask_by_http(self, path: str, on_done: Done) -> None:
        while True:
            try:
                verdict = await ask_by_http(path)
            except Unanswered as error:
                self.problem = str(error)
                await asyncio.sleep(RETRY_S)
                continue
            self._by_http = self.problem = None
            if verdict is None:
                self._ask_channel(on_done, is_idle=True)
            else:
                self._done(on_done, verdict.ok, verdict.detail, is_idle=True)
            return

    def _done(self, on_done: Done, ok: bool, detail: str, *, is_idle: bool) -> None:
        verdict = "passed" if ok else "failed"
        event = self._log.record(
            "engine.canary",
            f"canary {verdict}" + (f": {detail}" if detail else ""),
            "info" if ok else "error",
            {"ok": ok, "detail": detail, "is_idle": is_idle},
        )
        self.last = EngineLastCanary(ok, rfc3339(event.ts))
        on_done(ok, detail)


def _check(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()  # raises what only a bug of ours can raise


ANSWER_BYTES_MAX = 65_536  # a verdict has a sentence
NO_SUCH_PATH = frozenset({404, 405, 501})
REQUEST = (
    f"POST {hop.CANARY_PATH} HTTP/1.1\r\nHost: engine\r\n{hop.GATEWAY}: {hop.VERSION}\r\n"
    "Content-Length: 0\r\nConnection: close\r\n\r\n"
).encode()


class Verdict(msgspec.Struct, frozen=True):
    """The body of an answer."""

    ok: bool
    detail: str = ""


class Unanswered(Exception):
    """No verdict, and why not."""


async def ask_by_http(path: str) -> Verdict | None:
    """One attempt; None where this way cannot be taken at all.

    Raises:
        Unanswered: no verdict this time.
    """
    try:
        # Not with a socket of our own: at a timeout uvloop would close it, and so would its object.
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        if is_shortage(error):
            return None
        what = "its backlog is full" if isinstance(error, BlockingIOError) else error.strerror
        raise Unanswered(f"cannot connect to {path}: {what}") from error
    try:
        writer.write(REQUEST)
        await reader.readexactly(ANSWER_BYTES_MAX)
        raise Unanswered(f"the answer to the canary has more than {ANSWER_BYTES_MAX} bytes")
    except asyncio.IncompleteReadError as end:  # the backend closes the connection behind it
        answer = end.partial
    except OSError as error:
        raise Unanswered(f"the connection to {path} broke: {error.strerror}") from error
    finally:
        writer.transport.abort()  # everything was read, or nothing will be
    head, _, body = answer.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.\d (\d{3}) ", head)
    if status is None:
        what = "is not HTTP" if answer else "is the end of the connection"
        raise Unanswered(f"what the backend answers {what}")
    if int(status[1]) in NO_SUCH_PATH:
        return None
    try:
        return msgspec.json.decode(body, type=Verdict)
    except msgspec.DecodeError as error:
        raise Unanswered(
            f"{path} answered the canary with HTTP {int(status[1])}, no verdict"
        ) from error
