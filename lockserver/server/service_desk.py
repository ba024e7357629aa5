"""The service sockets of all locks: lending copies, taking them back, watching the addresses.

All models are served at one address: the socket of `active` is that of each `active:<model>`.

A copy needs a descriptor. Where there is none, not even in the reserve, lending is repeated with
every tick: an engine without the socket could be granted the lock and not serve.

Owns the bookkeeping between connections and `ServiceSocket`s. Must not know why a lock is granted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lockserver.messages import ServiceMsg
from lockserver.server.service_socket import NO_ENGINE, NO_GATEWAY, ServiceSocket
from plumbing.errors import ProtocolError, is_shortage
from plumbing.pod.models import kind_of
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, Reserve, close_all


class ServiceDesk:
    """All service sockets of one server, by lock."""

    def __init__(
        self,
        addresses: Mapping[str, str],
        hold_ms: float,
        why_idle: Callable[[str], str],
        reserve: Reserve,
        *,
        has_gateway: bool = False,
    ) -> None:
        self.has_gateway = has_gateway  # then supervisors never accept: they keep copies
        describe, code = why_idle, NO_ENGINE
        if has_gateway:
            describe, code = _why_no_gateway, NO_GATEWAY
        self.sockets = {
            lock: ServiceSocket(lock, address, hold_ms, partial(describe, lock), code)
            for lock, address in addresses.items()
        }
        self._reserve = reserve
        self._handed_back: dict[int, set[str]] = {}  # by connection: it keeps copies of these
        # By name and connection: those that wait for a copy, and whether each is a gateway.
        self._unlent: dict[tuple[str, int], tuple[Connection, bool]] = {}

    def open(self, *, is_first_start: bool) -> None:
        """Bind what can be bound; engines have the rest, unless there were never any.

        Raises:
            UnderstudyError: `service.port_in_use`, `service.cannot_bind`.
        """
        for service in self.sockets.values():
            if not service.bind() and is_first_start:
                raise service.in_use()

    def take(self, conn: int, names: Sequence[str], fds: list[OwnedFd]) -> list[str]:
        """Take copies back after a restart of the server (takes `fds`); the names that were needed.

        Raises:
            ProtocolError: `lock.bad_service`.
        """
        try:
            if len(fds) != len(names):
                raise ProtocolError(
                    "lock.bad_service",
                    f"{len(names)} services were named, but {len(fds)} descriptors arrived",
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
        """Forget what this closed connection handed back, and what it was to get."""
        self._handed_back.pop(conn, None)
        for name in self.sockets:
            self._unlent.pop((name, conn), None)

    def lend_missing(self, conn: Connection) -> None:
        """Lend every socket to a supervisor."""
        for name in self.sockets:
            self._lend_or_confirm(name, conn, is_gateway=False)

    def lend_to_gateway(self, name: str, conn: Connection) -> None:
        self._lend_or_confirm(name, conn, is_gateway=True)

    def _lend_or_confirm(self, name: str, conn: Connection, *, is_gateway: bool) -> None:
        """Without a descriptor where this connection has just handed the socket back."""
        if name in self._handed_back.get(conn.id, ()):
            conn.send(self._message(name, is_gateway=is_gateway))
        else:
            self.lend(name, conn, is_gateway=is_gateway)

    def _message(self, name: str, *, is_gateway: bool) -> ServiceMsg:
        is_to_accept = is_gateway or not self.has_gateway
        return ServiceMsg(name, self.sockets[name].address, is_to_accept)

    def lend(self, name: str, conn: Connection, *, is_gateway: bool) -> None:
        """Send a copy to `conn` now, or as soon as there is a descriptor for it."""
        self._unlent.pop((name, conn.id), None)
        try:
            copy = self._reserve.help(self.sockets[name].copy)
        except OSError as error:
            if not is_shortage(error):
                raise
            self._unlent[name, conn.id] = conn, is_gateway
            return
        if copy is not None:
            conn.send(self._message(name, is_gateway=is_gateway), fds=[copy])

    def has_waiting(self, name: str) -> bool:
        """Whether a connection waits in the backlog of this socket now."""
        return self.sockets[name].has_waiting()

    def unlent(self, name: str) -> list[int]:
        """The connections that wait for a copy of this socket."""
        return [conn for each, conn in self._unlent if each == name]

    def _lend_again(self) -> None:
        for (name, _), (conn, is_gateway) in tuple(self._unlent.items()):
            self.lend(name, conn, is_gateway=is_gateway)

    def prepare(self, lock: str) -> None:
        """A grant of `lock` is about to be sent."""
        self._lend_again()
        service = self.sockets.get(kind_of(lock))
        if service is not None:
            service.prepare(is_acceptor_ready=not self.has_gateway)

    def watch(self, is_accepted: Callable[[str], bool], now_ms: float) -> list[str]:
        """Let time pass; the names of those whose address was bound meanwhile.

        `is_accepted`: whether an engine or a gateway may be accepting on the socket of a lock.
        """
        self._lend_again()
        away = self.away()
        for service in self.sockets.values():
            service.watch(is_accepted=is_accepted(service.lock), now_ms=now_ms)
        return [name for name in away if not self.sockets[name].is_away]

    def away(self) -> dict[str, tuple[str, str | None]]:
        """The address of each socket that is not here yet, and why."""
        return {k: (s.address, s.problem) for k, s in self.sockets.items() if s.is_away}

    def documents(self) -> dict[str, Any]:
        return {
            name: {"address": each.address, "state": each.state, "problem": each.problem}
            for name, each in self.sockets.items()
        }

    def close(self) -> None:
        for service in self.sockets.values():
            service.close()


def _why_no_gateway(lock: str) -> str:
    return "the gateway, which accepts requests, is not running; retry in a moment"
