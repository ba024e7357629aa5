"""A server on a Unix socket: one per path, the owner's processes only, a bounded number of them.

The path is guarded by a flock on a file beside it, which also says who has it: a socket file alone
cannot tell a living server from a dead one's leftovers. The socket is 0600 from the moment it
exists (umask, not chmod afterwards) in a directory that is its owner's alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import stat

from understudy import __version__
from understudy.errors import ProtocolError, UnderstudyError, UsageError
from understudy.wire import sockets
from understudy.wire.connection import Connection, Handler
from understudy.wire.fds import OwnedFd
from understudy.wire.limits import (
    CONNECTIONS_MAX,
    CONNECTIONS_PER_PROCESS_MAX,
    FIRST_FRAME_DEADLINE_S,
    RETRY_S,
)
from understudy.wire.messages import Catalogue, Hello, Message, Welcome

# How many may wait to be accepted: everybody reconnects at once after a restart.
_BACKLOG = CONNECTIONS_MAX

GUARD_BYTES = 32  # `pid N` and spaces: written over what a dead server left, whatever its length


class PathGuard:
    """An exclusive flock beside a path, with the holder's pid written into it."""

    def __init__(self, guard_path: str, what: str) -> None:
        """Take the guard of `guard_path`, or say who has it.

        Raises:
            UnderstudyError: `wire.address_in_use`; `wire.no_guard`, the file cannot be had.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = OwnedFd(os.open(guard_path, flags, 0o600))
        except OSError as error:
            raise UnderstudyError(
                "wire.no_guard",
                f"{what} cannot be guarded against a second one: {guard_path}: {error.strerror};"
                " it must be a plain file in a directory that can be written to",
                path=guard_path,
            ) from error
        try:
            fcntl.flock(self._fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._fd.fileno(), 64, 0).decode(errors="replace").strip()
            self._fd.close()
            raise UnderstudyError(
                "wire.address_in_use",
                f"{what} is already running here: {holder or 'an unknown process'} has"
                f" {guard_path}; stop that one, or choose another --dir",
                holder=holder,
                path=guard_path,
            ) from error
        with contextlib.suppress(OSError):  # for people: a full disk must not stop a restart
            os.pwrite(self._fd.fileno(), f"pid {os.getpid()}".ljust(GUARD_BYTES).encode(), 0)

    def close(self) -> None:
        self._fd.close()


class Server:
    """Listens on `path`, answers `hello`, and hands every other message to `handler`."""

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
    ) -> None:
        self.path = path
        self.connections: set[Connection] = set()
        self._catalogue = catalogue
        self._handler = handler
        self._service = service
        self._guard_path = guard_path or f"{path.removesuffix('.sock')}.lock"
        self._connections_max = connections_max
        self._per_process_max = per_process_max
        self._guard: PathGuard | None = None
        self._sock: socket.socket | None = None
        self._silent: dict[Connection, asyncio.TimerHandle] = {}

    async def start(self) -> None:
        """Bind and listen.

        Raises:
            UnderstudyError: `wire.address_in_use`, another server has this path.
            UsageError: `wire.path_too_long`, `wire.directory`, `wire.not_a_socket`.
        """
        sockets.check_path(self.path)
        _check_directory(os.path.dirname(self.path) or ".")
        self._guard = PathGuard(self._guard_path, f"{self._service} on {self.path}")
        try:
            self._sock = _bind(self.path)
        except BaseException:
            self._guard.close()
            raise
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self._acceptable)

    async def close(self) -> None:
        """Stop listening, close every connection and give the path up."""
        if self._sock is None or self._guard is None:
            return
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        os.unlink(self.path)
        for conn in list(self.connections):
            conn.close(f"{self._service} is stopping")
        await asyncio.sleep(0)  # the handlers hear of it from the loop
        self._guard.close()
        self._sock = self._guard = None

    def _acceptable(self) -> None:
        assert self._sock is not None
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        try:
            conn = Connection(sock, self._catalogue, self)
        except OSError as error:  # its pidfd needed one descriptor more
            sock.close()
            self._pause(error)
            return
        if not conn.is_closed:
            self._admit(conn)

    def _pause(self, error: OSError) -> None:
        """Out of descriptors: the newcomers wait in the backlog until somebody leaves."""
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            raise error
        loop = asyncio.get_running_loop()
        assert self._sock is not None
        loop.remove_reader(self._sock.fileno())

        def resume() -> None:
            if self._sock is not None:
                loop.add_reader(self._sock.fileno(), self._acceptable)

        loop.call_later(RETRY_S, resume)

    def _admit(self, conn: Connection) -> None:
        if conn.peer.uid not in (os.geteuid(), 0):
            error = ProtocolError(
                "wire.forbidden",
                f"uid {conn.peer.uid} may not speak to {self._service}, which runs as uid"
                f" {os.geteuid()}; every part of a pod runs as one user",
            )
        elif len(self.connections) > self._connections_max:
            error = ProtocolError(
                "wire.too_many_connections",
                f"{self._service} has {self._connections_max} connections, which is its limit;"
                " close some (idle observers?) and try again",
            )
        elif self._of_process(conn.peer.pid) > self._per_process_max:
            error = ProtocolError(
                "wire.too_many_connections",
                f"pid {conn.peer.pid} has {self._per_process_max} connections to"
                f" {self._service}, which is the limit for one process; close some",
            )
        else:
            loop = asyncio.get_running_loop()
            self._silent[conn] = loop.call_later(FIRST_FRAME_DEADLINE_S, self._silence, conn)
            return
        conn.fault(error)

    def _of_process(self, pid: int) -> int:
        return sum(conn.peer.pid == pid for conn in self.connections) if pid else 0

    def _silence(self, conn: Connection) -> None:
        conn.fault(
            ProtocolError(
                "wire.first_frame_deadline",
                f"nothing was said within {FIRST_FRAME_DEADLINE_S:g} s of connecting",
            )
        )

    # ------------------------------------------------------------------ as the connections' handler

    def opened(self, conn: Connection) -> None:
        self.connections.add(conn)
        self._handler.opened(conn)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        timer = self._silent.pop(conn, None)
        if timer is not None:
            timer.cancel()
        if isinstance(message, Hello):
            conn.send(Welcome(self._service, os.getpid(), __version__), request_id)
        else:
            self._handler.received(conn, message, request_id, fds)

    def closed(self, conn: Connection, reason: str) -> None:
        timer = self._silent.pop(conn, None)
        if timer is not None:
            timer.cancel()
        self.connections.discard(conn)
        self._handler.closed(conn, reason)


def _check_directory(directory: str) -> None:
    try:
        found = os.stat(directory)
    except FileNotFoundError as error:
        raise UsageError(
            "wire.directory", f"the directory {directory} does not exist; make it, mode 0700"
        ) from error
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.geteuid():
        raise UsageError(
            "wire.directory",
            f"{directory} must belong to uid {os.geteuid()} alone (it is uid {found.st_uid}, mode"
            f" {stat.S_IMODE(found.st_mode):04o}); chmod 700 it or choose another --dir",
        )


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # a full backlog: somebody listens
        except OSError:
            return False
        return True


def _bind(path: str) -> socket.socket:
    """A listening socket at `path`. What a dead server left there is removed."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError(
                "wire.not_a_socket", f"{path} exists and is not a socket; move it out of the way"
            )
        if _answers(path):  # the guard is ours, so somebody has removed the one it had
            raise UnderstudyError(
                "wire.address_in_use",
                f"a server answers on {path} although its guard file was removed; stop it, or"
                " choose another --dir",
                path=path,
            )
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    try:
        sock.bind(path)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(umask)
    return sock
