"""The wire over TCP with mutual TLS: who may connect, one connection, the server.

Frames, limits and errors are those of Unix sockets, but no descriptors travel and the kernel knows
no process at the other end. Both sides have certificates, also on loopback: other users of the host
could take the lock there. TLS 1.3 only, because both ends are ours. Missing acknowledgements reveal
a peer whose host is gone.

`TcpServer` accepts by itself and not through the loop's server: it also limits unfinished TLS
handshakes, and each connection must use the certificates that are on disk now. The service sees a
peer as a connection once its handshake is done.

Importing this loads `ssl`; who needs only an address imports `wire/tcp_address`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from plumbing.errors import UnreachableError, UsageError, is_shortage
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd
from plumbing.wire.limits import CONNECT_DEADLINE_S, HANDSHAKES_MAX
from plumbing.wire.messages import Catalogue
from plumbing.wire.peer import NO_UID, Peer
from plumbing.wire.server import BaseServer
from plumbing.wire.sockets import RECEIVE_BYTES, no_descriptors
from plumbing.wire.tcp_address import TcpAddress

# A handshake is two round trips and a millisecond of arithmetic. Until it is done the peer is
# unauthenticated, and an address may have this many under way.
HANDSHAKE_DEADLINE_S = 5.0
HANDSHAKES_PER_ADDRESS_MAX = 32

# A peer whose host is gone acknowledges nothing, and by default the kernel retries for a quarter
# of an hour. Twice the usual lease: a peer that is silent for longer holds nothing any more.
UNACKNOWLEDGED_MS_MAX = 10_000
KEEPALIVE_IDLE_S = 5

# A key is a few hundred bytes, a bundle of certificates a few hundred kilobytes.
FILE_BYTES_MAX = 1024 * 1024

T = TypeVar("T")


class Renewed(Generic[T]):
    """What `read` makes of files that users renew: read again at its next use once one of them has
    changed. If they cannot be used then, `problem` gives the reason, and what was read before stays
    in use."""

    def __init__(self, read: Callable[[], T], *paths: str) -> None:
        """Raises:
        UsageError: from `read`.
        """
        self._read, self._paths = read, paths
        self._problem: str | None = None
        self._stamp, self._found = self._now(), read()

    def get(self) -> T:
        stamp = self._now()
        try:
            if stamp != self._stamp:
                self._found = self._read()
        except UsageError as error:
            self._problem = f"{error}; the previous files stay in use"
        else:
            self._stamp, self._problem = stamp, None
        return self._found

    @property
    def problem(self) -> str | None:
        self.get()
        return self._problem

    def _now(self) -> list[tuple[int, ...] | None]:
        return [_stamp(path) for path in self._paths]


@dataclass
class Security:
    """Paths of a certificate, its private key and the peers' CA.

    The files are checked at each new connection, so renewed ones are used at once.
    """

    cert: str
    key: str
    ca: str
    _kept: dict[ssl._SSLMethod, Renewed[ssl.SSLContext]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def problem(self) -> str | None:
        """Why the files cannot be used, where others were before."""
        return next(filter(None, (each.problem for each in self._kept.values())), None)

    def server_context(self) -> ssl.SSLContext:
        """For the accepting side. Sessions are not resumed: each connection authenticates.

        Raises:
            UsageError: the files have never been usable; the code, under `wire.`, is the reason.
        """
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """For the connecting side, which checks the server's name.

        Raises:
            UsageError: as for `server_context`.
        """
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, side: ssl._SSLMethod) -> ssl.SSLContext:
        if side not in self._kept:
            self._kept[side] = Renewed(partial(self._make, side), self.cert, self.key, self.ca)
        return self._kept[side].get()

    def _make(self, side: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = side is ssl.PROTOCOL_TLS_CLIENT
        context.verify_mode = ssl.CERT_REQUIRED
        if side is ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        check_file(self.cert, "the certificate")
        check_file(self.key, "the private key", is_secret=True)
        check_file(self.ca, "the CA's certificate")
        what = f"{self.ca} contains no CA certificate in PEM"
        try:
            context.load_verify_locations(self.ca)
            what = (
                f"{self.cert} and {self.key} are not a certificate and its private key, in PEM and"
                " without a passphrase"
            )
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise UsageError("wire.bad_certificate", f"{what}: {error}") from error
        except OSError as error:  # such as no descriptor
            why = f"cannot read {self.cert}, {self.key} or {self.ca}: {error.strerror}"
            raise UsageError("wire.file", why) from error
        return context


def settle(address: TcpAddress, cert: str | None, key: str | None, ca: str | None) -> Security:
    """How connections to `address` are secured.

    Raises:
        UsageError: `wire.incomplete_security`.
    """
    if cert and key and ca:
        return Security(cert, key, ca)
    files = {"certificate": cert, "private key": key, "CA's certificate": ca}
    missing = ", ".join(what for what, path in files.items() if not path)
    raise UsageError(
        "wire.incomplete_security",
        f"TLS on {address} needs a certificate, its private key and the certificate of the CA that"
        f" signed the other side's; missing: {missing} (`lockserver certificates DIR` writes them)",
    )


def check_file(path: str, what: str, *, is_secret: bool = False) -> None:
    """Refuse a file, which errors call `what`, that cannot be used.

    A secret must be readable by this user only; if it belongs to root, its group may read it too.
    That is the only way in which Kubernetes can pass a Secret to a process that is not root: with
    `fsGroup`, the files belong to root and have mode 0440. PostgreSQL has the same rule for its
    keys. Links are followed, as Kubernetes uses them.

    Raises:
        UsageError: `wire.file`: it cannot be read; `wire.secret_readable`.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        why = f"cannot read {what}, {path}: {error.strerror}"
        raise UsageError("wire.file", why, path=path) from error
    if not stat.S_ISREG(found.st_mode) or found.st_size > FILE_BYTES_MAX:
        why = f"{what}, {path}, is not a file of at most {FILE_BYTES_MAX} bytes"
        raise UsageError("wire.file", why, path=path)
    if not is_secret:
        return
    if found.st_uid not in (0, os.geteuid()):
        why, fix = f"it belongs to uid {found.st_uid}", f"chown it to uid {os.geteuid()}"
    elif found.st_mode & (0o037 if found.st_uid == 0 else 0o077):
        why = f"its mode is {stat.S_IMODE(found.st_mode):04o}"
        fix = "chmod 600 it (a Kubernetes Secret: defaultMode: 0400 on its volume)"
    else:
        return
    raise UsageError(
        "wire.secret_readable",
        f"{what}, {path}, may be known to other users ({why}); create a new one and {fix}",
        path=path,
    )


def _stamp(path: str) -> tuple[int, ...] | None:
    """Changes when the file changes, or a link in the path to it."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _no_password() -> str:
    raise ValueError("the key has a passphrase")


# The server's first byte: in TLS 1.3 a client learns from nothing else that its certificate was
# accepted, and must not count as connected before.
ACCEPTED = b"\n"
_FIX = "both sides need a certificate, and each must trust the CA of the other's"


class TcpConnection(Connection):
    """A stream of messages over TLS, whose handshake is done.

    It lingers: closing a socket with unread bytes resets it, and the reset can overtake our last
    frame. So the peer closes, because of the error frame.
    """

    lingers = True
    _sock: ssl.SSLSocket  # type: ignore[mutable-override] # it is set once

    def _receive(self) -> tuple[bytes, list[OwnedFd]]:
        with contextlib.suppress(BlockingIOError):
            # OpenSSL takes the kernel's error, such as a host that is gone, for a plain end.
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        try:
            return self._sock.recv(RECEIVE_BYTES), []
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError(errno.EAGAIN, "nothing has arrived") from error

    def _transmit(self, data: memoryview, fds: Sequence[OwnedFd]) -> int:
        assert not fds  # no message over TCP has any
        try:
            return self._sock.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError(errno.EAGAIN, "the socket is full") from error

    def _explain(self, error: OSError) -> str:
        return reason_of(error)


def reason_of(error: OSError) -> str:
    """Why a connection was closed, or not made, for use in a sentence."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError):
        return f"the peer closed the connection during the handshake; {_FIX}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or str(error)).lower().replace('_', ' ')}; {_FIX}"
    if isinstance(error, TimeoutError) and not error.errno:
        return "its TLS handshake took too long"
    return f"the peer is gone: {error.strerror or error}"


async def _secured(
    raw: socket.socket, context: ssl.SSLContext, server_hostname: str | None = None
) -> ssl.SSLSocket:
    """TLS over `raw`, which this owns, once both ends have accepted each other. A host that is gone
    is noticed (man 7 tcp), and what is sent goes at once. `server_hostname`: of the other end,
    where this is the client.

    Raises:
        OSError: the handshake failed.
    """
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS_MAX)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_IDLE_S)
    raw.setblocking(False)
    sock, is_server = raw, server_hostname is None
    try:
        sock = context.wrap_socket(
            raw,
            server_side=is_server,
            server_hostname=server_hostname,
            do_handshake_on_connect=False,
        )
        await _when_ready(sock, sock.do_handshake)
        await _when_ready(sock, lambda: sock.send(ACCEPTED) if is_server else _read_accepted(sock))
        return sock
    except BaseException:
        sock.close()
        raise


async def _when_ready(sock: ssl.SSLSocket, step: Callable[[], object]) -> None:
    """Try `step` until it does not wait for the other end."""
    loop = asyncio.get_running_loop()
    while True:
        ready = asyncio.Event()
        try:
            step()
            return
        except ssl.SSLWantReadError:
            loop.add_reader(sock.fileno(), ready.set)
        except ssl.SSLWantWriteError:
            loop.add_writer(sock.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(sock.fileno())
            loop.remove_writer(sock.fileno())


def _read_accepted(sock: ssl.SSLSocket) -> None:
    if sock.recv(len(ACCEPTED)) != ACCEPTED:
        raise ConnectionAbortedError(f"it does not say that it accepts us; {_FIX}")


def _peer(sock: ssl.SSLSocket, host: str, who: str) -> Peer:
    """The name in the other side's certificate, or `who`."""
    certificate: Any = sock.getpeercert()
    parts = dict(pair for part in certificate["subject"] for pair in part)
    return Peer(NO_UID, 0, None, "none", parts.get("commonName", who), host)


async def connect_tcp(
    address: TcpAddress,
    catalogue: Catalogue,
    handler: Handler,
    security: Security,
    deadline_s: float = CONNECT_DEADLINE_S,
) -> TcpConnection:
    """A connection to the server at `address`, which has accepted our certificate. The handler's
    `opened` is called then; it is not called if this raises.

    Raises:
        UnreachableError: `wire.unreachable`, with the reason; `wire.no_descriptors`.
        UsageError: the security's files cannot be used.
    """
    context = security.client_context()
    try:
        async with asyncio.timeout(deadline_s):
            raw = await _dial(address)
            sock = await _secured(raw, context, server_hostname=address.host)
    except OSError as error:
        if is_shortage(error):
            raise no_descriptors(f"open a socket to {address}", error) from error
        is_late = isinstance(error, TimeoutError) and not error.errno
        why = f"it did not answer within {deadline_s:g} s" if is_late else reason_of(error)
        raise UnreachableError(
            "wire.unreachable", f"cannot reach {address}: {why}", address=str(address)
        ) from error
    return TcpConnection(sock, catalogue, handler, _peer(sock, address.host, str(address)))


async def _dial(address: TcpAddress) -> socket.socket:
    """A socket that is connected to the first of its addresses that answers."""
    loop, failed = asyncio.get_running_loop(), OSError(f"{address.host} has no address")
    for found in await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        sock = socket.socket(*found[:3])
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, found[4])
            return sock
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            failed = error
    raise failed


class TcpServer(BaseServer):
    """Accepts connections of engines on other hosts and passes every message to `handler`."""

    def __init__(
        self,
        catalogue: Catalogue,
        handler: Handler,
        *,
        service: str,
        security: Security,
        handshakes_max: int = HANDSHAKES_MAX,
    ) -> None:
        super().__init__(catalogue, handler, service)
        self.refused_count = 0
        self.last_refusal: str | None = None
        self.security = security
        self._handshakes_max = handshakes_max
        self._handshakes: dict[asyncio.Task[None], str] = {}

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._sock is None:
            return
        self._stop_listening()
        await asyncio.sleep(0)  # a handshake closes its socket only if it has begun
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        await self._close_connections()

    def _accepted(self, sock: socket.socket, name: tuple[str, int]) -> None:
        host = name[0].removeprefix("::ffff:")  # an IPv4 address on a socket for both
        who = str(TcpAddress(host, name[1]))
        of_host = sum(other == host for other in self._handshakes.values())
        is_full = len(self._handshakes) >= self._handshakes_max
        if is_full or of_host >= HANDSHAKES_PER_ADDRESS_MAX:
            sock.close()
            self._refuse(who, "too many unfinished handshakes")
            return
        task = asyncio.get_running_loop().create_task(self._handshake(sock, host, who))
        self._handshakes[task] = host
        task.add_done_callback(self._handshakes.pop)

    async def _handshake(self, sock: socket.socket, host: str, who: str) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
                secured = await _secured(sock, self.security.server_context())
            TcpConnection(secured, self._catalogue, self, _peer(secured, host, who))
        except OSError as error:  # includes TLS errors and the handshake's deadline
            self._refuse(who, reason_of(error))

    def _refuse(self, who: str, why: str) -> None:
        self.refused_count += 1
        self.last_refusal = f"{who}: {why}"
