"""A connection over a Unix socket, with descriptors.

asyncio's and uvloop's transports read the bytes and drop the descriptors, so the raw socket is
owned here (`add_reader` and `recvmsg`; both loops).
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from plumbing.errors import ProtocolError
from plumbing.wire import sockets
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import FDS_PER_FRAME_MAX, RETRY_S
from plumbing.wire.messages import Catalogue
from plumbing.wire.peer import identify


@dataclass
class _Outgoing:
    data: memoryview
    fds: Sequence[OwnedFd]


class UnixConnection(Connection):
    """A stream of messages over a raw socket."""

    def __init__(self, sock: socket.socket, catalogue: Catalogue, handler: Handler) -> None:
        """Own `sock` and start reading; the handler's `opened` is called at once."""
        super().__init__(identify(sock), catalogue, handler, FDS_PER_FRAME_MAX)
        self._sock = sock
        self._queue: deque[_Outgoing] = deque()
        self._queued_bytes = 0
        self._is_writing = False
        self._is_peer_deaf = False
        sock.setblocking(False)
        handler.opened(self)
        if not self.is_closed:
            self._resume_reading()

    # ------------------------------------------------------------------ sending

    @property
    def _is_deaf(self) -> bool:
        return self._is_peer_deaf

    def _write(self, data: bytes, fds: Sequence[OwnedFd]) -> None:
        self._queue.append(_Outgoing(memoryview(data), fds))
        self._queued_bytes += len(data)
        if self._queued_bytes > self._queued_bytes_max:
            self.close(f"{self._queued_bytes} bytes wait for a peer that does not read")
        elif not self._is_writing:
            self._flush()

    def _finish(self) -> bool:
        if self._queue:
            self._pause_reading()
        return bool(self._queue)

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

    # ------------------------------------------------------------------ receiving

    def _pause_reading(self) -> None:
        self._loop.remove_reader(self._sock.fileno())

    def _resume_reading(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._readable)

    def _readable(self) -> None:
        """One `recvmsg` per wake-up, so that a talkative peer starves nobody."""
        try:
            data, fds = sockets.receive(self._sock)
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError as error:
            self.fault(error)
            return
        except OSError as error:
            self.close(f"the peer is gone: {error.strerror}")
            return
        if data or fds:
            self._take(data, fds)
        else:
            self.close("the peer closed the connection")

    def _abandon(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._stop_writing()
        self._sock.close()
        self._drop_queue()
