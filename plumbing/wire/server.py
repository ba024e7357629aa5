"""Servers: a bounded number of connections, and a deadline for the first message of each.

`BaseServer` has what Unix sockets and TCP share. `Server` listens on a Unix socket: one per path,
for its owner's processes only. A flock on a file beside the path guards it and holds the server's
pid, because the socket file alone cannot tell a running server from one that died. The socket is
0600 from the moment it exists (umask, not chmod afterwards), in a directory that only its owner can
access (`plumbing.pod.paths.runtime_dir`).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import fcntl
import os
import socket
import stat
import time
from typing import Any

from plumbing.errors import ProtocolError, UnderstudyError, UsageError, is_shortage
from plumbing.wire import sockets
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd
from plumbing.wire.limits import CONNECTIONS_MAX, CONNECTIONS_PER_PEER_MAX, RETRY_S
from plumbing.wire.messages import Catalogue, Message
from plumbing.wire.sockets import no_descriptors


class BaseServer(abc.ABC):
    """Accepts connections and passes every message to `handler`."""

    def __init__(
        self,
        catalogue: Catalogue,
        handler: Handler,
        service: str,
        connections_max: int = CONNECTIONS_MAX,
        per_peer_max: int = CONNECTIONS_PER_PEER_MAX,
    ) -> None:
        self.connections: set[Connection] = set()
        self._catalogue = catalogue
        self._handler = handler
        self._service = service
        self._connections_max, self._per_peer_max = connections_max, per_peer_max
        self.problem: str | None = None  # why no new connection is accepted
        self._sock: socket.socket | None = None

    @abc.abstractmethod
    def _accepted(self, sock: socket.socket, name: Any) -> None:
        """Make a connection of `sock`; `name` is the address of its other end. After an `OSError`
        `sock` is closed and accepting pauses."""

    def _refusal(self, conn: Connection) -> ProtocolError | None:
        """Why `conn` cannot be kept; the other connections include it already."""
        origin = conn.peer.origin
        if len(self.connections) > self._connections_max:
            why = (
                f"{self._service} has {self._connections_max} connections, its limit; close some"
                " (idle observers?) and try again"
            )
        elif origin and self._count_of(origin) > self._per_peer_max:
            why = (
                f"{origin} has {self._per_peer_max} connections to {self._service}, the limit for"
                " one peer; close some"
            )
        else:
            return None
        return ProtocolError("wire.too_many_connections", why)

    def _count_of(self, origin: str) -> int:
        return sum(each.peer.origin == origin for each in self.connections)

    def listen(self, sock: socket.socket) -> None:
        """Own `sock`, a listening socket, and start accepting."""
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._acceptable)

    def _stop_listening(self) -> None:
        assert self._sock is not None
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        self._sock = None

    async def _close_connections(self) -> None:
        for conn in list(self.connections):
            conn.close(f"{self._service} is stopping")
        await asyncio.sleep(0)  # the loop calls the handlers' `closed`

    def _acceptable(self) -> None:
        """Accept one connection, if there is one and room for it."""
        assert self._sock is not None
        try:
            sock, name = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            self.problem = None  # the kernel takes a descriptor before it looks: there is one
            return
        except OSError as error:
            self._pause(error)
            return
        try:
            self._accepted(sock, name)
        except OSError as error:  # it needed another descriptor
            sock.close()
            self._pause(error)
        else:
            self.problem = None

    def _pause(self, error: OSError) -> None:
        """Out of descriptors or memory: new connections wait in the backlog."""
        if not is_shortage(error):
            raise error
        self.problem = no_descriptors("accept new connections", error).message
        loop = asyncio.get_running_loop()
        assert self._sock is not None
        loop.remove_reader(self._sock.fileno())

        def resume() -> None:
            if self._sock is not None:
                loop.add_reader(self._sock.fileno(), self._acceptable)
                self._acceptable()  # also if none waits any more: is there room again?

        loop.call_later(RETRY_S, resume)

    def opened(self, conn: Connection) -> None:
        self.connections.add(conn)
        self._handler.opened(conn)
        if (refusal := self._refusal(conn)) is not None:
            conn.fault(refusal)
        else:
            conn.expect_message()

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        self._handler.received(conn, message, request_id, fds)

    def closed(self, conn: Connection, reason: str) -> None:
        self.connections.discard(conn)
        self._handler.closed(conn, reason)


LOOKS, LOOK_S = 5, 0.002  # `guard_holder` locks a guard for microseconds
GUARD_BYTES = 32  # `pid N`, padded: overwrites what a dead server wrote


class PathGuard:
    """An exclusive flock beside a path, with the holder's pid written into it."""

    def __init__(self, guard_path: str, what: str, elsewhere: str = "--dir") -> None:
        """Lock `guard_path` for `what`, which the errors name, with the flags for another path.

        Raises:
            UnderstudyError: `wire.address_in_use`, with the holder; `wire.no_guard`: the file
                cannot be created or opened.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = OwnedFd(os.open(guard_path, flags, 0o600))
        except OSError as error:
            raise UnderstudyError(
                "wire.no_guard",
                f"{what} cannot open its lock file {guard_path}: {error.strerror}; it must be a"
                " regular file in a writable directory",
                path=guard_path,
            ) from error
        try:
            _take(self._fd.fileno())
        except BlockingIOError as error:
            holder = os.pread(self._fd.fileno(), 64, 0).decode(errors="replace").strip()
            self._fd.close()
            raise UnderstudyError(
                "wire.address_in_use",
                f"{what} is already running: {holder or 'an unknown process'} holds"
                f" {guard_path}; stop it, or choose another {elsewhere}",
                holder=holder,
                path=guard_path,
            ) from error
        with contextlib.suppress(OSError):  # informational: a full disk must not stop a restart
            os.pwrite(self._fd.fileno(), f"pid {os.getpid()}".ljust(GUARD_BYTES).encode(), 0)

    def close(self) -> None:
        self._fd.close()

    def is_at(self, guard_path: str) -> bool:
        """Whether the file at `guard_path` is still the one that we hold."""
        found = os.fstat(self._fd.fileno())
        return identity_of(guard_path) == (found.st_dev, found.st_ino)


def _take(fd: int) -> None:
    """The exclusive flock, also while `guard_holder` looks.

    Raises:
        BlockingIOError: another process holds it.
    """
    left = LOOKS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            left -= 1
            if not left:
                raise
        time.sleep(LOOK_S)


def guard_holder(guard_path: str) -> str | None:
    """`pid 17` of the process that holds this guard, as it has written it; None if none does."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = OwnedFd(os.open(guard_path, flags))
    except OSError:
        return None
    with contextlib.closing(fd):
        try:
            fcntl.flock(fd.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(fd.fileno(), 64, 0).decode(errors="replace").strip() or "a process"
        return None


class Server(BaseServer):
    """Listens on `path` and passes every message to `handler`."""

    def __init__(
        self,
        path: str,
        catalogue: Catalogue,
        handler: Handler,
        *,
        service: str,
        connections_max: int = CONNECTIONS_MAX,
        per_peer_max: int = CONNECTIONS_PER_PEER_MAX,
        elsewhere: str = "--dir",
    ) -> None:
        """`elsewhere`: the flags that choose another path."""
        super().__init__(catalogue, handler, service, connections_max, per_peer_max)
        self.path, self._elsewhere = path, elsewhere
        self._guard_path = f"{path.removesuffix('.sock')}.lock"
        self._guard: PathGuard | None = None
        self._bound: tuple[int, int] | None = None  # identity of our socket file

    async def start(self) -> None:
        """Bind and listen.

        Raises:
            UnderstudyError: `wire.address_in_use`: another server has this path.
            UsageError: `wire.path_too_long`, `wire.not_a_socket`.
        """
        sockets.check_path(self.path)
        what = f"{self._service} on {self.path}"
        self._guard = PathGuard(self._guard_path, what, self._elsewhere)
        try:
            sock = _bind(self.path, self._connections_max)
            self._bound = identity_of(self.path)
            self.listen(sock)
        except BaseException:
            self._guard.close()
            raise

    def check_path(self) -> None:
        """Call this periodically: nothing else reveals that guard or socket were removed or
        replaced, since existing connections are not affected.

        Raises:
            UnderstudyError: `wire.path_replaced`: no client can connect any more, or another server
                may be here. This one must end; the next one makes both anew.
            OSError: there is no memory to look.
        """
        assert self._guard is not None
        if not self._guard.is_at(self._guard_path) or identity_of(self.path) != self._bound:
            raise UnderstudyError(
                "wire.path_replaced",
                f"{self.path} or {self._guard_path} was removed or replaced while {self._service}"
                " was running; it ends, and the next one that starts here makes both anew",
                path=self.path,
            )

    async def close(self) -> None:
        """Stop listening, close every connection and release the path."""
        if self._sock is None or self._guard is None:
            return
        self._stop_listening()
        with contextlib.suppress(OSError):  # then the next server removes it
            if identity_of(self.path) == self._bound:  # it may have been replaced
                os.unlink(self.path)
        await self._close_connections()
        self._guard.close()
        self._guard = None

    def _accepted(self, sock: socket.socket, name: object) -> None:
        Connection(sock, self._catalogue, self)

    def _refusal(self, conn: Connection) -> ProtocolError | None:
        if conn.peer.uid in (os.geteuid(), 0):
            return super()._refusal(conn)
        return ProtocolError(
            "wire.forbidden",
            f"uid {conn.peer.uid} may not connect to {self._service}, which runs as uid"
            f" {os.geteuid()}; every part of a pod must run as the same user",
        )


def identity_of(path: str) -> tuple[int, int] | None:
    """Device and inode of the file at `path`, if there is one; OSError: no memory to look."""
    try:
        found = os.lstat(path)
    except OSError as error:
        if is_shortage(error):
            raise
        return None
    return found.st_dev, found.st_ino


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # a full backlog: a server is listening
        except OSError:
            return False
        return True


def _bind(path: str, backlog: int) -> socket.socket:
    """A listening socket at `path`, in place of the socket of a dead server.

    `backlog` is how many may wait to be accepted: after a restart, all clients connect at once.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError(
                "wire.not_a_socket", f"{path} exists and is not a socket; move it elsewhere"
            )
        if _answers(path):  # we hold the guard, so that server's guard file was removed
            raise UnderstudyError(
                "wire.address_in_use",
                f"another server is listening on {path}, and its lock file was removed; stop that"
                " server, or choose another --dir",
                path=path,
            )
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    try:
        sock.bind(path)
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(umask)
    return sock
