"""Performs what the core decides: sends requests to engines, and answers to clients.

Owns the open requests and the upstream connections. Decides nothing about them. Performing an
effect may bring the next event at once (an answer is out, so the client's next request is served),
and the journal in an effect holds until the next event. So events wait in `_inbox` while effects
are performed. `EngineQueues` reads what an engine had queued when it died, from the page of each
engine that has greeted this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec.structs import replace

from gateway.core import events as ev
from gateway.core.lanes import Lanes
from gateway.core.machine import TICK_MS, Gateway
from gateway.core.router import Wishes
from gateway.server.accounts import Accounts
from gateway.server.client import ClientConnection
from gateway.server.connections import IdleConnections, take_over
from gateway.server.open_request import OpenRequest
from gateway.server.requests import HttpRequest
from gateway.server.responses import error_response, greet
from gateway.server.upstream import ReplayTurns, Upstream
from plumbing.gateway_protocol import Hello
from plumbing.pod.paths import engine_http_socket, engine_queue
from plumbing.pod.queue_page import QueueReader, attempt_name

HEAD_MS = 10_000.0  # from the first byte of a response's head to its end
QUOTED_CHARS_MAX = 300  # of what is wrong with a hello, which may quote it
KEEPALIVE_COMMENT = b": keepalive\n\n"


class HttpExchange:
    """All requests of the gateway. `idle` is called when the last one has ended, `want` when one
    waits for an engine that rests, `demand` when that of a pool's models may have changed."""

    def __init__(
        self,
        core: Gateway | Lanes,
        directory: str,
        accounts: Accounts,
        idle: Callable[[], None],
        want: Callable[[], object],
        demand: Callable[[], object] = lambda: None,
    ) -> None:
        self.core = core
        self._demand = demand
        self.requests: dict[int, OpenRequest] = {}  # by the core's number
        self._directory = directory
        self._accounts = accounts
        self._idle = idle
        self._want = want
        self._quiet_since_ms = 0.0  # long ago: a fresh gateway keeps no engine awake
        self.upstreams: dict[int, Upstream] = {}  # by the number of their attempt
        self.idle_connections = IdleConnections()
        self.replays = ReplayTurns()
        self._by_client: dict[ClientConnection, OpenRequest] = {}
        self._paused: dict[int, float] = {}  # request → when it was sent something last, in ms
        self._inbox: deque[ev.GatewayEvent] = deque()
        self._is_performing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._tick: asyncio.TimerHandle | None = None
        self._last_number = 0
        self._queues = EngineQueues(directory)
        self.is_final = False  # no engine takes requests any more

    # ------------------------------------------------------------------ for clients' connections

    def came(self, client: ClientConnection, http: HttpRequest, wishes: Wishes) -> None:
        self._last_number += 1
        request = OpenRequest(self._last_number, client, http, self.now_ms(), wishes.model)
        self.requests[request.number] = self._by_client[client] = request
        self.handle(
            ev.RequestCame(
                request.number,
                http.path,
                len(http.body),
                request.may_be_sent_twice,
                bool(http.body) and http.wants_stream,
                wishes.model,
                wishes.priority,
                wishes.wait_ms,
                wishes.keep_alive_ms,
            )
        )
        request.is_fresh = False  # what has waited for an engine is not the gateway's own time

    def left(self, client: ClientConnection) -> None:
        request = self._by_client.pop(client, None)
        if request is not None:
            request.sent_bytes = client.sent_bytes
            self.handle(ev.ClientLeft(request.number, request.model))

    def drained(self, client: ClientConnection) -> None:
        """A client that was full has room again."""
        request = self._by_client.get(client)
        if request is not None and request.upstream is not None:
            request.upstream.resume()

    def tunnelled(self, client: ClientConnection, data: bytes) -> None:
        request = self._by_client.get(client)
        if request is not None and request.upstream is not None:
            request.upstream.send(data)

    # ------------------------------------------------------------------ for connections to engines

    def sent(self, upstream: Upstream) -> None:
        request = self.requests[upstream.attempt.request]
        if request.is_fresh:
            self._accounts.added.observe((self.now_ms() - request.came_ms) / 1000)

    def connect(self, upstream: Upstream) -> None:
        """Send its request on a connection of its own."""
        attempt = upstream.attempt
        try:
            connection = upstream.connect(engine_http_socket(self._directory, attempt.engine))
        except OSError:
            self.handle(ev.ConnectFailed(attempt.number))
        else:
            take_over(connection, upstream, upstream.connection_lost)

    def now_ms(self) -> float:
        return time.monotonic() * 1000

    @property
    def outbox(self) -> Sequence[ev.GatewayEffect]:
        return self.core.outbox

    def told(self, event: ev.GatewayEvent) -> None:
        """A word about engines from outside. What has led to one before is not used again."""
        self.idle_connections.close()
        if isinstance(event, ev.EngineGranted):
            event = replace(event, queued=self._queues.queued())
        self.handle(event)

    def handle(self, event: ev.GatewayEvent) -> None:
        self._inbox.append(event)
        if self._is_performing:
            return
        self._is_performing = True
        while self._inbox:
            for effect in self.core.handle(self._inbox.popleft(), self.now_ms()):
                self._perform(effect)
        self._is_performing = False
        if self.core.outbox:
            self.perform_outbox()
        if self._tick is None and self.core.needs_ticks:
            self._tick = self._loop.call_later(TICK_MS / 1000, self._ticked)

    def perform_outbox(self) -> None:
        """Perform what the core has decided while it saw bytes."""
        self._is_performing = True
        for effect in self.core.take():
            self._perform(effect)
        self._is_performing = False
        if self._inbox or self.core.needs_ticks:
            self.handle(self._inbox.popleft() if self._inbox else ev.Tick())

    def _ticked(self) -> None:
        self._tick = None
        self.handle(ev.Tick())

    # ------------------------------------------------------------------ effects

    def _perform(self, effect: ev.GatewayEffect) -> None:
        match effect:
            case ev.SendRequest():
                self._send_request(effect)
            case ev.DropAttempt():
                self._drop(effect.attempt)
            case ev.SendHead():
                self._send_head(effect)
            case ev.SendAnswer():
                self._send_answer(effect)
            case ev.EndAnswer() | ev.AbortAnswer() | ev.AnswerError():
                self._finish(effect)
            case ev.GreetEngine():
                self._start(self._greet(effect))
            case ev.WantEngine():
                self._want()
            case ev.DemandChanged():
                self._demand()
            case ev.GatewayRecord():
                self._note(effect)
            case _:
                raise NotImplementedError(type(effect).__name__)  # our own fault: it crashes

    def _send_request(self, effect: ev.SendRequest) -> None:
        request = self.requests[effect.request]
        upstream = Upstream(
            self,
            self.core.attempt(effect.attempt),
            request.client,
            request.for_engine(effect.journal, self._queues.name(effect.attempt)),
            is_to_head=request.http.is_to_head,
        )
        request.upstream = self.upstreams[effect.attempt] = upstream
        request.engine = effect.engine
        # A request that must not be sent twice gets no connection that may end at any time.
        reusable = request.may_be_sent_twice
        idle = self.idle_connections.take((effect.engine, effect.token)) if reusable else None
        if idle is None or not upstream.reuse(idle):
            self.connect(upstream)

    async def _greet(self, effect: ev.GreetEngine) -> None:
        try:
            hello = await greet(engine_http_socket(self._directory, effect.engine))
        except (OSError, ValueError) as error:
            why = (str(error) or type(error).__name__)[:QUOTED_CHARS_MAX]
            self.handle(ev.HelloFailed(effect.greeting, f"{effect.engine} gave no hello: {why}"))
        else:
            self._queues.greeted(effect.engine)
            self.handle(ev.HelloCame(effect.greeting, hello))

    def _drop(self, attempt: int) -> None:
        upstream = self.upstreams.pop(attempt, None)
        if upstream is not None:
            upstream.drop()

    def _send_head(self, effect: ev.SendHead) -> None:
        request, upstream = self.requests[effect.request], self.upstreams[effect.attempt]
        client, response = request.client, upstream.response
        request.continuation = effect.continuation
        if response.status == 101:
            upstream.send(client.open_tunnel(request.head_for_client(upstream, b"")))
        else:
            is_chunked = not request.http.is_http_1_0
            if not is_chunked:
                request.http.keeps_alive = False  # only the end of the connection ends the body
            framing = b"transfer-encoding: chunked" if is_chunked else b""
            client.begin(
                request.head_for_client(upstream, framing),
                is_chunked=is_chunked,
                has_body=response.has_body,
            )
        upstream.pass_on()

    def _send_answer(self, effect: ev.SendAnswer) -> None:
        request, upstream = self.requests[effect.request], self.upstreams[effect.attempt]
        response, body = upstream.response, b"".join(upstream.held)
        request.continuation = response.continuation
        length = b"%d" % len(body) if response.has_body else response.declared_length
        framing = b"" if length is None else b"content-length: " + length
        head = request.head_for_client(upstream, framing)
        self._forget(request, len(body))
        request.client.answer(head + body if response.has_body else head)

    def _finish(self, effect: ev.EndAnswer | ev.AbortAnswer | ev.AnswerError) -> None:
        request = self.requests[effect.request]
        client = request.client
        self._forget(request, client.sent_bytes)
        match effect:
            case ev.EndAnswer():
                client.end_body()
            case ev.AbortAnswer():
                client.cut(b"" if request.http.is_tunnel else effect.event)
            case ev.AnswerError():
                request.status = effect.status
                client.answer(
                    error_response(
                        effect.status,
                        effect.body,
                        request.http.request_id,
                        keeps_alive=request.http.keeps_alive and not self.is_final,
                        retry_after_s=effect.retry_after_s,
                        is_to_head=request.http.is_to_head,
                    )
                )

    def _forget(self, request: OpenRequest, sent_bytes: int) -> None:
        """Its client is free for the next one; the core's last record of it is still to come."""
        request.sent_bytes = sent_bytes
        if request.upstream is not None:
            self._drop(request.upstream.attempt.number)
        self._by_client.pop(request.client, None)
        self._paused.pop(request.number, None)

    def _note(self, record: ev.GatewayRecord) -> None:
        self._accounts.note(record)
        match record:
            case ev.StreamPaused():
                self._paused[record.request] = self.now_ms()
            case ev.StreamResumed():
                self._paused.pop(record.request, None)
            case ev.RequestRequeued():
                self._accounts.requeued(self.requests[record.request])
            case ev.RequestEnded():
                self._paused.pop(record.request, None)
                self._accounts.ended(self.requests.pop(record.request), record, self.now_ms())
                if not self.requests:
                    self._quiet_since_ms = self.now_ms()
                    self._idle()

    # ------------------------------------------------------------------ time

    def sweep(self, keepalive_ms: float) -> None:
        """Once a second: comments into paused streams, heads that do not end, old connections."""
        self.idle_connections.close_old()
        now_ms = self.now_ms()
        if keepalive_ms:
            for number, sent_ms in self._paused.items():
                client = self.requests[number].client
                if now_ms - sent_ms >= keepalive_ms and not client.is_full:
                    self._paused[number] = now_ms
                    client.send_body(KEEPALIVE_COMMENT)
        for upstream in tuple(self.upstreams.values()):
            since_ms = upstream.head_since_ms
            if since_ms is not None and now_ms - since_ms > HEAD_MS:
                upstream.drop()
                self.handle(ev.AnswerBroke(upstream.attempt.number, ev.BreakCause.GARBAGE))

    @property
    def quiet_ms(self) -> float:
        """For how long there was no request."""
        return 0.0 if self.requests else self.now_ms() - self._quiet_since_ms

    @property
    def hello(self) -> Hello | None:
        return self.core.hello

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class EngineQueues:
    """One open page for each engine; the next incarnation's takes its place."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._process = int.from_bytes(os.urandom(8))  # attempts of other processes are not ours
        self._pages: dict[str, QueueReader] = {}

    def name(self, attempt: int) -> bytes:
        """What an engine is told that this attempt is called."""
        return attempt_name(self._process, attempt)

    def greeted(self, engine: str) -> None:
        """Open its page, if it has one."""
        old = self._pages.pop(engine, None)
        if old is not None:
            old.close()
        with contextlib.suppress(OSError):  # then each of its requests is charged with its death
            self._pages[engine] = QueueReader(engine_queue(self._directory, engine))

    def queued(self) -> frozenset[int]:
        """Attempts that no engine has scheduled."""
        found = (page.queued(self._process) for page in self._pages.values())
        return frozenset().union(*found)
