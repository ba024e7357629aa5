"""A connection over a Unix socket, with descriptors, and how to open one on an event loop.

asyncio's and uvloop's transports read the bytes and drop the descriptors, so the raw socket is
handled here (`add_reader` and `recvmsg`, which both loops support).
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from plumbing.errors import ProtocolError
from plumbing.wire import sockets
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import CONNECT_DEADLINE_S, FDS_PER_FRAME_MAX, RETRY_S
from plumbing.wire.messages import Catalogue
from plumbing.wire.peer import identify


@dataclass
class _Outgoing:
    data: memoryview
    fds: Sequence[OwnedFd]


class UnixConnection(Connection):
    """A stream of messages over a raw socket."""

    def __init__(self, sock: socket.socket, catalogue: Catalogue, handler: Handler) -> None:
        """Own `sock` and start reading; the handler's `opened` is called at once.

        Raises:
            OSError: there is no descriptor for the peer's pidfd; the caller still owns `sock`. What
                `opened` raises, too.
        """
        super().__init__(identify(sock), catalogue, handler, FDS_PER_FRAME_MAX)
        self._sock = sock
        self._queue: deque[_Outgoing] = deque()
        self._queued_bytes = 0
        self._is_writing = False
        self._does_peer_read = True
        sock.setblocking(False)
        try:
            handler.opened(self)
        except BaseException:
            self.peer.close()
            raise
        if not self.is_closed:
            self._resume_reading()

    # ------------------------------------------------------------------ sending

    @property
    def _can_write(self) -> bool:
        return self._does_peer_read

    @property
    def is_backed_up(self) -> bool:
        """Whether something sent earlier still waits for the peer to read. For what is sent again
        and again: the peer may be stopped for long."""
        return bool(self._queue)

    def _write(self, data: bytes, fds: Sequence[OwnedFd]) -> None:
        self._queue.append(_Outgoing(memoryview(data), fds))
        self._queued_bytes += len(data)
        if self._queued_bytes > self._queued_bytes_max:
            self.close(f"the peer does not read: {self._queued_bytes} bytes are queued for it")
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
            self._wait_writable(is_kernel_busy=error.errno != errno.EAGAIN)
            return
        except OSError as error:
            self._peer_stopped_reading(error)
            return
        self._stop_writing()
        if self._closing_reason is not None:
            self.close(self._closing_reason)

    def _peer_stopped_reading(self, error: OSError) -> None:
        """Keep reading until the end of the stream: the peer may have sent the reason first."""
        self._stop_writing()
        if self._closing_reason is not None:  # we do not read any more either
            self.close(f"the peer is gone: {error.strerror}")
            return
        self._does_peer_read = False
        self._drop_queue()

    def _drop_queue(self) -> None:
        for outgoing in self._queue:
            close_all(outgoing.fds)
        self._queue.clear()
        self._queued_bytes = 0

    def _wait_writable(self, *, is_kernel_busy: bool) -> None:
        if is_kernel_busy:  # the socket is writable, the kernel is not: retry later
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
        """One `recvmsg` per turn of the loop, so that a busy peer does not starve the others, until
        nothing is left: libuv stops watching a socket at the first event that shows an error, which
        is pending once a peer has closed without reading everything."""
        if self.is_closed or self._is_paused or self._closing_reason is not None:
            return  # since the last turn
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
            self._received(data, fds)
            self._loop.call_soon(self._readable)
        else:
            self.close("the peer closed the connection")

    def _discard(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._stop_writing()
        self._sock.close()
        self._drop_queue()


async def connect(
    path: str, catalogue: Catalogue, handler: Handler, deadline_s: float = CONNECT_DEADLINE_S
) -> UnixConnection:
    """A connection to the server at `path`.

    While the backlog is full (EAGAIN on Unix sockets, man 2 connect), retries until the deadline.

    Raises:
        UnreachableError: `wire.unreachable`, with the reason; `wire.no_descriptors`: this process
            is at its limit of open files.
    """
    sockets.check_path(path)
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise sockets.no_descriptors(f"open a socket to {path}", error) from error
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
                break
            except OSError as error:
                if error.errno != errno.EAGAIN or loop.time() > end:
                    raise sockets.unreachable(path, error) from error
            await asyncio.sleep(RETRY_S)
        try:
            return UnixConnection(sock, catalogue, handler)
        except OSError as error:
            raise sockets.no_descriptors(f"connect to {path}", error) from error
    except BaseException:
        sock.close()
        raise
