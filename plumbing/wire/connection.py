"""One connection on an event loop, either end of it, over either transport.

Here is what Unix sockets and TCP have in common: frames, their deadlines and turns, the queue, and
closing. `unix_connection` and `tcp.connection` move the bytes. A connection is closed in exactly
one place, `close`; its handler's `closed` is called exactly once, by the loop and never from inside
a call of the handler's own.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.frames import Frame, FrameDecoder, encode_frame
from plumbing.wire.limits import (
    FLUSH_DEADLINE_S,
    FRAME_DEADLINE_S,
    FRAMES_PER_TURN,
    QUEUED_BYTES_FRAMES,
)
from plumbing.wire.messages import Catalogue, Message, fault_of
from plumbing.wire.peer import Peer

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

    def closed(self, conn: Connection, reason: str) -> None: ...


class Connection(abc.ABC):
    """A stream of messages. `state` belongs to the handler."""

    def __init__(self, peer: Peer, catalogue: Catalogue, handler: Handler, fds_max: int) -> None:
        """`fds_max`: how many descriptors one frame may carry here."""
        self.id = next(_ids)
        self.peer = peer
        self.state: Any = None
        self.is_closed = False
        self._loop = asyncio.get_running_loop()
        self._catalogue = catalogue
        self._handler = handler
        self._fds_max = fds_max
        self._decoder = FrameDecoder(catalogue.frame_bytes_max, fds_max)
        self._unhandled: deque[Frame] = deque()  # complete frames; reading is paused meanwhile
        self._is_paused = False
        self._queued_bytes_max = max(2 * catalogue.frame_bytes_max, QUEUED_BYTES_FRAMES * 1024)
        self._closing_reason: str | None = None  # set while the last frames are being sent
        self._frame_deadline: asyncio.TimerHandle | None = None
        self._flush_deadline: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ the transport

    @abc.abstractmethod
    def _write(self, data: bytes, fds: Sequence[OwnedFd]) -> None:
        """Send or queue `data`; takes `fds`. Closes if too much is queued."""

    @property
    @abc.abstractmethod
    def _can_write(self) -> bool:
        """False once the peer is known to read no more: what is sent then is dropped."""

    @abc.abstractmethod
    def _pause_reading(self) -> None: ...

    @abc.abstractmethod
    def _resume_reading(self) -> None: ...

    @abc.abstractmethod
    def _finish(self) -> bool:
        """Send what is queued, handle nothing more, and then call `close`. False: nothing is
        queued, so the caller must close now."""

    @abc.abstractmethod
    def _discard(self) -> None:
        """Close the socket and drop what is queued."""

    # ------------------------------------------------------------------ sending

    def send(self, message: Message, request_id: int = 0, fds: Sequence[OwnedFd] = ()) -> None:
        """Queue `message`; takes `fds`. Never blocks; a peer that does not read is dropped."""
        if self.is_closed or self._closing_reason is not None or not self._can_write:
            close_all(fds)
            return
        try:
            payload = self._catalogue.encode(message, request_id)
            data = encode_frame(payload, len(fds), self._catalogue.frame_bytes_max, self._fds_max)
        except BaseException:
            close_all(fds)
            raise
        self._write(data, fds)

    def fault(self, error: UnderstudyError, request_id: int = 0, *, close: bool = True) -> None:
        """Send `error` as an error frame and, unless told otherwise, close once it is sent."""
        self.send(fault_of(error), request_id)
        if close:
            self.close_soon(str(error))

    def close_soon(self, reason: str) -> None:
        """Stop reading; close when the queue has been sent or the flush deadline passes."""
        if self.is_closed or self._closing_reason is not None:
            return
        self._closing_reason = reason
        if self._finish():
            self._flush_deadline = self._loop.call_later(FLUSH_DEADLINE_S, self.close, reason)
        else:
            self.close(reason)

    def limit_queue(self, queued_bytes_max: int) -> None:
        """Drop the peer once this much is queued for it. For observers: they get messages they
        did not ask for, and may be slow for as long as they live."""
        self._queued_bytes_max = queued_bytes_max

    # ------------------------------------------------------------------ receiving

    def limit_frames(self, frame_bytes_max: int) -> None:
        """Accept no larger frames than this from now on; the limit may depend on the peer."""
        self._decoder.frame_bytes_max = frame_bytes_max

    def _received(self, data: bytes, fds: list[OwnedFd]) -> None:
        """Take bytes in the order of arrival, with the descriptors that arrived with them."""
        try:
            frames = self._decoder.receive(data, fds)
        except ProtocolError as error:
            self.fault(error)
            return
        self._unhandled.extend(frames)
        self._update_frame_deadline(has_ended=bool(frames))
        if not self._is_paused:  # else `_handle_some` is scheduled already
            self._handle_some()

    def _handle_some(self) -> None:
        """Handle a few of the frames that arrived; the rest when other peers had their turn."""
        try:
            for _ in range(FRAMES_PER_TURN):
                if self._unhandled and not self.is_closed and self._closing_reason is None:
                    self._handle(self._unhandled.popleft())
        finally:
            self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        if self.is_closed or self._closing_reason is not None:
            self._drop_unhandled()
        elif self._unhandled:
            if not self._is_paused:
                self._is_paused = True
                self._pause_reading()
            self._loop.call_soon(self._handle_some)
        elif self._is_paused:
            self._is_paused = False
            self._resume_reading()

    def _drop_unhandled(self) -> None:
        for frame in self._unhandled:
            close_all(frame.fds)
        self._unhandled.clear()

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

    def _update_frame_deadline(self, *, has_ended: bool) -> None:
        """A frame that has begun must end before its deadline; each frame has its own."""
        if self._frame_deadline is not None and has_ended:
            self._frame_deadline.cancel()
            self._frame_deadline = None
        if self._frame_deadline is None and self._decoder.is_mid_frame:
            self._frame_deadline = self._loop.call_later(FRAME_DEADLINE_S, self._frame_timed_out)

    def _frame_timed_out(self) -> None:
        if self._is_paused:  # we are the slow side: the rest may have arrived
            self._frame_deadline = self._loop.call_later(FRAME_DEADLINE_S, self._frame_timed_out)
            return
        self.fault(
            ProtocolError(
                "wire.frame_deadline",
                f"the rest of a frame did not arrive within {FRAME_DEADLINE_S:g} s",
            )
        )

    # ------------------------------------------------------------------ closing

    def close(self, reason: str) -> None:
        """Close now and drop what is queued. Calling it again does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        for timer in (self._frame_deadline, self._flush_deadline):
            if timer is not None:
                timer.cancel()
        self._discard()
        self._decoder.close()
        self._drop_unhandled()
        self._loop.call_soon(self._closed, reason)

    def _closed(self, reason: str) -> None:
        try:
            self._handler.closed(self, reason)
        finally:
            self.peer.close()

    def __repr__(self) -> str:
        return f"<connection {self.id} to {self.peer}>"
