"""A client without an event loop: for engine workers, whose threads belong to vLLM or numpy.

The frames are the same. A lock allows one request at a time; notifications that arrive meanwhile
are kept in order for `receive`.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from plumbing.errors import ProtocolError, UnreachableError, WaitTimeoutError
from plumbing.wire import sockets
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.frames import Frame, FrameDecoder, encode_frame
from plumbing.wire.limits import CONNECT_DEADLINE_S, RETRY_S
from plumbing.wire.messages import Catalogue, FaultMsg, Message

REQUEST_TIMEOUT_S = 30.0


@dataclass
class Reply:
    """A message and its descriptors, which the caller owns."""

    message: Message
    fds: list[OwnedFd] = field(default_factory=list)
    request_id: int = 0


class BlockingClient:
    """A connection whose calls block, each with a deadline."""

    def __init__(
        self, path: str, catalogue: Catalogue, connect_timeout_s: float = CONNECT_DEADLINE_S
    ) -> None:
        """Connect to `path`; waits while the server's backlog is full.

        Raises:
            UnreachableError: as of `sockets.dial`.
        """
        end = time.monotonic() + connect_timeout_s
        while (sock := sockets.dial(path, end)) is None:
            time.sleep(RETRY_S)
        self._adopt(sock, catalogue)

    @classmethod
    def from_socket(cls, sock: socket.socket, catalogue: Catalogue) -> BlockingClient:
        """A client over `sock`, which it owns from now on."""
        client = cls.__new__(cls)
        client._adopt(sock, catalogue)
        return client

    def _adopt(self, sock: socket.socket, catalogue: Catalogue) -> None:
        self._sock = sock
        self._catalogue = catalogue
        self._decoder = FrameDecoder(catalogue.frame_bytes_max)
        self._pending: deque[Reply] = deque()
        self._lock = threading.RLock()
        self._next_id = 1

    def fileno(self) -> int:
        """The socket's descriptor, borrowed, to poll for the end of the connection."""
        return self._sock.fileno()

    def request(
        self, message: Message, fds: Sequence[OwnedFd] = (), timeout_s: float = REQUEST_TIMEOUT_S
    ) -> Reply:
        """Send `message` and wait for the answer; takes `fds`, the answer's are the caller's.

        Raises:
            RemoteError: the answer is an error frame.
            WaitTimeoutError: `wire.timeout`.
            UnreachableError: `wire.closed`: the peer is gone.
        """
        with self._lock:
            request_id, self._next_id = self._next_id, self._next_id + 1
            end = time.monotonic() + timeout_s
            self._send(message, request_id, fds, end)
            return self._answer(message, request_id, end)

    def notify(self, message: Message, fds: Sequence[OwnedFd] = (), *, request_id: int = 0) -> None:
        """Send a message that has no answer, or that answers the peer's `request_id`; takes
        `fds`."""
        with self._lock:
            self._send(message, request_id, fds, time.monotonic() + REQUEST_TIMEOUT_S)

    def receive(self, timeout_s: float = REQUEST_TIMEOUT_S) -> Reply:
        """The next frame, whatever it is; an error frame is raised as `RemoteError`."""
        with self._lock:
            if not self._pending:
                self._read(time.monotonic() + timeout_s, "the next message")
            return _raise_fault(self._pending.popleft())

    def interrupt(self) -> None:
        """Shut the connection down while another thread waits in a call: the call raises
        `wire.closed`, and that thread must close this client."""
        with contextlib.suppress(OSError):  # no longer connected
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
        self._decoder.close()
        for reply in self._pending:
            close_all(reply.fds)
        self._pending.clear()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _answer(self, message: Message, request_id: int, end: float) -> Reply:
        """The answer to `request_id`; messages that arrive before it are kept for `receive`."""
        while True:
            for reply in self._pending:
                is_final = isinstance(reply.message, FaultMsg) and reply.request_id == 0
                if reply.request_id == request_id or is_final:
                    self._pending.remove(reply)
                    return _raise_fault(reply)
            self._read(end, f"the answer to {message.TYPE}")

    def _send(self, message: Message, request_id: int, fds: Sequence[OwnedFd], end: float) -> None:
        try:
            payload = self._catalogue.encode(message, request_id)
            frame = encode_frame(payload, len(fds), self._catalogue.frame_bytes_max)
            rest, carried = memoryview(frame), fds
            while rest:
                try:
                    rest = rest[sockets.send(self._sock, rest, carried) :]
                    carried = ()
                except BlockingIOError as error:
                    if error.errno != errno.EAGAIN:
                        time.sleep(RETRY_S)  # the socket has room, the kernel has not
                    self._poll(select.POLLOUT, end, f"room to send {message.TYPE}")
                except OSError as error:
                    self._raise_final_fault()
                    raise _closed(error) from error
        finally:
            close_all(fds)

    def _raise_final_fault(self) -> None:
        """Raise the reason that a server may have sent before it closed the connection."""
        with contextlib.suppress(UnreachableError, WaitTimeoutError, ProtocolError):
            while True:
                self._read(time.monotonic(), "")
        for reply in self._pending:
            _raise_fault(reply)

    def _read(self, end: float, what: str) -> None:
        """Read until at least one more message is pending."""
        while True:
            try:
                data, fds = sockets.receive(self._sock)
            except BlockingIOError:
                self._poll(select.POLLIN, end, what)
                continue
            except OSError as error:
                raise _closed(error) from error
            if not data and not fds:
                raise _closed(None)
            replies = self._decode(self._decoder.receive(data, fds))
            self._pending.extend(replies)
            if replies:
                return

    def _decode(self, frames: list[Frame]) -> list[Reply]:
        try:
            replies = []
            for frame in frames:
                message, request_id = self._catalogue.decode(frame.payload, len(frame.fds))
                replies.append(Reply(message, frame.fds, request_id))
            return replies
        except ProtocolError:
            for frame in frames:
                close_all(frame.fds)
            raise

    def _poll(self, events: int, end: float, what: str) -> None:
        poll = select.poll()
        poll.register(self._sock.fileno(), events)
        rest_ms = (end - time.monotonic()) * 1000
        if rest_ms <= 0 or not poll.poll(max(1, rest_ms)):
            raise WaitTimeoutError("wire.timeout", f"timed out waiting for {what}")


def _closed(error: OSError | None) -> UnreachableError:
    why = "" if error is None else f": {error.strerror}"
    return UnreachableError("wire.closed", f"the peer closed the connection{why}")


def _raise_fault(reply: Reply) -> Reply:
    if isinstance(reply.message, FaultMsg):
        raise reply.message.to_error()
    return reply
