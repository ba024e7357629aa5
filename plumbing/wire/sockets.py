"""The two system calls of the wire, for the event loop and the blocking client alike.

Neither blocks, whatever the socket's own flags are (MSG_DONTWAIT): nothing here ever changes the
flags of an open file, which other processes may share.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import time
from collections.abc import Sequence

from plumbing.errors import ProtocolError, UnreachableError, UsageError, explain_shortage
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import FDS_PER_FRAME_MAX

# One recvmsg. Larger than almost every frame, so that a frame costs one system call.
RECEIVE_BYTES = 64 * 1024
# struct sockaddr_un: sun_path is 108 bytes with its terminator (man 7 unix).
SOCKET_PATH_BYTES_MAX = 107
_SCM_MAX_FD = 253  # the kernel's own limit: room for everything it can deliver
_ANCILLARY_BYTES = socket.CMSG_SPACE(_SCM_MAX_FD * array.array("i").itemsize)
# Plain numbers: an operation on enum members is a dozen calls, and this is done per message.
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_CTRUNC = int(socket.MSG_CTRUNC)
# What a full socket does not raise: the kernel has too many descriptors in flight (man 7 unix), or
# no memory for another message. Both are temporary.
_KERNEL_BUSY = frozenset({errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM})


def receive(sock: socket.socket) -> tuple[bytes, list[OwnedFd]]:
    """Whatever has arrived: bytes (`b""` at the end of the stream) and descriptors.

    Raises:
        BlockingIOError: nothing has arrived.
        ProtocolError: `wire.truncated_fds`: descriptors were lost because this process has no
            room for them; the others have been closed.
    """
    data, ancillary, flags, _ = sock.recvmsg(RECEIVE_BYTES, _ANCILLARY_BYTES, _RECEIVE_FLAGS)
    fds: list[OwnedFd] = []
    foreign = False
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(raw[: len(raw) - len(raw) % numbers.itemsize])
            fds.extend(OwnedFd(number) for number in numbers)
        else:
            foreign = True
    if flags & _CTRUNC or foreign:
        close_all(fds)
        raise ProtocolError(
            "wire.truncated_fds",
            f"received descriptors were lost: {explain_shortage(errno.EMFILE)}",
        )
    return data, fds


def send(sock: socket.socket, data: memoryview, fds: Sequence[OwnedFd]) -> int:
    """Send what fits; the number of bytes taken. `fds` (borrowed) go with the first byte.

    Raises:
        BlockingIOError: temporary. EAGAIN: the peer reads too slowly, poll for room; any other
            errno: the kernel is busy, no poll shows the end of it.
    """
    ancillary = []
    if fds:
        numbers = array.array("i", [fd.fileno() for fd in fds])
        assert len(numbers) <= FDS_PER_FRAME_MAX
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
    try:
        return sock.sendmsg([data], ancillary, _SEND_FLAGS)
    except OSError as error:
        if error.errno in _KERNEL_BUSY:
            raise BlockingIOError(error.errno, os.strerror(error.errno)) from error
        raise


def check_path(path: str) -> None:
    """Refuse a socket path that is too long for the kernel.

    Raises:
        UsageError: `wire.path_too_long`.
    """
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise UsageError(
            "wire.path_too_long",
            f"the socket path {path} has {length} bytes, and the kernel allows at most"
            f" {SOCKET_PATH_BYTES_MAX}; use a shorter --dir",
        )


def dial(path: str, end_s: float) -> socket.socket | None:
    """A socket that is connected to the server at `path`, and does not block. None: the server's
    backlog is full (man 2 connect), so try again, until `end_s` (`time.monotonic`) has passed.

    Raises:
        UnreachableError: `wire.unreachable`, with the reason; `wire.no_descriptors`: this process
            is at its limit of open files.
    """
    check_path(path)
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise no_descriptors(f"open a socket to {path}", error) from error
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        if isinstance(error, BlockingIOError) and time.monotonic() <= end_s:
            return None
        raise unreachable(path, error) from error
    return sock


def no_descriptors(what: str, error: OSError) -> UnreachableError:
    """The error for `what`, which could not be done for lack of a descriptor, a process or a
    thread. It can be retried."""
    why = explain_shortage(error.errno) if error.errno else str(error)
    return UnreachableError("wire.no_descriptors", f"cannot {what}: {why}")


def unreachable(path: str, error: OSError) -> UnreachableError:
    """The error for a server that cannot be reached at `path`."""
    if isinstance(error, FileNotFoundError):
        why = "there is no such socket; is its process running, and with this --dir?"
    elif isinstance(error, ConnectionRefusedError):
        why = "no server is listening on the socket; it has died or is restarting"
    elif isinstance(error, PermissionError):
        why = "permission denied; every part of a pod must run as the same user"
    else:
        why = os.strerror(error.errno) if error.errno else str(error)
    return UnreachableError("wire.unreachable", f"cannot reach {path}: {why}", path=path)
