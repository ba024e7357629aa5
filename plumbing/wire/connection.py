"""One connection on an event loop, either end of it: frames, the queue, closing; and connections
that are made again.

A connection is closed in exactly one place, `close`; the loop calls its handler's `closed` exactly
once, never from inside one of the handler's own calls. `connect` opens one over a Unix socket; what
differs over TCP is in `wire/tcp`.

The surprising thing: asyncio's and uvloop's transports read the bytes and drop the descriptors, so
the raw socket is handled here (`add_reader` and `recvmsg`, which both loops support).
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.wire import sockets
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.frames import Frame, FrameDecoder, encode_frame
from plumbing.wire.limits import CONNECT_DEADLINE_S, RETRY_S
from plumbing.wire.messages import Catalogue, FaultMsg, Message, fault_of
from plumbing.wire.peer import Peer, identify

# What one slow reader may hold in our memory: two of the largest frames, or 64 small ones.
QUEUED_BYTES_FRAMES = 64
# A client sends its first frame right after connecting; a silent one costs little until then.
FIRST_FRAME_DEADLINE_S = 5.0
# How long a closing connection may take to deliver its last frame (an error) to the peer.
FLUSH_DEADLINE_S = 1.0

_ids = itertools.count(1)


class Handler(Protocol):
    """What a service does with its connections: plain callbacks on the loop."""

    def opened(self, conn: Connection) -> None:
        """By default, nothing."""
        return

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        """Handle one message and take its descriptors.

        An `UnderstudyError` raised here becomes an error frame and ends this connection; any
        other exception is a bug and reaches the loop's exception handler.
        """

    def closed(self, conn: Connection, reason: str) -> None:
        """By default, nothing."""
        return


@dataclass
class _Outgoing:
    data: memoryview
    fds: Sequence[OwnedFd]


class Connection:
    """A stream of messages over a raw socket. `state` belongs to the handler."""

    lingers = False  # whether a closing end reads on until the peer has closed its own

    def __init__(
        self,
        sock: socket.socket,
        catalogue: Catalogue,
        handler: Handler,
        peer: Peer | None = None,
    ) -> None:
        """Own `sock` and start reading; the handler's `opened` is called at once.

        Raises:
            OSError: there is no descriptor for the peer's pidfd; the caller still owns `sock`. What
                `opened` raises, too.
        """
        self.id = next(_ids)
        self.peer = peer or identify(sock)
        self.state: Any = None
        self.is_closed = False
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._catalogue = catalogue
        self._handler = handler
        self._decoder = FrameDecoder(catalogue.frame_bytes_max)
        self._queue: deque[_Outgoing] = deque()
        self._queued_bytes = 0
        self._queued_bytes_max = max(2 * catalogue.frame_bytes_max, QUEUED_BYTES_FRAMES * 1024)
        self._is_writing = False
        self._closing_reason: str | None = None  # set while the last frames are being sent
        self._deadline: asyncio.TimerHandle | None = None  # of the first frame, or of the last ones
        sock.setblocking(False)
        try:
            handler.opened(self)
        except BaseException:
            self.peer.close()
            raise
        if not self.is_closed and self._closing_reason is None:
            self._loop.add_reader(sock.fileno(), self._readable)
            self._loop.call_soon(self._readable)  # TLS may have decrypted something already

    # ------------------------------------------------------------------ the socket

    def _receive(self) -> tuple[bytes, list[OwnedFd]]:
        """As `sockets.receive`."""
        return sockets.receive(self._sock)

    def _transmit(self, data: memoryview, fds: Sequence[OwnedFd]) -> int:
        """As `sockets.send`."""
        return sockets.send(self._sock, data, fds)

    def _explain(self, error: OSError) -> str:
        """Why the connection ends."""
        return f"the peer is gone: {error.strerror}"

    # ------------------------------------------------------------------ sending

    def send(self, message: Message, request_id: int = 0, fds: Sequence[OwnedFd] = ()) -> None:
        """Queue `message`; takes `fds`. Never blocks; a peer that does not read is dropped."""
        if self.is_closed or self._closing_reason is not None:
            close_all(fds)
            return
        try:
            payload = self._catalogue.encode(message, request_id)
            data = encode_frame(payload, len(fds), self._catalogue.frame_bytes_max)
        except BaseException:
            close_all(fds)
            raise
        self._queue.append(_Outgoing(memoryview(data), fds))
        self._queued_bytes += len(data)
        if self._queued_bytes > self._queued_bytes_max:
            self.close(f"the peer does not read: {self._queued_bytes} bytes are queued for it")
        elif not self._is_writing:
            self._flush()

    def fault(self, error: UnderstudyError, request_id: int = 0, *, close: bool = True) -> None:
        """Send `error` as an error frame and, unless told otherwise, close once it is sent."""
        self.send(fault_of(error), request_id)
        if close:
            self.close_soon(str(error))

    def close_soon(self, reason: str) -> None:
        """Handle nothing more; close when the queue has been sent or the flush deadline passes."""
        if self.is_closed or self._closing_reason is not None:
            return
        self._closing_reason = reason
        if not self._queue and not self.lingers:
            self.close(reason)
            return
        self._set_deadline(FLUSH_DEADLINE_S, self.close, reason)
        if not self.lingers:
            self._loop.remove_reader(self._sock.fileno())

    def limit_queue(self, queued_bytes_max: int) -> None:
        """Drop the peer once this much is queued for it. For observers: they get messages they
        did not ask for, and may be slow for as long as they live."""
        self._queued_bytes_max = queued_bytes_max

    def _flush(self) -> None:
        """Send until the socket is full, then let the loop call again."""
        if self.is_closed:
            return
        try:
            while self._queue:
                head = self._queue[0]
                sent = self._transmit(head.data, head.fds)
                close_all(head.fds)  # they went with the first byte
                head.fds = ()
                head.data = head.data[sent:]
                self._queued_bytes -= sent
                if not head.data:
                    self._queue.popleft()
        except BlockingIOError as error:
            if error.errno != errno.EAGAIN:  # the socket has room, the kernel has not
                self._stop_writing()
                self._loop.call_later(RETRY_S, self._flush)
            elif not self._is_writing:
                self._is_writing = True
                self._loop.add_writer(self._sock.fileno(), self._flush)
            return
        except OSError:  # read on until the end of the stream: the peer may have sent the reason
            self._drop_queue()
        self._stop_writing()
        if self._closing_reason is not None and not self.lingers:
            self.close(self._closing_reason)

    def _drop_queue(self) -> None:
        for outgoing in self._queue:
            close_all(outgoing.fds)
        self._queue.clear()
        self._queued_bytes = 0

    def _stop_writing(self) -> None:
        if self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._sock.fileno())

    # ------------------------------------------------------------------ receiving

    def expect_message(self) -> None:
        """Refuse the peer unless it sends a message soon."""
        why = f"no message arrived within {FIRST_FRAME_DEADLINE_S:g} s of connecting"
        late = ProtocolError("wire.first_frame_deadline", why)
        self._set_deadline(FIRST_FRAME_DEADLINE_S, self.fault, late)

    def _set_deadline(self, delay_s: float, then: Callable[..., None], *said: object) -> None:
        """In place of the last one, if it has not come."""
        self._drop_deadline()
        self._deadline = self._loop.call_later(delay_s, then, *said)

    def _drop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _received(self, data: bytes, fds: list[OwnedFd]) -> None:
        """Take bytes in the order of arrival, with the descriptors that arrived with them."""
        try:
            frames = self._decoder.receive(data, fds)
        except ProtocolError as error:
            self.fault(error)
            return
        for frame in frames:
            if self.is_closed or self._closing_reason is not None:
                close_all(frame.fds)
            else:
                self._handle(frame)

    def _readable(self) -> None:
        """One read per turn of the loop, so that a busy peer does not starve the others, until
        nothing is left: libuv stops watching a socket at the first event that shows an error, which
        is pending once a peer has closed without reading everything."""
        is_closing = self._closing_reason is not None
        if self.is_closed or (is_closing and not self.lingers):
            return  # since the last turn
        try:
            data, fds = self._receive()
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError as error:
            self.fault(error)
            return
        except OSError as error:
            self.close(self._closing_reason or self._explain(error))
            return
        if not data and not fds:
            self.close(self._closing_reason or "the peer closed the connection")
            return
        if not is_closing:
            self._received(data, fds)
        self._loop.call_soon(self._readable)

    def _handle(self, frame: Frame) -> None:
        self._drop_deadline()
        try:
            message, request_id = self._catalogue.decode(frame.payload, len(frame.fds))
        except ProtocolError as error:
            close_all(frame.fds)
            self.fault(error)
            return
        try:
            self._handler.received(self, message, request_id, frame.fds)
        except UnderstudyError as error:
            close_all(frame.fds)
            self.fault(error, request_id)

    # ------------------------------------------------------------------ closing

    def close(self, reason: str) -> None:
        """Close now and drop what is queued. Calling it again does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        self._drop_deadline()
        self._loop.remove_reader(self._sock.fileno())
        self._stop_writing()
        self._sock.close()
        self._drop_queue()
        self._decoder.close()
        self._loop.call_soon(self._closed, reason)

    def _closed(self, reason: str) -> None:
        try:
            self._handler.closed(self, reason)
        finally:
            self.peer.close()

    def __repr__(self) -> str:
        return f"<connection {self.id} to {self.peer}>"


async def connect(
    path: str, catalogue: Catalogue, handler: Handler, deadline_s: float = CONNECT_DEADLINE_S
) -> Connection:
    """A connection to the server at `path`; waits while the server's backlog is full.

    Raises:
        UnreachableError: as of `sockets.dial`.
    """
    end = time.monotonic() + deadline_s
    while (sock := sockets.dial(path, end)) is None:  # noqa: ASYNC110 - nothing tells it
        await asyncio.sleep(RETRY_S)
    try:
        return Connection(sock, catalogue, handler)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise sockets.no_descriptors(f"connect to {path}", error) from error
        raise


RECONNECT_MS_MIN, RECONNECT_MS_MAX = 10.0, 500.0
RECONNECT_GROWTH = 1.1  # a server is found again within a tenth of the time for which it was away


class KeptConnection(Handler):
    """A connection to the server at `path` that is made again whenever it ends. `problem`: why
    there is none, or why it is of no use."""

    def __init__(self, path: str, catalogue: Catalogue) -> None:
        """Connect later, in `run`."""
        self.path, self._catalogue = path, catalogue
        self.problem: str | None = None
        self.conn: Connection | None = None
        self._refusal: str | None = None  # on this connection
        self._ended = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        return self.conn is not None

    def begin(self, conn: Connection) -> None:
        """It is connected."""

    def hear(self, message: Message, request_id: int) -> None:
        """A message of the server."""

    def refused(self, error: UnderstudyError, request_id: int) -> None:
        """An error of the server; `problem` has its sentence."""

    def lose(self, reason: str) -> None:
        """It is connected no more."""

    async def run(self) -> None:
        """Stay connected until cancelled."""
        loop, retry_ms = asyncio.get_running_loop(), RECONNECT_MS_MIN
        try:
            while True:
                self._ended.clear()
                try:
                    await self._connect()
                except UnderstudyError as error:
                    self._failed(error.message)
                except OSError as error:
                    self._failed(sockets.no_descriptors("connect", error).message)
                else:
                    begun = loop.time()
                    await self._ended.wait()
                    if (loop.time() - begun) * 1000 > RECONNECT_MS_MAX:
                        retry_ms = RECONNECT_MS_MIN
                await asyncio.sleep(retry_ms / 1000)
                retry_ms = min(retry_ms * RECONNECT_GROWTH, RECONNECT_MS_MAX)
        finally:
            conn, self.conn = self.conn, None
            if conn is not None:
                conn.close("its program is ending")

    def drop(self, reason: str) -> None:
        """End this connection, for another one."""
        if self.conn is not None:
            self.conn.close(reason)
            self._forget(self.conn, reason)

    async def _connect(self) -> None:
        await connect(self.path, self._catalogue, self)

    def _failed(self, why: str) -> None:
        """It cannot connect."""
        self.problem = why

    def _forget(self, conn: Connection, reason: str) -> None:
        if conn is self.conn:
            self.conn = None
            self.problem = self._refusal or f"the connection ended: {reason}"
            self.lose(reason)

    def opened(self, conn: Connection) -> None:
        self.conn, self._refusal = conn, None
        self.begin(conn)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        if conn is not self.conn:
            return
        if isinstance(message, FaultMsg):
            self.problem = self._refusal = message.message
            self.refused(message.to_error(), request_id)
        else:
            self.hear(message, request_id)

    def closed(self, conn: Connection, reason: str) -> None:
        self._forget(conn, reason)
        self._ended.set()
