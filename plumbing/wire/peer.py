"""The peer of a connection: on a Unix socket its uid, pid and a pidfd, which is never recycled.

`SO_PEERPIDFD` (Linux 6.5) identifies the process that connected, even across PID namespaces, where
`SO_PEERCRED` reports pid 0. On older kernels, `pidfd_open` of a visible pid is right unless the pid
was recycled in between. Over TCP the peer has the name in its certificate, or its address.

`ProcessWatch` reports each peer's process once, when it has ended.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from plumbing.wire.fds import OwnedFd

SO_PEERPIDFD = 77  # include/uapi/asm-generic/socket.h
NO_UID = -1
_UCRED = struct.Struct("iII")  # struct ucred: pid, uid, gid (man 7 unix)


@dataclass
class Peer:
    """The process that connected. `pid` is 0 where its PID namespace is not visible. Over TCP,
    `pid` is 0, `uid` is `NO_UID`, and `name` identifies the peer."""

    uid: int
    pid: int
    pidfd: OwnedFd | None
    pidfd_source: str  # "SO_PEERPIDFD", "pidfd_open" or "none"
    name: str = ""
    host: str = ""  # over TCP: the address that it connects from

    @property
    def origin(self) -> str:
        """What its connections are counted by; "" if that is not known."""
        return self.host or (f"pid {self.pid}" if self.pid else "")

    def close(self) -> None:
        if self.pidfd is not None:
            self.pidfd.close()
            self.pidfd = None

    def __str__(self) -> str:
        return self.name or f"pid {self.pid}"


def identify(sock: socket.socket) -> Peer:
    """Ask the kernel which process connected `sock` (borrowed)."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        os.set_inheritable(pidfd, False)
        return Peer(uid, pid, OwnedFd(pidfd), "SO_PEERPIDFD")
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EINVAL, errno.ESRCH, errno.ENODATA):
            raise
    if pid > 0:
        try:
            return Peer(uid, pid, OwnedFd(os.pidfd_open(pid)), "pidfd_open")
        except OSError as error:
            if error.errno not in (errno.ESRCH, errno.ENOSYS, errno.EINVAL):
                raise
    return Peer(uid, pid, None, "none")


def is_gone(pidfd: int) -> bool:
    """Whether the process behind `pidfd` (borrowed) has ended (man 2 pidfd_open: POLLIN)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class ProcessWatch:
    """Calls `on_gone(key)` once when the process behind its pidfd has exited."""

    def __init__(self, on_gone: Callable[[str], None]) -> None:
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[str, OwnedFd] = {}

    def watch(self, key: str, peer: Peer) -> None:
        """Watch the peer's pidfd (takes it), if it has one, instead of the last one."""
        pidfd, peer.pidfd = peer.pidfd, None
        if pidfd is None:
            return
        self.forget(key)
        self._pidfds[key] = pidfd
        self._loop.add_reader(pidfd.fileno(), self._readable, key)

    def watches(self, key: str) -> bool:
        """Whether the end of this process will be told."""
        return key in self._pidfds

    def look(self, key: str) -> None:
        """Check now: its connection has closed, which usually means that the process has exited."""
        pidfd = self._pidfds.get(key)
        if pidfd is not None and is_gone(pidfd.fileno()):
            self._readable(key)

    def forget(self, key: str) -> None:
        """Stop watching; harmless if it is not watched."""
        pidfd = self._pidfds.pop(key, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd.fileno())
            pidfd.close()

    def close(self) -> None:
        for key in tuple(self._pidfds):
            self.forget(key)

    def _readable(self, key: str) -> None:
        self.forget(key)
        self._on_gone(key)
