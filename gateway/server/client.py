"""One connection of a client, which reads a request, serves it, writes its answer and reads the
next one; and the listener that accepts them.

While a request is served, what the client sends further is read and dropped: reading on is how a
client that is gone is noticed at once. Such a connection is closed behind the answer, so a client
that sends requests ahead sends them again. `GatewayExchange` looks at deadlines, since a timer for
each connection would cost more than what it guards.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from gateway.core.answers import Failure
from gateway.server.accounts import Accounts
from gateway.server.requests import HttpRequest, Intake, RequestReader, fresh_id
from gateway.server.responses import OwnAnswer
from plumbing.errors import explain_shortage, is_shortage
from plumbing.wire.fds import OwnedFd

logger = logging.getLogger(__name__)

IDLE_S = 75.0  # between two requests, as nginx
HEAD_S = 10.0  # from a connection or the first byte of a request to the end of its head
# A body may take this long and a second more for each KiB: as slow as a bad modem.
BODY_GRACE_S = 30.0
BODY_BYTES_PER_S = 1024
STALLED_S = 300.0  # an answer, and the engine, waits this long for a client that takes nothing
LINGER_S = 2.0  # to read what a refused client still sends, else a reset would destroy the answer
WRITE_BUFFER_BYTES = 64 * 1024  # then the engine's connection is not read on
NEVER = float("inf")


class Clients(Protocol):
    """Who serves the requests of connections (`exchange.py`)."""

    intake: Intake
    accounts: Accounts
    clients: set[ClientConnection]

    def close_an_idle_one(self) -> bool: ...
    def closed(self, client: ClientConnection) -> None: ...
    def failed(self, client: ClientConnection, error: OSError) -> None: ...
    def became_idle(self, client: ClientConnection) -> None: ...
    def came(self, client: ClientConnection, request: HttpRequest) -> None: ...
    def left(self, request: HttpRequest) -> None: ...
    def drained(self, request: HttpRequest) -> None: ...
    @property
    def is_stopping(self) -> bool: ...


class _Gathered(list[bytes]):
    """What is written meanwhile, in the place of a transport."""

    __slots__ = ()
    write = list.append


class ClientConnection(asyncio.Protocol):
    """`request` is the one that is served now."""

    __slots__ = (
        *("_body_since_s", "_is_chunked", "_is_lingering"),
        *("_out", "_owner", "_reader", "_transport", "_unsent_seen_bytes"),
        *("deadline_s", "is_full", "peer", "request", "sent_bytes"),
    )

    def __init__(self, owner: Clients) -> None:
        self.request: HttpRequest | None = None
        self.deadline_s = NEVER
        self.peer: object = None
        self.sent_bytes = 0  # of the present answer's body
        self._owner = owner
        self._reader = RequestReader(owner.intake)
        self._transport: asyncio.Transport | None = None
        self._out: asyncio.Transport | _Gathered | None = None  # where what is written goes
        self._is_chunked = False
        self._is_lingering = False
        self.is_full = False  # the client takes its answer slower than the engine makes it
        self._body_since_s = 0.0
        self._unsent_seen_bytes = 0  # when a deadline passed last

    @property
    def is_idle(self) -> bool:
        """Whether it may be closed for another one: no request is read or served."""
        is_waiting = self.request is None and self._reader.is_idle and not self._is_lingering
        return is_waiting and not self.unsent_bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait in this process until the client takes them."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def arriving_bytes(self) -> int:
        """How many bytes of an incomplete body have arrived."""
        return self._reader.body_bytes if self.request is None else 0

    # ------------------------------------------------------------------ answers

    def answer(self, response: bytes) -> None:
        """A whole response; the request is over."""
        self._write(response)
        self.finish()

    def answer_own(self, own: OwnAnswer, to: HttpRequest) -> None:
        self.answer(
            own.response(to.request_id, keeps_alive=to.keeps_alive, is_to_head=to.is_to_head)
        )

    def begin(self, head: bytes, *, is_chunked: bool) -> None:
        """The head of an answer whose body, if it has one, follows by `send_body`."""
        self._is_chunked = is_chunked
        self._write(head)

    def send_body(self, data: bytes) -> bool:
        """A part of the body, at once; whether the client is full then. The hot path."""
        out = self._out
        if out is None or not data:
            return False
        self.sent_bytes += len(data)
        if self._is_chunked:
            out.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            out.write(data)
        return self.is_full

    def send_chunks(self, data: bytes) -> bool:
        """Whole chunks of HTTP, as they came; as `send_body`."""
        if self._transport is not None:
            self.sent_bytes += len(data)
            self._transport.write(data)
        return self.is_full

    def gather(self) -> None:
        """Keep what is written until `release`. A head and the first events, or the last events and
        the end, are one packet then instead of two, which costs half and is there sooner."""
        if self._transport is not None:
            self._out = _Gathered()

    def release(self) -> bool:
        """Write it; as `send_body`."""
        gathered, self._out = self._out, self._transport
        if not isinstance(gathered, _Gathered) or not gathered or self._transport is None:
            return False
        self._transport.write(b"".join(gathered))
        return self.is_full

    def end_body(self) -> None:
        if self._is_chunked:
            self._write(b"0\r\n\r\n")
        self.finish()

    def cut(self, last: bytes) -> None:
        """Send this part of the body and close without its end, which the client must notice."""
        self.send_body(last)
        self.request = None
        self._close()

    def finish(self) -> None:
        """The answer is out: close, or serve the next request."""
        request, self.request = self.request, None
        self._is_chunked, self.sent_bytes = False, 0
        if self._transport is None:
            return
        if request is not None and not request.keeps_alive:
            self._linger()
        else:
            self._advance()

    # ------------------------------------------------------------------ for the owner

    @property
    def may_begin(self) -> bool:
        """Whether nothing has come yet, so that its first request may be on its way."""
        return self.is_idle and not self._reader.count

    def close_idle(self) -> None:
        if self.is_idle and not self.may_begin and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def give_to(self, protocol: asyncio.BaseProtocol) -> None:
        """It asked for another protocol than HTTP: have that instead."""
        transport, self._transport, self._out = self._transport, None, None
        if transport is not None:
            transport.pause_reading()
            transport.set_protocol(protocol)
            transport.resume_reading()
            protocol.connection_made(transport)
        self.request = None
        self._reader.close()
        self._owner.closed(self)

    def is_named(self, name: str) -> bool:
        """Whether the peer's certificate, where there is TLS, has this name."""
        transport = self._transport
        if transport is None or transport.get_extra_info("ssl_object") is None:
            return True
        certificate = transport.get_extra_info("peercert") or {}
        return ("DNS", name) in certificate.get("subjectAltName", ())

    def give_up_body(self) -> None:
        """Refuse the request that is being sent: its body takes the place of others."""
        self._reader.give_up()
        self._advance()

    def expire(self) -> None:
        """The deadline has passed. A client that takes its answer slowly may go on doing so."""
        unsent_bytes = self.unsent_bytes
        if unsent_bytes and unsent_bytes != self._unsent_seen_bytes:
            self._unsent_seen_bytes = unsent_bytes
            self.deadline_s = time.monotonic() + STALLED_S
            return
        if self.request is not None or self._is_lingering or self._reader.is_idle:
            self.abort()
            return
        late = Failure(408, "request_timeout", "The request did not arrive in time.")
        self._refuse(late)

    # ------------------------------------------------------------------ asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._out = cast("asyncio.Transport", transport)
        self.peer = transport.get_extra_info("peername")
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self.deadline_s = time.monotonic() + HEAD_S
        self._owner.became_idle(self)

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        if self.request is None:
            self._reader.feed(data)
            self._advance()
        else:
            self.request.keeps_alive = False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = self._out = None
        self._reader.close()
        if self.request is not None:
            request, self.request = self.request, None
            request.sent_bytes = self.sent_bytes
            self._owner.left(request)
        self._owner.closed(self)

    def pause_writing(self) -> None:
        self.is_full, self.deadline_s = True, time.monotonic() + STALLED_S

    def resume_writing(self) -> None:
        self.is_full = False
        idle_s = LINGER_S if self._is_lingering else IDLE_S
        self.deadline_s = NEVER if self.request is not None else time.monotonic() + idle_s
        if self.request is not None:
            self._owner.drained(self.request)

    # ------------------------------------------------------------------ inside

    def _advance(self) -> None:
        """Serve the request that has been read, or wait for one."""
        if self.request is not None or self._transport is None or self._is_lingering:
            return
        request, self._reader.ready = self._reader.ready, None
        if request is not None:
            self._serve(request)
        elif self._reader.refused is not None:
            self._refuse(self._reader.refused)
        else:
            self._await_more()

    def _serve(self, request: HttpRequest) -> None:
        if self._owner.is_stopping:
            request.keeps_alive = False
        self.request, self.deadline_s = request, NEVER
        self._body_since_s = 0.0
        self._owner.came(self, request)

    def _await_more(self) -> None:
        reader, now_s = self._reader, time.monotonic()
        if reader.expects_continue:
            reader.expects_continue = False
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if reader.is_idle:
            if self._owner.is_stopping:
                self._close()
                return
            self.deadline_s = now_s + (IDLE_S if reader.count else HEAD_S)
            self._owner.became_idle(self)
        elif not reader.has_head:
            self.deadline_s = min(self.deadline_s, now_s + HEAD_S)
        else:
            self._body_since_s = self._body_since_s or now_s
            received_s = reader.body_bytes / BODY_BYTES_PER_S
            self.deadline_s = self._body_since_s + BODY_GRACE_S + received_s

    def _refuse(self, refused: Failure) -> None:
        request_id = self._reader.refused_id or fresh_id()
        self._owner.accounts.refused(refused.code, refused.status, request_id)
        own = OwnAnswer.of(refused, "")
        self._write(own.response(request_id, keeps_alive=False))
        self._linger()

    def _write(self, data: bytes) -> None:
        if self._out is not None:
            self._out.write(data)

    def _linger(self) -> None:
        """Everything is answered: say so, and read on for a moment."""
        if self._transport is None:
            return
        self._is_lingering = True
        self.deadline_s = time.monotonic() + LINGER_S
        self.release()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _close(self) -> None:
        self.release()
        if self._transport is not None:
            self.deadline_s = time.monotonic() + STALLED_S
            self._transport.close()


# ------------------------------------------------------------------------------ the listener

CONNECTIONS_MAX = 16_384  # 40 KiB each are 640 MiB; beyond that there should be several pods
RESERVED_FDS = 64  # for everything that is neither a client nor an engine's connection
FDS_PER_CLIENT = 2  # a connection to the engine for each
BACKLOG = 4096
ACCEPTS_PER_TURN = 32  # then the requests in flight get the loop
ACCEPT_AGAIN_S = 0.1  # at a limit, until connections close
HANDSHAKE_S = 10.0  # of TLS
PROBLEM_S = 10.0  # how long a problem is shown after it was last met
# A client that is gone without a word is noticed after two minutes, also while nothing is sent.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


def connections_max() -> int:
    """How many clients may be connected, by this process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(2, min(CONNECTIONS_MAX, (soft - RESERVED_FDS) // FDS_PER_CLIENT))


class ServiceListener:
    """Accepts from the service socket, which other processes hold, too, from its making until
    `stop`.

    It does not use `create_server`, which calls `listen` again and accepts a whole backlog before
    anything else runs. At the limit of connections the longest idle one makes room for a new one;
    if none is idle, and when descriptors run out, new ones wait in the backlog. `shutdown` would
    end listening for every copy; `close` ends only ours.
    """

    def __init__(
        self,
        fd: OwnedFd,
        places: Clients,
        tls: Callable[[], ssl.SSLContext] | None,
        *,
        keepalive: Sequence[tuple[int, int, int]] = KEEPALIVE,
        most: int = CONNECTIONS_MAX,
    ) -> None:
        """Take `fd`, a bound and listening stream socket. `tls`: asked at each connection."""
        self._sock = socket.socket(fileno=fd.detach())
        self._sock.setblocking(False)  # a flag of the open file, the same for all its holders
        if self._sock.family in (socket.AF_INET, socket.AF_INET6):
            for level, option, value in keepalive:  # what is accepted from it has them too
                self._sock.setsockopt(level, option, value)
        self._places = places
        self._tls, self._most = tls, most
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._problem: tuple[float, str] | None = None  # when it was last met
        self.is_accepting = True
        self._loop.add_reader(self._sock.fileno(), self._accept)

    @property
    def problem(self) -> str | None:
        if self._problem is None or self._loop.time() - self._problem[0] > PROBLEM_S:
            return None
        return self._problem[1]

    def note(self, why: str) -> None:
        """Something that `problem` is for a while."""
        self._problem = (self._loop.time(), why)

    def pause(self) -> None:
        """Accept no more until `resume`; repeated calls do nothing."""
        if self._retry is not None:
            self._retry.cancel()
        if self.is_accepting:
            self._loop.remove_reader(self._sock.fileno())
        self.is_accepting = False

    def resume(self) -> None:
        """Accept again, unless stopped."""
        if not self.is_accepting and self._sock.fileno() != -1:
            self.is_accepting = True
            self._add_reader()

    def stop(self) -> None:
        """Accept no more and close our copy; repeated calls do nothing."""
        self.pause()
        self._sock.close()

    def _accept(self) -> None:
        most = min(self._most, connections_max())
        for _ in range(ACCEPTS_PER_TURN):
            is_full = len(self._places.clients) >= most
            if is_full and not self._is_anybody_waiting():
                return
            if is_full and not self._places.close_an_idle_one():
                self._places.accounts.limits["connections"] += 1
                self._wait(
                    f"{most} clients are connected, the limit; raise the limit of open files"
                    " (ulimit -n), or restrict who can reach this port"
                )
                return
            try:
                connection, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if is_shortage(error):
                    self._places.accounts.limits["descriptors"] += 1
                    self._places.close_an_idle_one()
                    self._wait(f"cannot accept clients: {explain_shortage(error.errno)}")
                    return
                continue  # the client left while it waited (man 2 accept)
            self._adopt(connection)

    def _is_anybody_waiting(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def _adopt(self, connection: socket.socket) -> None:
        client = ClientConnection(self._places)
        self._places.clients.add(client)
        tls = {"ssl": self._tls(), "ssl_handshake_timeout": HANDSHAKE_S} if self._tls else {}
        # It fails if the client is gone, or does not speak TLS.
        take_over(connection, client, lambda error: self._places.failed(client, error), **tls)

    def _wait(self, why: str) -> None:
        """New connections wait in the backlog meanwhile."""
        if self.problem is None:
            logger.warning("%s", why)
        self.note(why)
        self._loop.remove_reader(self._sock.fileno())
        self._retry = self._loop.call_later(ACCEPT_AGAIN_S, self._add_reader)

    def _add_reader(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._accept)


def take_over(
    connection: socket.socket,
    protocol: asyncio.Protocol,
    failed: Callable[[OSError], None],
    **tls: Any,
) -> None:
    """`protocol` has the connection from now on. `failed` is called if the loop cannot watch one
    more, or if the handshake fails; `tls` is what `connect_accepted_socket` knows of it.

    Not `create_unix_connection`: uvloop's takes a socket over only after `connection_made`. If
    writing fails in there, the number is closed by the loop and again by the socket object, when
    another stream may have it.
    """
    loop = asyncio.get_running_loop()
    taking = loop.connect_accepted_socket(lambda: protocol, connection, **tls)

    def go_on(_: asyncio.Future[Any] | None = None) -> None:
        """To its next wait, as a task does with its coroutine."""
        try:
            future = taking.send(None)
        except StopIteration:
            return
        except OSError as error:
            connection.close()
            failed(error)
        else:
            future.add_done_callback(go_on)

    go_on()
