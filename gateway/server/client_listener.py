"""The gateway's listener for clients: it accepts them, and runs the gateway around the core.

`ClientListener` owns the clients' connections and the sweep once a second. `gateway.core` decides
what happens to a request, and `HttpExchange` performs it.

`ServiceListener` accepts from the service socket, of which other processes hold copies too. It does
not use `create_server`, which calls `listen` again and accepts a whole backlog before anything else
runs. At the limit of connections the longest idle one makes room for a new one; if none is idle,
and when descriptors run out, new ones wait in the backlog. `shutdown` would end listening for every
copy; `close` ends only ours.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.core import events as ev
from gateway.core.answers import Failure
from gateway.core.lanes import Lanes
from gateway.core.machine import Gateway
from gateway.schema import GatewayLoad, GatewayUpstream
from gateway.server.accounts import Accounts, Tell
from gateway.server.client import WRITE_BUFFER_BYTES, ClientConnection
from gateway.server.connections import take_over
from gateway.server.endpoints import Endpoints, ModelService, OwnAnswer
from gateway.server.exchange import HttpExchange
from gateway.server.files import open_api_keys, open_certificate
from gateway.server.request_reader import BodyMemory
from gateway.server.requests import BODY_BYTES_MAX, NOT_PASSED_ON, Headers, HttpRequest
from gateway.server.settings import GatewaySettings
from gateway.server.tracing import open_spans
from plumbing.errors import explain_shortage, is_shortage
from plumbing.wire.fds import OwnedFd
from pool.core.events import ModelDemand
from pool.messages import PooledModel

PROBLEM_CHARS_MAX = 4096  # an engine says what it likes
BODIES_SHARE = 0.75  # of the memory, which bodies that are being sent may keep
FLUSH_S = 0.5  # for the errors of requests that are cut at the end
BEGIN_S = 1.0  # after its connect a client sends its first request within milliseconds
SWEEP_S = 1.0  # a deadline is noticed this much late at most
# States of the core in which a request waits for an engine, with nothing sent and with something.
WAITING = "waiting"
PARKED = ("parked", "resuming")


class ClientListener:
    """All clients' connections, and what is known of engines. Nothing here blocks."""

    def __init__(
        self,
        settings: GatewaySettings,
        tell: Tell,
        *,
        want: Callable[[], object] = lambda: None,
        demand_changed: Callable[[], object] = lambda: None,
    ) -> None:
        """`want`: a request waits for an engine that sleeps; `demand_changed`: that of a pool's
        models may be another one.

        Raises:
            UsageError: `gateway.bad_tls` or `gateway.bad_api_keys`, files that cannot be used;
                `gateway.no_tracing`.
        """
        self._is_stopping = False
        self._begin_by_s = 0.0  # new connections may still send their first request
        self.body_memory = BodyMemory(settings.memory_bytes)
        self.memory_bytes_max = settings.memory_bytes
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.keys = open_api_keys(settings.api_keys)
        # A key is the gateway's where it checks keys.
        ours = frozenset() if self.keys is None else frozenset({b"authorization"})
        self.stripped = NOT_PASSED_ON | ours  # headers that no engine gets
        self.certificate = open_certificate(settings.tls_cert, settings.tls_key)
        self.accounts = Accounts(
            tell, has_access_log=settings.access_log, spans=open_spans(settings.tracing)
        )
        rules = ev.GatewayRules(
            hold_ms=settings.hold_ms,
            park_timeout_ms=settings.park_timeout_ms,
            resumes_max=settings.resumes_max,
            memory_bytes_max=settings.memory_bytes,
        )
        self._core: Gateway | Lanes
        self.models: ModelService | None = None
        pool = settings.pool
        if pool.lanes:
            self._core = Lanes(rules, pool.lanes, pool.queue_max)
            self.models = ModelService(self._core, pool.aliases)
        else:
            self._core = Gateway(rules)
        self._idle = asyncio.Event()
        self.exchange = HttpExchange(
            *(self._core, settings.directory, self.accounts, self._idle.set, want),
            demand=demand_changed,
        )
        self._endpoints = Endpoints(
            *(self._core, self.models, settings.directory, settings.hold_ms),
            lambda: self.is_stopping,
        )
        self._listener: ServiceListener | None = None
        self.clients: set[ClientConnection] = set()
        self._idle_clients: dict[ClientConnection, None] = {}  # longest idle first
        self._granted = ("", 0)
        self._sweeping = self._loop.call_later(SWEEP_S, self._sweep)

    # ------------------------------------------------------------------ for the gateway around it

    @property
    def is_accepting(self) -> bool:
        return self._listener is not None and self._listener.is_accepting

    def accept(self, listening: OwnedFd) -> None:
        """Take this socket and accept from now on, in place of an earlier one. It is shared with
        other processes: it is closed, never shut down."""
        self._is_stopping = False
        if self._listener is not None:
            self._listener.stop()
        tls = self.certificate.context if self.certificate is not None else None
        self._listener = ServiceListener(listening, self._make_client, self, tls)

    def release(self) -> None:
        """Accept no more, close our copy of the socket, and no request follows on connections that
        are open."""
        if self._listener is not None:
            self._listener.stop()
        self._close_idle()

    def limit_memory(self, memory_bytes: int) -> None:
        """From now on its requests may have so much; those that have more lose nothing."""
        self.memory_bytes_max = max(memory_bytes, self.load().memory_bytes)
        self.body_memory.bytes_max = self.memory_bytes_max
        self._core.shared.memory_bytes_max = self.memory_bytes_max

    def told(self, event: ev.GatewayEvent) -> None:
        """What is known of engines, or a door."""
        match event:
            case ev.EngineGranted():
                self._granted = ("", 0) if event.model else (event.engine, event.token)
                self.exchange.is_final = False
            case ev.NobodyGranted():
                self._granted, self.exchange.is_final = ("", 0), event.is_final
                if event.is_final and self._listener is not None:
                    self._listener.resume()
        self._endpoints.told(event)
        self.exchange.told(event)

    def set_model_doors(self, models: Mapping[str, PooledModel]) -> None:
        """What the pool says of each model."""
        if self.models is not None:
            for event in self.models.set_doors(models):
                self.told(event)

    def forget_door_numbers(self) -> None:
        """The pool is gone: another one counts its doors anew. The doors themselves hold."""
        if self.models is not None:
            for lane in self.models.lanes.by_model.values():
                lane.door_number = 0

    def demand(self) -> dict[str, ModelDemand]:
        """What there is for each model of a pool."""
        return {} if self.models is None else self.models.lanes.demand(self.exchange.now_ms())

    async def stop(self, budget_ms: float) -> None:
        """Close idle connections, and return once every request has ended; after `budget_ms` those
        that are left get an error. Called again, the shorter budget counts. New connections wait
        for another gateway, or are refused if every engine was told to end."""
        if self._listener is not None and not self.exchange.is_final:
            self._listener.pause()
        self._close_idle()
        if not await self._until_idle(budget_ms / 1000):
            self.exchange.handle(ev.GatewayEnds())
            await self._until_idle(FLUSH_S)
        self.close()

    def close(self) -> None:
        """End all connections now."""
        if self._listener is not None:
            self._listener.stop()
        for client in tuple(self.clients):
            client.abort()
        self.exchange.idle_connections.close()
        self.accounts.tell()
        self._sweeping.cancel()

    @property
    def problem(self) -> str | None:
        """A sentence about what cannot be done now."""
        files = [each.file for each in (self.keys, self.certificate) if each is not None]
        found = [file.problem for file in files]
        if self._listener is not None:
            found.insert(0, self._listener.problem)
        return "; ".join(each for each in found if each)[:PROBLEM_CHARS_MAX] or None

    def load(self) -> GatewayLoad:
        stats = self._core.stats(self.exchange.now_ms())
        by_state = stats.by_state
        return GatewayLoad(
            connections=len(self.clients),
            in_flight=len(self.exchange.requests),
            waiting=by_state.get(WAITING, 0),
            parked=sum(by_state.get(state, 0) for state in PARKED),
            parked_oldest_ms=stats.oldest_paused_ms,
            replaying=by_state.get("replaying", 0),
            suspects=stats.suspects,
            memory_bytes=stats.memory_bytes,
        )

    def upstream(self) -> GatewayUpstream | None:
        """The engine that requests go to."""
        engine, token = self._granted
        if not engine:
            return None
        hello, stats = self._core.hello, self._core.stats(self.exchange.now_ms())
        if hello is None:
            return GatewayUpstream(engine, token, False, "", None, stats.waits_for or None)
        problem = hello.problem and hello.problem[:PROBLEM_CHARS_MAX]
        return GatewayUpstream(
            engine, token, True, hello.continuation_id, hello.continuation, problem
        )

    # ------------------------------------------------------------------ for clients' connections

    def _make_client(self) -> ClientConnection:
        client = ClientConnection(self)
        self.clients.add(client)
        return client

    def closed(self, client: ClientConnection) -> None:
        self.clients.discard(client)
        self._idle_clients.pop(client, None)
        self._idle.set()

    def became_idle(self, client: ClientConnection) -> None:
        self._idle_clients.pop(client, None)
        self._idle_clients[client] = None
        self._idle.set()

    def came(self, client: ClientConnection, request: HttpRequest) -> None:
        self._idle_clients.pop(client, None)
        wishes = self._endpoints.route(
            client, request, lambda own: self.refused(own, request.request_id)
        )
        if wishes is not None:
            self.exchange.came(client, request, wishes)

    def refused(self, refused: Failure | OwnAnswer, request_id: bytes) -> None:
        self.accounts.refused(refused.code, refused.status, request_id)

    def left(self, client: ClientConnection) -> None:
        self.exchange.left(client)

    def tunnelled(self, client: ClientConnection, data: bytes) -> None:
        self.exchange.tunnelled(client, data)

    def drained(self, client: ClientConnection) -> None:
        self.exchange.drained(client)

    def body_bytes_max(self) -> int:
        hello = self._core.hello
        return BODY_BYTES_MAX if hello is None else hello.body_bytes_max

    def check(self, headers: Headers) -> Failure | None:
        return None if self.keys is None else self.keys.check(headers)

    def call_soon(self, callback: Callable[[], None]) -> object:
        return self._loop.call_soon(callback)

    def now_s(self) -> float:
        return time.monotonic()

    # ------------------------------------------------------------------ for the listener

    def count(self) -> int:
        return len(self.clients)

    def close_an_idle_one(self) -> bool:
        """Close the connection that has been idle longest, for a new one; False: none is idle."""
        for client in tuple(self._idle_clients):
            del self._idle_clients[client]
            if client.is_idle:
                self.clients.discard(client)
                client.abort()
                return True
        return False

    def limit_hit(self, name: str) -> None:
        self.accounts.limits[name] += 1

    # ------------------------------------------------------------------ inside

    @property
    def is_stopping(self) -> bool:
        """Whether the next request of a client is better sent elsewhere."""
        return self._is_stopping or self.exchange.is_final

    @property
    def _is_busy(self) -> bool:
        """Who connects now and sends nothing must not hold up a stop for longer than `BEGIN_S`."""
        may_begin = self.now_s() < self._begin_by_s
        return bool(self.exchange.requests) or any(
            not client.is_idle or (may_begin and client.may_begin) for client in self.clients
        )

    def _close_idle(self) -> None:
        """No request follows on open connections, but the first one of a new connection, whose
        bytes may be here already: the kernel resets a connection that is closed with bytes
        unread."""
        if not self._is_stopping:
            self._is_stopping, self._begin_by_s = True, self.now_s() + BEGIN_S
        for client in tuple(self._idle_clients):
            client.close_idle()

    async def _until_idle(self, budget_s: float) -> bool:
        try:
            async with asyncio.timeout(budget_s):
                while self._is_busy:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _sweep(self) -> None:
        self._sweeping = self._loop.call_later(SWEEP_S, self._sweep)
        now_s = self.now_s()
        for client in [each for each in self.clients if each.deadline_s <= now_s]:
            client.expire()
        self._idle.set()  # `BEGIN_S` may be over
        self._refuse_largest_bodies()
        self._cut_slowest()
        self.exchange.sweep(self._settings.keepalive_comments_ms)
        self.accounts.tell()
        for watched in (self.keys, self.certificate):
            if watched is not None:
                watched.file.look()

    def _refuse_largest_bodies(self) -> None:
        """A body may be sent slowly, so a few that are large could hold all memory for hours, and
        every other request would be refused. Near the limit they go first."""
        if self.body_memory.bytes <= BODIES_SHARE * self.body_memory.bytes_max:
            return
        for client in sorted(self.clients, key=lambda each: each.arriving_bytes, reverse=True):
            if self.body_memory.bytes <= BODIES_SHARE * self.body_memory.bytes_max:
                return
            client.give_up_body()

    def _cut_slowest(self) -> None:
        """A whole answer waits here for a client that reads slowly, and is no request any more. All
        of them together count as the cap does: above it those that hold most are cut."""
        waiting = {each: each.unsent_bytes for each in self.clients}
        stats = self._core.stats(self.exchange.now_ms())
        held_bytes = stats.memory_bytes + self.body_memory.bytes
        excess_bytes = held_bytes + sum(waiting.values()) - self.memory_bytes_max
        for client in sorted(waiting, key=waiting.__getitem__, reverse=True):
            if excess_bytes <= 0 or waiting[client] <= WRITE_BUFFER_BYTES:
                return
            excess_bytes -= waiting[client]
            self.accounts.limits["unread_answers"] += 1
            client.abort()


logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 16_384  # 40 KiB each are 640 MiB; beyond that there should be several pods
RESERVED_FDS = 64  # for everything that is neither a client nor an engine's connection
FDS_PER_CLIENT = 2  # a connection to the engine for each
ACCEPTS_PER_TURN = 32  # then the requests in flight get the loop
RETRY_S = 0.1  # at a limit, until connections close
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


class Places(Protocol):
    """Who counts the connections that are open."""

    def count(self) -> int: ...
    def close_an_idle_one(self) -> bool: ...
    def closed(self, client: ClientConnection) -> None: ...
    def limit_hit(self, name: str) -> None: ...


def connections_max() -> int:
    """How many clients may be connected, by this process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(2, min(CONNECTIONS_MAX, (soft - RESERVED_FDS) // FDS_PER_CLIENT))


class ServiceListener:
    """Accepts from its making until `stop`."""

    def __init__(
        self,
        fd: OwnedFd,
        factory: Callable[[], ClientConnection],
        places: Places,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Take `fd`, a bound and listening stream socket."""
        self._sock = socket.socket(fileno=fd.detach())
        self._sock.setblocking(False)  # a flag of the open file, the same for all its holders
        if self._sock.family in (socket.AF_INET, socket.AF_INET6):
            for level, option, value in KEEPALIVE:  # what is accepted from it has them too
                self._sock.setsockopt(level, option, value)
        self._factory = factory
        self._places = places
        self._tls = tls
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
        most = connections_max()
        for _ in range(ACCEPTS_PER_TURN):
            is_full = self._places.count() >= most
            if is_full and not self._is_anybody_waiting():
                return
            if is_full and not self._places.close_an_idle_one():
                self._places.limit_hit("connections")
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
                    self._places.limit_hit("descriptors")
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
        client = self._factory()
        tls = {"ssl": self._tls, "ssl_handshake_timeout": HANDSHAKE_S} if self._tls else {}
        # It fails if the client is gone, or does not speak TLS.
        take_over(connection, client, lambda _: self._places.closed(client), **tls)

    def _wait(self, why: str) -> None:
        """New connections wait in the backlog meanwhile."""
        if self.problem is None:
            logger.warning("%s", why)
        self._problem = (self._loop.time(), why)
        self._loop.remove_reader(self._sock.fileno())
        self._retry = self._loop.call_later(RETRY_S, self._add_reader)

    def _add_reader(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._accept)
