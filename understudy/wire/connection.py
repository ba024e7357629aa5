"""One connection on an event loop, either end of it, with descriptors.

asyncio's and uvloop's transports read the bytes and drop the descriptors, so the raw socket is
owned here (`add_reader` and `recvmsg`; both loops). A connection is closed in exactly one place,
`close`, and its handler hears of it exactly once, from the loop, never from inside its own call.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from understudy.errors import ProtocolError, UnderstudyError
from understudy.wire import sockets
from understudy.wire.fds import OwnedFd, close_all
from understudy.wire.frames import Frame, FrameDecoder, encode_frame
from understudy.wire.limits import (
    FLUSH_DEADLINE_S,
    FRAME_DEADLINE_S,
    FRAMES_PER_TURN,
    QUEUED_BYTES_FRAMES,
    RETRY_S,
)
from understudy.wire.messages import Catalogue, Message, fault_of
from understudy.wire.peer import Peer, identify

_ids = itertools.count(1)


class Handler(Protocol):
    """What a service does with its connections: plain callbacks on the loop."""

    def opened(self, conn: Connection) -> None: ...

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        """Handle one message and take its descriptors.

        An `UnderstudyError` raised here becomes an error frame and ends this connection; any
        other exception is our own fault and reaches the loop's exception handler.
        """

    def closed(self, conn: Connection, reason: str) -> None: ...


@dataclass
class _Outgoing:
    data: memoryview
    fds: Sequence[OwnedFd]


class Connection:
    """A stream of messages. `state` belongs to the handler."""

    def __init__(self, sock: socket.socket, catalogue: Catalogue, handler: Handler) -> None:
        """Own `sock` and start reading; the handler's `opened` is called at once."""
        self.id = next(_ids)
        self.peer: Peer = identify(sock)
        self.state: Any = None
        self.is_closed = False
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._catalogue = catalogue
        self._handler = handler
        self._decoder = FrameDecoder(catalogue.frame_bytes_max)
        self._arrived: deque[Frame] = deque()  # complete, not yet handled; reading pauses for them
        self._is_paused = False
        self._queue: deque[_Outgoing] = deque()
        self._queued_bytes = 0
        self._queued_bytes_max = max(2 * catalogue.frame_bytes_max, QUEUED_BYTES_FRAMES * 1024)
        self._is_writing = False
        self._is_peer_deaf = False
        self._last_words: str | None = None
        self._frame_deadline: asyncio.TimerHandle | None = None
        self._flush_deadline: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        handler.opened(self)
        if not self.is_closed:
            self._loop.add_reader(sock.fileno(), self._readable)

    # ------------------------------------------------------------------ sending

    def send(self, message: Message, request_id: int = 0, fds: Sequence[OwnedFd] = ()) -> None:
        """Queue `message`; takes `fds`. Never blocks; a peer that does not read is dropped."""
        if self.is_closed or self._is_peer_deaf or self._last_words is not None:
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
            self.close(f"{self._queued_bytes} bytes wait for a peer that does not read")
        elif not self._is_writing:
            self._flush()

    def fault(self, error: UnderstudyError, request_id: int = 0, *, close: bool = True) -> None:
        """Send `error` as an error frame and, unless told otherwise, close once it is sent."""
        self.send(fault_of(error), request_id)
        if close:
            self.close_soon(str(error))

    def close_soon(self, reason: str) -> None:
        """Stop reading, and close when what is queued has been sent or the deadline comes."""
        if self.is_closed or self._last_words is not None:
            return
        if not self._queue:
            self.close(reason)
            return
        self._last_words = reason
        self._loop.remove_reader(self._sock.fileno())
        self._flush_deadline = self._loop.call_later(FLUSH_DEADLINE_S, self.close, reason)

    def _flush(self) -> None:
        """Send until the socket is full, then let the loop call again."""
        try:
            while self._queue:
                head = self._queue[0]
                sent = sockets.send(self._sock, head.data, head.fds)
                close_all(head.fds)  # they went with the first byte
                head.fds = ()
                head.data = head.data[sent:]
                self._queued_bytes -= sent
                if not head.data:
                    self._queue.popleft()
        except BlockingIOError as error:
            self._wait_writable(is_kernel_busy=error.errno == errno.ETOOMANYREFS)
            return
        except OSError as error:
            self._peer_stopped_reading(error)
            return
        self._stop_writing()
        if self._last_words is not None:
            self.close(self._last_words)

    def _peer_stopped_reading(self, error: OSError) -> None:
        """It may have said why before it went: its last words are read, then its end is."""
        self._stop_writing()
        if self._last_words is not None:  # we do not read any more either
            self.close(f"the peer is gone: {error.strerror}")
            return
        self._is_peer_deaf = True
        self._drop_queue()

    def _drop_queue(self) -> None:
        for outgoing in self._queue:
            close_all(outgoing.fds)
        self._queue.clear()
        self._queued_bytes = 0

    def _wait_writable(self, *, is_kernel_busy: bool) -> None:
        if is_kernel_busy:  # the socket is writable, the kernel is not: look again later
            self._stop_writing()
            self._is_writing = True
            self._loop.call_later(RETRY_S, self._retry)
        elif not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._sock.fileno(), self._flush)

    def _retry(self) -> None:
        if not self.is_closed:
            self._is_writing = False
            self._flush()

    def _stop_writing(self) -> None:
        if self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._sock.fileno())

    def limit_queue(self, queued_bytes_max: int) -> None:
        """Drop the peer at so much unsent from now on: one that is told things unasked may be slow
        for as long as it lives."""
        self._queued_bytes_max = queued_bytes_max

    # ------------------------------------------------------------------ receiving

    def limit_frames(self, frame_bytes_max: int) -> None:
        """Take no larger frames than this from now on: what a peer may say depends on who it is."""
        self._decoder.frame_bytes_max = frame_bytes_max

    def _readable(self) -> None:
        """One `recvmsg` per wake-up, so that a talkative peer starves nobody."""
        try:
            data, fds = sockets.receive(self._sock)
            frames = self._decoder.receive(data, fds) if data or fds else None
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError as error:
            self.fault(error)
            return
        except OSError as error:
            self.close(f"the peer is gone: {error.strerror}")
            return
        if frames is None:
            self.close("the peer closed the connection")
            return
        self._arrived.extend(frames)
        self._watch_frame()
        self._deliver()

    def _deliver(self) -> None:
        """Hand over a few of the frames that arrived; the rest when others have had their turn."""
        try:
            for _ in range(FRAMES_PER_TURN):
                if self._arrived and not self.is_closed and self._last_words is None:
                    self._handle(self._arrived.popleft())
        finally:
            self._pause_or_go_on()

    def _pause_or_go_on(self) -> None:
        if self.is_closed or self._last_words is not None:
            self._drop_arrived()
        elif self._arrived:
            if not self._is_paused:
                self._is_paused = True
                self._loop.remove_reader(self._sock.fileno())
            self._loop.call_soon(self._deliver)
        elif self._is_paused:
            self._is_paused = False
            self._loop.add_reader(self._sock.fileno(), self._readable)

    def _drop_arrived(self) -> None:
        for frame in self._arrived:
            close_all(frame.fds)
        self._arrived.clear()

    def _handle(self, frame: Frame) -> None:
        request_id = 0
        try:
            message, request_id = self._catalogue.decode(frame.payload, len(frame.fds))
        except ProtocolError as error:
            close_all(frame.fds)
            self.fault(error, error.details.get("request_id", 0))
            return
        try:
            self._handler.received(self, message, request_id, frame.fds)
        except UnderstudyError as error:
            close_all(frame.fds)
            self.fault(error, request_id)

    def _watch_frame(self) -> None:
        """A frame that has begun must end before its deadline."""
        if self._frame_deadline is not None:
            if self._decoder.is_mid_frame:
                return
            self._frame_deadline.cancel()
            self._frame_deadline = None
        elif self._decoder.is_mid_frame:
            self._frame_deadline = self._loop.call_later(FRAME_DEADLINE_S, self._frame_late)

    def _frame_late(self) -> None:
        if self._is_paused:  # we are the slow one: the rest may have arrived
            self._frame_deadline = self._loop.call_later(FRAME_DEADLINE_S, self._frame_late)
            return
        self.fault(
            ProtocolError(
                "wire.frame_deadline",
                f"half a frame arrived and the rest did not within {FRAME_DEADLINE_S:g} s",
            )
        )

    # ------------------------------------------------------------------ ending

    def close(self, reason: str) -> None:
        """Close now; what is queued is lost. Again is harmless."""
        if self.is_closed:
            return
        self.is_closed = True
        for timer in (self._frame_deadline, self._flush_deadline):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._decoder.close()
        self._drop_arrived()
        self._drop_queue()
        self._loop.call_soon(self._closed, reason)

    def _closed(self, reason: str) -> None:
        try:
            self._handler.closed(self, reason)
        finally:
            self.peer.close()

    def __repr__(self) -> str:
        return f"<connection {self.id} to pid {self.peer.pid}>"
