"""The listening sockets that belong to locks: bound here, lent, answered while no gateway accepts.

`ServiceSocket` is one. The surprising things:

- Every copy is the same socket: O_NONBLOCK, the backlog and `listen` are shared, and one `shutdown`
  anywhere would end it for all.
- While any copy lives, the address cannot be bound again. So a restarted server that finds it in
  use waits for a gateway or a supervisor to hand its copy back, and never uses SO_REUSEPORT, which
  would give half of the connections to a backlog that no process serves.
- Without descriptors or memory nothing here fails for good: `watch` tries again with every tick.

`ServiceDesk` has those of all locks: it lends copies, takes them back and watches the addresses.
A gateway accepts from its copy; supervisors keep theirs to hand it back. All models are served at
one address: the socket of `active` is that of each `active:<model>`. A copy needs a descriptor.
Where there is none, not even in the reserve, lending is repeated with every tick. It must not know
why a lock is granted.
"""

from __future__ import annotations

import asyncio
import errno
import json
import select
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lockserver.messages import ServiceMsg
from plumbing.errors import ProtocolError, UnderstudyError, UsageError, is_shortage
from plumbing.service import procfs
from plumbing.service.process import strangers_max
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, Reserve, close_all
from plumbing.wire.sockets import no_descriptors

BACKLOG = 4096  # net.core.somaxconn's default: connections made during a failover wait here
HELD_MAX = 256  # connections answered at once, or our share; more wait in the backlog
REQUEST_BYTES_MAX = 16 * 1024  # of a request's head; a longer one is answered all the same
REQUEST_DEADLINE_S = 5.0  # to send a request's head
LINGER_S = 1.0  # to read the rest of the request, else the answer would be lost in a reset
RETRY_AFTER_S = 1  # a takeover takes milliseconds, a relaunch seconds
REBIND_MS = 1000.0

NO_GATEWAY = "no_gateway"  # the code of a 503, and why
WHY = "the gateway, which accepts requests, is not running; retry in a moment"
LENT, HOLDING, AWAY = STATES = ("lent", "holding", "waiting_for_hand_back")


class ServiceSocket:
    """One service address. `watch` is called with every tick."""

    def __init__(self, lock: str, address: str, hold_ms: float) -> None:
        self.lock = lock
        self.address = address
        self.problem: str | None = None
        self.is_taken = False  # another process has the address
        self._family, self._sockaddr = _resolve(address)
        self._hold_ms = hold_ms
        self._sock: socket.socket | None = None
        self._idle_since_ms: float | None = None
        self._rebind_ms = 0.0
        self._is_holding = False
        self._callers: set[_Caller] = set()
        self._callers_max = strangers_max(HELD_MAX)

    @property
    def state(self) -> str:
        if self._sock is None:
            return AWAY
        return HOLDING if self._is_holding else LENT

    @property
    def is_away(self) -> bool:
        """Whether it is not bound here: a borrower has it, a stranger, or nobody."""
        return self._sock is None

    def bind(self) -> bool:
        """Bind and listen; False while another process has the address.

        Raises:
            UsageError: `service.cannot_bind`, not an address of this machine, or refused.
            UnreachableError: `wire.no_descriptors`: it can be retried.
        """
        self.is_taken = False
        try:
            sock = self._listener()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                self.is_taken, self.problem = True, self.in_use().message
                return False
            if is_shortage(error):
                raise no_descriptors(f"listen on {self.address}", error) from error
            raise UsageError(
                "service.cannot_bind",
                f"cannot listen on {self.address}: {error.strerror}; choose another address with"
                f" --service {self.lock}=HOST:PORT",
            ) from error
        self._adopt(sock)
        return True

    def _listener(self) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(self._sockaddr)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock

    def in_use(self) -> UnderstudyError:
        """Which process has the address, as an error with the fix."""
        pid = procfs.listener_pid(self._sockaddr[1])
        holder = (
            f"pid {pid} ({procfs.name(pid)})" if pid else "a process that is not visible from here"
        )
        return UnderstudyError(
            "service.port_in_use",
            f"{self.address} is in use by {holder}; if that is not an engine of this pod, stop it"
            f" or choose another address with --service {self.lock}=HOST:PORT",
            address=self.address,
            pid=pid,
        )

    def take(self, fd: OwnedFd) -> bool:
        """Take a copy that a borrower hands back; True if it was needed.

        Raises:
            ProtocolError: `lock.bad_service`, not the listening socket of this address.
        """
        try:
            sock = socket.socket(fileno=fd.fileno())
        except OSError as error:
            fd.close()
            raise ProtocolError(
                "lock.bad_service", f"the descriptor handed back for {self.lock} is not a socket"
            ) from error
        fd.detach()  # the socket has it now
        try:
            is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not is_listening or sock.getsockname()[:2] != self._sockaddr[:2]:
                raise ProtocolError(
                    "lock.bad_service",
                    f"the socket handed back for {self.lock} does not listen on {self.address}",
                )
        except BaseException:
            sock.close()
            raise
        if self._sock is not None:
            sock.close()
            return False
        self._adopt(sock)
        return True

    def copy(self) -> OwnedFd | None:
        """A copy to lend, unless the socket is away; OSError: no descriptor for one."""
        return None if self._sock is None else OwnedFd(self._sock.dup().detach())

    def has_waiting(self) -> bool:
        """Whether a connection that nobody has accepted waits in the backlog now."""
        if self._sock is None:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def watch(self, *, is_accepted: bool, now_ms: float) -> None:
        """Start or stop answering, by the time and by whether a gateway accepts; retry to bind."""
        if self._sock is None and now_ms >= self._rebind_ms:
            self._rebind_ms = now_ms + REBIND_MS
            try:
                self.bind()
            except UnderstudyError as error:
                self.problem = error.message
        if is_accepted:
            self._stop_holding()
            self._idle_since_ms = None
            return
        if self._idle_since_ms is None:
            self._idle_since_ms = now_ms
        if now_ms - self._idle_since_ms >= self._hold_ms:
            self._hold()

    def close(self) -> None:
        self._stop_holding()
        for caller in tuple(self._callers):
            caller.close()
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    # ------------------------------------------------------------------ answering

    def _adopt(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock, self.problem, self.is_taken = sock, None, False

    def _hold(self) -> None:
        has_room = len(self._callers) < self._callers_max
        if not self._is_holding and self._sock is not None and has_room:
            self._is_holding = True
            asyncio.get_running_loop().add_reader(self._sock.fileno(), self._accept)

    def _stop_holding(self) -> None:
        if self._is_holding and self._sock is not None:
            self._is_holding = False
            asyncio.get_running_loop().remove_reader(self._sock.fileno())

    def _accept(self) -> None:
        assert self._sock is not None
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptor left: it stays in the backlog
            self._stop_holding()
            return
        self._callers.add(_Caller(sock, self._answer, self._callers.discard))
        if len(self._callers) >= self._callers_max:
            self._stop_holding()  # `watch` begins again when there is room, at the next tick

    def _answer(self) -> bytes:
        error = {
            "message": WHY,
            "type": "service_unavailable",
            "param": None,
            "code": NO_GATEWAY,
        }
        body = json.dumps({"error": error}).encode() + b"\n"
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: {RETRY_AFTER_S}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + body


class _Caller:
    """One connection that gets a 503: read the head, answer, read on until it ends."""

    def __init__(
        self, sock: socket.socket, answer: Callable[[], bytes], done: Callable[[_Caller], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._answer = answer
        self._done = done
        self._head = b""
        self._is_answered = False
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)
        self._timer = self._loop.call_later(REQUEST_DEADLINE_S, self._finish)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(REQUEST_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
        elif not self._is_answered:
            self._head += data
            if b"\r\n\r\n" in self._head or len(self._head) >= REQUEST_BYTES_MAX:
                self._finish()

    def _finish(self) -> None:
        if self._is_answered:
            self.close()
            return
        self._is_answered = True
        self._timer.cancel()
        try:
            self._sock.send(self._answer())  # some hundred bytes: a fresh socket takes them whole
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
            return
        self._timer = self._loop.call_later(LINGER_S, self.close)

    def close(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._done(self)


def parse_service(text: str) -> tuple[str, str]:
    """`active=127.0.0.1:8000` → ("active", "127.0.0.1:8000"); ValueError says what is wrong."""
    lock, _, address = text.partition("=")
    host, _, port = address.rpartition(":")
    if not lock or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("it must be LOCK=HOST:PORT, such as active=127.0.0.1:8000")
    return lock, address


def _resolve(address: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise UsageError(
            "service.cannot_bind", f"{host} is not an address of this machine: {error.strerror}"
        ) from error
    family, _, _, _, sockaddr = found[0]
    return family, (str(sockaddr[0]), int(sockaddr[1]))


class ServiceDesk:
    """All service sockets of one server, by lock."""

    def __init__(
        self,
        addresses: Mapping[str, str],
        hold_ms: float,
        reserve: Reserve,
    ) -> None:
        self.sockets = {
            lock: ServiceSocket(lock, address, hold_ms) for lock, address in addresses.items()
        }
        self._reserve = reserve
        self._handed_back: dict[int, set[str]] = {}  # by connection: it keeps copies of these
        self._unlent: dict[tuple[str, int], Connection] = {}  # those that wait for a copy

    def open(self, *, is_first_start: bool) -> None:
        """Bind what can be bound; borrowers have the rest, unless there were never any.

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

    def lend_missing(self, names: Iterable[str], conn: Connection) -> None:
        """Lend these sockets; without a descriptor where `conn` has just handed one back."""
        for name in names:
            if name in self._handed_back.get(conn.id, ()):
                conn.send(ServiceMsg(name, self.sockets[name].address))
            else:
                self.lend(name, conn)

    def lend(self, name: str, conn: Connection) -> None:
        """Send a copy to `conn` now, or as soon as there is a descriptor for it."""
        self._unlent.pop((name, conn.id), None)
        try:
            copy = self._reserve.help(self.sockets[name].copy)
        except OSError as error:
            if not is_shortage(error):
                raise
            self._unlent[name, conn.id] = conn
            return
        if copy is not None:
            conn.send(ServiceMsg(name, self.sockets[name].address), fds=[copy])

    def has_waiting(self, name: str) -> bool:
        """Whether a connection waits in the backlog of this socket now."""
        return self.sockets[name].has_waiting()

    def unlent(self, name: str) -> list[int]:
        """The connections that wait for a copy of this socket."""
        return [conn for each, conn in self._unlent if each == name]

    def watch(self, is_accepted: Callable[[str], bool], now_ms: float) -> list[str]:
        """Let time pass; the names of those whose address was bound meanwhile.

        `is_accepted`: whether a gateway may be accepting on the socket of a lock.
        """
        for (name, _), conn in tuple(self._unlent.items()):
            self.lend(name, conn)
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
