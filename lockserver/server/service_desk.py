"""Who has a copy of which service socket: lending, taking back, watching all of them.

Owns the bookkeeping between connections and `ServiceSocket`s. Must not know why a lock is granted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lockserver.core.lock import Lock
from lockserver.messages import ServiceMsg
from lockserver.server.service_socket import AWAY, ServiceSocket
from plumbing.errors import ProtocolError
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all


class ServiceDesk:
    """All service sockets of one server, by lock."""

    def __init__(
        self, addresses: Mapping[str, str], hold_ms: float, why_idle: Callable[[str], str]
    ) -> None:
        self.sockets = {
            lock: ServiceSocket(lock, address, hold_ms, partial(why_idle, lock))
            for lock, address in addresses.items()
        }
        self._handed_back: dict[int, set[str]] = {}  # by connection: it keeps copies of these

    def open(self, *, is_first_start: bool) -> None:
        """Bind what can be bound; the rest is with the engines, unless there were never any.

        Raises:
            UnderstudyError: `service.port_in_use`, `service.cannot_bind`.
        """
        for service in self.sockets.values():
            if not service.bind() and is_first_start:
                raise service.in_use()

    def take(self, conn: int, names: Sequence[str], fds: list[OwnedFd]) -> list[str]:
        """Take what comes back after a restart of the server (takes `fds`); which were needed.

        Raises:
            ProtocolError: `lock.bad_service`.
        """
        try:
            if len(fds) != len(names):
                raise ProtocolError(
                    "lock.bad_service",
                    f"{len(names)} services were named and {len(fds)} descriptors came",
                )
            known = [
                (name, fd) for name, fd in zip(names, fds, strict=True) if name in self.sockets
            ]
            needed = [name for name, fd in known if self.sockets[name].take(fd)]
            self._handed_back.setdefault(conn, set()).update(names)
            return needed
        finally:
            close_all(fds)

    def left(self, conn: int) -> None:
        """The connection is closed: it has handed nothing back any more."""
        self._handed_back.pop(conn, None)

    def lend_what_it_lacks(self, conn: Connection) -> None:
        """Lend every socket that did not just come from there."""
        for name in self.sockets:
            if name not in self._handed_back.get(conn.id, ()):
                self.lend(name, conn)

    def lend(self, name: str, conn: Connection) -> None:
        copy = self.sockets[name].copy()
        if copy is not None:
            conn.send(ServiceMsg(name, self.sockets[name].address), fds=[copy])

    def prepare(self, lock: str) -> None:
        """A grant of `lock` is about to be sent."""
        if lock in self.sockets:
            self.sockets[lock].prepare()

    def watch(self, locks: Mapping[str, Lock], now_ms: float) -> list[str]:
        """Let time pass; the names of those whose address has become ours meanwhile."""
        away = [name for name, service in self.sockets.items() if service.state == AWAY]
        for service in self.sockets.values():
            service.watch(may_serve=locks[service.lock].may_serve, now_ms=now_ms)
        return [name for name in away if self.sockets[name].state != AWAY]

    def documents(self) -> dict[str, Any]:
        return {
            name: {"address": each.address, "state": each.state, "problem": each.problem}
            for name, each in self.sockets.items()
        }

    def close(self) -> None:
        for service in self.sockets.values():
            service.close()
