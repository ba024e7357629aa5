"""A server on a Unix socket: one per path, for its owner's processes only, and a bounded number.

The path is guarded by a flock on a file beside it, which also holds the server's pid: the socket
file alone cannot tell a running server from one that died. The socket is 0600 from the moment it
exists (umask, not chmod afterwards), in a directory that only its owner can access.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time

from plumbing.errors import ProtocolError, UnderstudyError, UsageError
from plumbing.shortage import is_shortage
from plumbing.wire import sockets
from plumbing.wire.base_server import BaseServer
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd
from plumbing.wire.limits import CONNECTIONS_MAX, CONNECTIONS_PER_PROCESS_MAX
from plumbing.wire.messages import Catalogue
from plumbing.wire.unix_connection import UnixConnection

LOOKS, LOOK_S = 5, 0.002  # `guard_holder` locks a guard for microseconds
GUARD_BYTES = 32  # `pid N`, padded: overwrites what a dead server wrote


class PathGuard:
    """An exclusive flock beside a path, with the holder's pid written into it."""

    def __init__(self, guard_path: str, what: str) -> None:
        """Lock `guard_path` for `what`, which the errors name.

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
                f" {guard_path}; stop it, or choose another --dir",
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
        return _identity(guard_path) == (found.st_dev, found.st_ino)


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
    """Listens on `path`, answers `hello`, and passes every other message to `handler`."""

    def __init__(
        self,
        path: str,
        catalogue: Catalogue,
        handler: Handler,
        *,
        service: str,
        guard_path: str | None = None,
        connections_max: int = CONNECTIONS_MAX,
        per_process_max: int = CONNECTIONS_PER_PROCESS_MAX,
        spare_fds: int = 0,
    ) -> None:
        super().__init__(catalogue, handler, service, connections_max, spare_fds)
        self.path = path
        self._guard_path = guard_path or f"{path.removesuffix('.sock')}.lock"
        self._per_process_max = per_process_max
        self._guard: PathGuard | None = None
        self._bound: tuple[int, int] | None = None  # identity of our socket file

    async def start(self) -> None:
        """Bind and listen.

        Raises:
            UnderstudyError: `wire.address_in_use`: another server has this path.
            UsageError: `wire.path_too_long`, `wire.directory`, `wire.not_a_socket`.
        """
        sockets.check_path(self.path)
        _check_directory(os.path.dirname(self.path) or ".")
        self._guard = PathGuard(self._guard_path, f"{self._service} on {self.path}")
        try:
            self._listen_at_path(_bind(self.path, self._connections_max))
        except BaseException:
            self._guard.close()
            raise

    def _listen_at_path(self, sock: socket.socket) -> None:
        self._bound = _identity(self.path)
        self._listen(sock)

    def reclaim_guard(self) -> str | None:
        """Recreate the guard file if it was removed or replaced; its path if so.

        Call this and `reclaim_socket` periodically: nothing else reveals that a file is gone, since
        existing connections are not affected.

        Raises:
            UnderstudyError: `wire.address_in_use`: another server has it now; `wire.no_guard`.
        """
        assert self._guard is not None
        if self._guard.is_at(self._guard_path):
            return None
        guard = PathGuard(self._guard_path, f"{self._service} on {self.path}")
        self._guard.close()
        self._guard = guard
        return self._guard_path

    def reclaim_socket(self) -> str | None:
        """Listen at the path again if its socket was removed or replaced; the path if so.

        Connections in the old backlog are accepted.

        Raises:
            UnderstudyError: as for `start`.
            OSError: no space, no permission.
        """
        if _identity(self.path) == self._bound:
            return None
        sock = _bind(self.path, self._connections_max)
        self._accept_all()
        self._stop_listening()
        self._listen_at_path(sock)
        return self.path

    async def close(self) -> None:
        """Stop listening, close every connection and release the path."""
        if self._sock is None or self._guard is None:
            return
        self._stop_listening()
        with contextlib.suppress(OSError):  # then the next server removes it
            if _identity(self.path) == self._bound:  # it may have been replaced
                os.unlink(self.path)
        await self._close_connections()
        self._guard.close()
        self._guard = None

    def _accepted(self, sock: socket.socket, name: object) -> None:
        conn = UnixConnection(sock, self._catalogue, self)
        if conn.is_closed:
            return
        if conn.peer.uid in (os.geteuid(), 0):
            self._admit(conn)
            return
        conn.fault(
            ProtocolError(
                "wire.forbidden",
                f"uid {conn.peer.uid} may not connect to {self._service}, which runs as uid"
                f" {os.geteuid()}; every part of a pod must run as the same user",
            )
        )

    def _over_quota(self, conn: Connection) -> str | None:
        pid = conn.peer.pid
        if not pid or sum(c.peer.pid == pid for c in self.connections) <= self._per_process_max:
            return None
        return (
            f"pid {pid} has {self._per_process_max} connections to {self._service}, the limit for"
            " one process; close some"
        )


def _identity(path: str) -> tuple[int, int] | None:
    """Device and inode of the file at `path`, if there is one; OSError: no memory to look."""
    try:
        found = os.lstat(path)
    except OSError as error:
        if is_shortage(error):
            raise
        return None
    return found.st_dev, found.st_ino


def _check_directory(directory: str) -> None:
    try:
        found = os.stat(directory)
    except FileNotFoundError as error:
        raise UsageError(
            "wire.directory", f"the directory {directory} does not exist; create it with mode 0700"
        ) from error
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.geteuid():
        raise UsageError(
            "wire.directory",
            f"{directory} has uid {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}, and"
            f" must have uid {os.geteuid()} and mode 0700; run `chmod 700 {directory}`, or choose"
            " another --dir",
        )


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
