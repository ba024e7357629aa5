"""All that the gateway has open: clients' connections, their requests, and connections to engines.

`gateway.core` decides what happens to a request, and `GatewayExchange` performs it: it sends
requests to engines, and answers to clients. Nothing here blocks. Performing an effect may bring the
next event at once (an answer is out, so the client's next request is served), and the journal in an
effect holds until the next event. So events wait in `_inbox` while effects are performed.

`EngineQueues` reads what an engine had queued when it died, from the page of each engine that has
greeted this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec.structs import replace

from gateway.core import events as ev
from gateway.core.client_request import RequestState
from gateway.core.fleet import Fleet
from gateway.core.lanes import Lanes
from gateway.core.machine import TICK_MS
from gateway.schema import GatewayLoad, GatewayUpstream
from gateway.server.accounts import Accounts, Tell
from gateway.server.client import WRITE_BUFFER_BYTES, ClientConnection, ServiceListener, take_over
from gateway.server.endpoints import Endpoints, Wishes
from gateway.server.requests import (
    BODY_BYTES_MAX,
    CONTINUATION_ID,
    MARK,
    HttpRequest,
    Intake,
)
from gateway.server.responses import POD, OwnAnswer, greet
from gateway.server.settings import GatewaySettings
from gateway.server.upstream import (
    IdleConnections,
    PrefillAhead,
    ReplayTurns,
    Upstream,
)
from plumbing.pod.paths import engine_http_socket, engine_queue
from plumbing.pod.queue_page import QueueReader, attempt_name
from plumbing.service.clock import SystemClock, moment
from plumbing.wire.fds import OwnedFd
from pool.core.events import ModelDemand
from pool.messages import PooledModel

PROBLEM_CHARS_MAX = 4096  # an engine says what it likes
BODIES_SHARE = 0.75  # of the memory, which bodies that are being sent may keep
FLUSH_S = 0.5  # for the errors of requests that are cut at the end
BEGIN_S = 1.0  # after its connect a client sends its first request within milliseconds
LOOK_S = 0.01  # between two looks at whether everything has ended
SWEEP_S = 1.0  # a deadline is noticed this much late at most
QUOTED_CHARS_MAX = 300  # of what is wrong with a hello, which may quote it
KEEPALIVE_COMMENT = b": keepalive\n\n"
PARKED = (RequestState.PARKED, RequestState.RESUMING)
EXPIRED = ("pool.not_awake", "pool.busy")


ConnectPod: TypeAlias = "Callable[[str, asyncio.Protocol, Callable[[], object]], object]"


class GatewayExchange:
    """Of one gateway."""

    def __init__(
        self,
        settings: GatewaySettings,
        tell: Tell,
        *,
        fleet: Fleet | None = None,
        demand_changed: Callable[[], object] = lambda: None,
    ) -> None:
        """`demand_changed`: a request waits for an engine that sleeps, or the demand of a pool's
        models may be another one.

        Raises:
            UsageError: `gateway.bad_tls` or `gateway.bad_api_keys`, files that cannot be used.
        """
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.keys, self.certificate = settings.open_files()
        self.accounts = Accounts(tell, has_access_log=settings.access_log)
        self.core = fleet or Lanes(settings.rules, settings.lanes, settings.queue_max)
        # Of a front: has the protocol connected to a pod, or calls the last argument.
        self.connect_pod: ConnectPod | None = None
        self.signature = b""  # of a pod, for fronts
        self.on_load: Callable[[], object] = lambda: None  # requests have come, or have ended
        self.on_news: Callable[[], object] = lambda: None  # another engine may serve
        self.owes_fronts: Callable[[], bool] = lambda: False  # bytes that wait in this process
        self.outbox: Sequence[ev.GatewayEffect] = self.core.outbox
        self.memory_bytes_max = settings.rules.memory_bytes_max
        check = None if self.keys is None else self.keys.check
        self.intake = Intake(self.memory_bytes_max, self._body_bytes_max, check)
        self.is_final = False  # no engine takes requests any more: every one was told to end
        self.endpoints = Endpoints(self.core, settings, lambda: self.is_stopping)
        self.clients: set[ClientConnection] = set()
        self.swept = [self.clients]  # and those of fronts: whose deadlines are looked at
        self.requests: dict[int, HttpRequest] = {}  # by the core's number
        self.upstreams: dict[int, Upstream] = {}  # by the number of their attempt
        self.idle_connections = IdleConnections()
        self.replays = ReplayTurns()
        self._demand_changed = demand_changed
        self._listener: ServiceListener | None = None
        self._is_stopping = False
        self._begin_by_s = 0.0  # new connections may still send their first request
        self._idle_clients: dict[ClientConnection, None] = {}  # longest idle first
        self._client_of: dict[int, ClientConnection] = {}  # of each request
        self._quiet_since_ms = 0.0  # long ago: a fresh gateway keeps no engine awake
        self._inbox: deque[ev.GatewayEvent] = deque()
        self._is_performing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._tick: asyncio.TimerHandle | None = None
        self._last_number = 0
        self._queues = EngineQueues(settings.directory)
        self._sweeping = self._loop.call_later(SWEEP_S, self._sweep)

    # ------------------------------------------------------------------ for the gateway around it

    @property
    def is_accepting(self) -> bool:
        return self._listener is not None and self._listener.is_accepting

    @property
    def is_stopping(self) -> bool:
        """Whether the next request of a client is better sent elsewhere."""
        return self._is_stopping or self.is_final

    def accept(self, listening: OwnedFd) -> None:
        """Take this socket and accept from now on, in place of an earlier one. It is shared with
        other processes: it is closed, never shut down."""
        self._is_stopping = False
        if self._listener is not None:
            self._listener.stop()
        tls = None if self.certificate is None else self.certificate.get
        self._listener = ServiceListener(listening, self, tls)

    def release(self) -> None:
        """Accept no more, close our copy of the socket, and no request follows on connections that
        are open."""
        if self._listener is not None:
            self._listener.stop()
        self._close_idle()

    def limit_memory(self, memory_bytes: int) -> None:
        """From now on its requests may have so much; those that have more lose nothing."""
        self.memory_bytes_max = max(memory_bytes, self.core.shared.memory_bytes)
        self.intake.bytes_max = self.core.shared.memory_bytes_max = self.memory_bytes_max

    def told(self, event: ev.GatewayEvent) -> None:
        """A word about engines, or a door. Connections that have led to one before are not used
        again."""
        match event:
            case ev.EngineGranted():
                self.is_final = False
                event = replace(event, queued=self._queues.queued())
            case ev.NobodyGranted():
                self.is_final = event.is_final
                if event.is_final and self._listener is not None:
                    self._listener.resume()
        self.idle_connections.close_old(0.0)
        self.handle(event)
        self.on_news()

    def set_model_doors(self, models: Mapping[str, PooledModel]) -> None:
        """What the pool says of each model."""
        self.endpoints.said = dict(models)
        for model, said in models.items():
            if said.door is not None:
                self.told(ev.DoorSet(model, said.number, said.door, said.rules))
        self.on_news()

    def forget_door_numbers(self) -> None:
        """The pool is gone: another one counts its doors anew. The doors themselves hold."""
        for lane in self.core.lanes.values():
            lane.door_number = 0

    def demand(self) -> dict[str, ModelDemand]:
        """What there is for each model of a pool."""
        return self.core.demand(self.now_ms())

    async def stop(self, budget_ms: float) -> None:
        """Close idle connections, and return once every request has ended; after `budget_ms` those
        that are left get an error. Called again, the shorter budget counts. New connections wait
        for another gateway, or are refused if every engine was told to end."""
        if self._listener is not None and not self.is_final:
            self._listener.pause()
        self._close_idle()
        if not await self._until_idle(budget_ms / 1000):
            self.handle(ev.GatewayEnds())
            await self._until_idle(FLUSH_S)
        self.close()

    def close(self) -> None:
        """End all connections now."""
        if self._listener is not None:
            self._listener.stop()
        for client in tuple(self.clients):
            client.abort()
        self.idle_connections.close_old(0.0)
        self.accounts.tell()
        self._sweeping.cancel()

    @property
    def problem(self) -> str | None:
        """A sentence about what cannot be done now."""
        parts = (self._listener, self.keys, self.certificate)
        found = [each.problem for each in parts if each is not None]
        return "; ".join(each for each in found if each)[:PROBLEM_CHARS_MAX] or None

    def load(self) -> GatewayLoad:
        now_ms, found = self.now_ms(), list(self.core.shared.everything())
        states = Counter(str(each.state) for each in found)
        parked = [each.paused_since_ms or now_ms for each in found if each.state in PARKED]
        return GatewayLoad(
            connections=len(self.clients),
            in_flight=len(self.requests),
            waiting=states["waiting"],
            parked=len(parked),
            parked_oldest_ms=now_ms - min(parked, default=now_ms),
            replaying=states["replaying"],
            suspects=sum(each.is_suspect for each in found),
            memory_bytes=self.core.shared.memory_bytes,
        )

    def upstream(self) -> GatewayUpstream | None:
        """The engine that requests go to; None in a pool, where there are several."""
        lane = self.core.alone
        if lane is None or lane.target.grant is None or not lane.target.is_granted:
            return None
        grant, hello = lane.target.grant, lane.target.hello
        problem = (lane.waits_for or None) if hello is None else hello.problem
        return GatewayUpstream(
            engine=grant.engine,
            token=grant.token,
            **moment(lane.target.granted_ms, SystemClock()),
            is_connected=hello is not None,
            continuation_id="" if hello is None else hello.continuation_id,
            continuation=None if hello is None else hello.continuation,
            problem=problem and problem[:PROBLEM_CHARS_MAX],
        )

    @property
    def quiet_ms(self) -> float:
        """For how long there was no request."""
        return 0.0 if self.requests else self.now_ms() - self._quiet_since_ms

    def now_ms(self) -> float:
        return time.monotonic() * 1000

    # ------------------------------------------------------------------ for clients' connections

    def closed(self, client: ClientConnection) -> None:
        self.clients.discard(client)
        self._idle_clients.pop(client, None)

    def failed(self, client: ClientConnection, error: OSError) -> None:
        """It could not be taken over, as is usual on a public port."""
        self.closed(client)

    def became_idle(self, client: ClientConnection) -> None:
        self._idle_clients.pop(client, None)
        self._idle_clients[client] = None

    def close_an_idle_one(self) -> bool:
        """Close the connection that has been idle longest, for a new one; False: none is idle."""
        for client in tuple(self._idle_clients):
            del self._idle_clients[client]
            if client.is_idle:
                self.clients.discard(client)
                client.abort()
                return True
        return False

    def came(self, client: ClientConnection, request: HttpRequest) -> None:
        """A request has been read whole: answer it here, or hand it to the core."""
        self._idle_clients.pop(client, None)
        found = self.endpoints.find(request)
        if isinstance(found, Wishes):
            self._admit(client, request, found)
        elif isinstance(found, OwnAnswer):
            if found.code:
                self.accounts.refused(found.code, found.status, request.request_id)
            client.answer_own(found, request)
        else:
            self._start(self._answer_later(client, request, found))

    def _admit(self, client: ClientConnection, request: HttpRequest, wishes: Wishes) -> None:
        self._last_number = number = self._last_number + 1
        request.number, request.model, request.peer = number, wishes.model, client.peer
        request.came_ms = self.now_ms()
        self.requests[number], self._client_of[number] = request, client
        self.handle(
            ev.RequestCame(
                number,
                request.path,
                request.body_bytes,
                request.may_be_sent_twice,
                request.wants_stream,
                wishes.model,
                wishes.priority,
                wishes.keep_alive_ms,
                request.passing,
                request.journal_tokens,
                request.key if self.connect_pod and self._settings.uses_keys else b"",
            )
        )
        request.is_fresh = False  # what has waited for an engine is not the gateway's own time

    async def _answer_later(
        self, client: ClientConnection, request: HttpRequest, answer: Awaitable[OwnAnswer]
    ) -> None:
        found = await answer
        if client.request is request:  # else the client has left
            client.answer_own(found, request)

    def left(self, request: HttpRequest) -> None:
        """Its client has left."""
        if request.number:
            self.handle(ev.ClientLeft(request.number, request.model))

    def drained(self, request: HttpRequest) -> None:
        """A client that was full has room again."""
        if (upstream := self.upstreams.get(request.attempt)) is not None:
            upstream.resume()

    def _body_bytes_max(self) -> int:
        """In a pool it is known whose body it is that comes only once it is whole."""
        hello = None if self.core.alone is None else self.core.alone.target.hello
        return BODY_BYTES_MAX if hello is None else hello.body_bytes_max

    # ------------------------------------------------------------------ for connections to engines

    def connect(self, upstream: Upstream) -> None:
        """Send its request on a connection of its own."""
        attempt = upstream.attempt
        unreached = ev.AnswerEnded(attempt.number, ev.BreakCause.UNREACHED)
        if self.connect_pod is not None:
            self.connect_pod(attempt.engine, upstream, lambda: self.handle(unreached))
            return
        try:
            path = engine_http_socket(self._settings.directory, attempt.engine)
            connection = upstream.connect(path)
        except OSError:
            self.handle(unreached)
        else:
            take_over(connection, upstream, upstream.connection_lost)

    def handle(self, event: ev.GatewayEvent) -> None:
        self._inbox.append(event)
        self.perform_outbox()

    def perform_outbox(self) -> None:
        """Perform what follows from events, and what the core has decided while it saw bytes."""
        if self._is_performing:
            return
        self._is_performing = True
        while self._inbox or self.outbox:
            event = self._inbox.popleft() if self._inbox else None
            for effect in self.core.handle(event, self.now_ms()):
                self._perform(effect)
        self._is_performing = False
        self.on_load()
        if self._tick is None and self.core.needs_ticks:
            self._tick = self._loop.call_later(TICK_MS / 1000, self._ticked)

    def _ticked(self) -> None:
        self._tick = None
        self.handle(ev.Tick())

    # ------------------------------------------------------------------ effects

    def _perform(self, effect: ev.GatewayEffect) -> None:
        match effect:
            case ev.SendRequest():
                self._send_request(effect)
            case ev.Prefill():
                self._prefill(effect)
            case ev.DropAttempt():
                self._drop(effect.attempt)
            case ev.SendHead():
                self._send_head(effect)
            case ev.RequestEnded():
                self._end(effect)
            case ev.GreetEngine():
                self._start(self._greet(effect))
            case ev.DemandChanged():
                self._demand_changed()
            case ev.GatewayRecord():
                self.accounts.note(effect)
            case _:
                raise NotImplementedError(type(effect).__name__)  # our own fault: it crashes

    def _send_request(self, effect: ev.SendRequest) -> None:
        request = self.requests[effect.request]
        request.attempt, request.engine = effect.attempt, effect.engine
        attempt = self.core.attempt(effect.attempt)
        self.upstreams[effect.attempt] = upstream = Upstream(
            self,
            attempt,
            self._client_of[effect.request],
            request.for_engine(
                effect.journal,
                MARK % self._queues.name(effect.attempt)
                if self.connect_pod is None
                else _for_pod(request, attempt.owner.continuation_id if effect.journal else ""),
            ),
            is_to_head=request.is_to_head,
            is_to_pod=self.connect_pod is not None,
        )
        # A request that must not be sent twice gets no connection that may end at any time.
        reusable = request.may_be_sent_twice
        idle = self.idle_connections.find((effect.engine, effect.token)) if reusable else None
        if idle is None:
            self.connect(upstream)
        else:
            upstream.reuse(idle)
        if request.is_fresh:
            self.accounts.added.observe((self.now_ms() - request.came_ms) / 1000)

    def _prefill(self, effect: ev.Prefill) -> None:
        assert self.connect_pod is not None
        request = self.requests[effect.request]
        headers = _for_pod(request, effect.continuation_id)
        parts = request.for_engine(effect.journal, headers)

        def done(*, is_broken: bool = False) -> None:
            self.handle(ev.Prefilled(effect.request, is_broken))

        self.connect_pod(effect.pod, PrefillAhead(parts, len(effect.journal.tokens), done), done)

    async def _greet(self, effect: ev.GreetEngine) -> None:
        try:
            hello = await greet(engine_http_socket(self._settings.directory, effect.engine))
        except (OSError, ValueError) as error:
            why = (str(error) or type(error).__name__)[:QUOTED_CHARS_MAX]
            self.handle(
                ev.HelloCame(effect.greeting, None, f"{effect.engine} gave no hello: {why}")
            )
        else:
            self._queues.greeted(effect.engine)
            self.handle(ev.HelloCame(effect.greeting, hello))
            self.on_news()

    def _drop(self, attempt: int) -> None:
        upstream = self.upstreams.pop(attempt, None)
        if upstream is not None:
            upstream.drop()

    def _send_head(self, effect: ev.SendHead) -> None:
        request, upstream = self.requests[effect.request], self.upstreams[effect.attempt]
        client, response = self._client_of[effect.request], upstream.response
        request.status, request.continuation = response.status, effect.continuation
        signed = self._signed(request, upstream)
        is_chunked = not request.is_http_1_0
        if not is_chunked:
            request.keeps_alive = False  # only the end of the connection ends the body
        framing = b"transfer-encoding: chunked" if is_chunked else b""
        client.begin(
            response.head_for_client(request, framing, signed),
            is_chunked=is_chunked and response.has_body,
        )
        upstream.pass_on()

    def _signed(self, request: HttpRequest, upstream: Upstream) -> bytes:
        """What a front wants to know of who answers, and which pod it is for the front's client."""
        if request.passing is None:
            pod = upstream.response.pod
            return b"%b: %b" % (POD, pod) if pod else b""
        request.continuation = upstream.response.continuation
        return b"%b: %b\r\n%b: %b" % (
            *(POD, self.signature),
            *(CONTINUATION_ID, upstream.attempt.continuation_id.encode()),
        )

    def _end(self, effect: ev.RequestEnded) -> None:
        """The request is over; its client is free for the next one once it has its answer."""
        request, client = self.requests[effect.request], self._client_of.pop(effect.request)
        request.sent_bytes, answer = client.sent_bytes, b""
        if effect.attempt:
            answer, request.sent_bytes = self._held_answer(request, self.upstreams[effect.attempt])
        if effect.ending is ev.Ending.REFUSED and effect.why is not None:
            request.status = effect.why.status
            request.keeps_alive = request.keeps_alive and not self.is_final
        self._drop(request.attempt)
        self.accounts.ended(self.requests.pop(request.number), effect, self.now_ms())
        if not self.requests:
            self._quiet_since_ms = self.now_ms()
        match effect.ending:
            case ev.Ending.WHOLE if answer:
                client.answer(answer)
            case ev.Ending.WHOLE:
                client.end_body()
            case ev.Ending.BROKEN:
                client.cut(effect.event)
            case ev.Ending.REFUSED:
                assert effect.why is not None
                # A front asks no other pod for what has waited as long as it may.
                is_final = effect.code in EXPIRED and request.passing is not None
                signed = b"%b: %b" % (POD, self.signature) if is_final else b""
                own = OwnAnswer.of(effect.why, request.path)
                client.answer_own(own._replace(signed=signed), request)

    def _held_answer(self, request: HttpRequest, upstream: Upstream) -> tuple[bytes, int]:
        """The answer that is held whole, and the size of its body."""
        response, body = upstream.response, b"".join(upstream.held)
        request.status, request.continuation = response.status, response.continuation
        length = b"%d" % len(body) if response.has_body else response.declared_length
        framing = b"" if length is None else b"content-length: " + length
        head = response.head_for_client(request, framing, self._signed(request, upstream))
        return head + body if response.has_body else head, len(body)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ stopping

    @property
    def _is_busy(self) -> bool:
        """Who connects now and sends nothing must not hold up a stop for longer than `BEGIN_S`."""
        may_begin = time.monotonic() < self._begin_by_s
        return (
            bool(self.requests)
            or self.owes_fronts()
            or any(
                not client.is_idle or (may_begin and client.may_begin) for client in self.clients
            )
        )

    def _close_idle(self) -> None:
        """No request follows on open connections, but the first one of a new connection, whose
        bytes may be here already: the kernel resets a connection that is closed with bytes
        unread."""
        if not self._is_stopping:
            self._is_stopping, self._begin_by_s = True, time.monotonic() + BEGIN_S
        for client in tuple(self._idle_clients):
            client.close_idle()

    async def _until_idle(self, budget_s: float) -> bool:
        end_s = time.monotonic() + budget_s
        while self._is_busy:
            if time.monotonic() >= end_s:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    # ------------------------------------------------------------------ once a second

    def _sweep(self) -> None:
        self._sweeping = self._loop.call_later(SWEEP_S, self._sweep)
        now_s = time.monotonic()
        for clients in self.swept:
            for client in [each for each in clients if each.deadline_s <= now_s]:
                client.expire()
        self._refuse_largest_bodies()
        self._cut_slowest()
        self.idle_connections.close_old(self.idle_connections.idle_s)
        self._fill_pauses(self._settings.keepalive_comments_ms)
        self.accounts.tell()

    def _refuse_largest_bodies(self) -> None:
        """A body may be sent slowly, so a few that are large could hold all memory for hours, and
        every other request would be refused. Near the limit they go first."""
        limit_bytes = BODIES_SHARE * self.intake.bytes_max
        if self.intake.bytes <= limit_bytes:
            return
        for client in sorted(self.clients, key=lambda each: each.arriving_bytes, reverse=True):
            if self.intake.bytes <= limit_bytes:
                return
            client.give_up_body()

    def _cut_slowest(self) -> None:
        """A whole answer waits here for a client that reads slowly, and is no request any more. All
        of them together count as the cap does: above it those that hold most are cut."""
        waiting = {each: each.unsent_bytes for clients in self.swept for each in clients}
        held_bytes = self.core.shared.memory_bytes + self.intake.bytes
        excess_bytes = held_bytes + sum(waiting.values()) - self.memory_bytes_max
        for client in sorted(waiting, key=waiting.__getitem__, reverse=True):
            if excess_bytes <= 0 or waiting[client] <= WRITE_BUFFER_BYTES:
                return
            excess_bytes -= waiting[client]
            self.accounts.limits["unread_answers"] += 1
            client.abort()

    def _fill_pauses(self, keepalive_ms: float) -> None:
        """Send comments into paused streams, where that is wanted."""
        now_ms = self.now_ms()
        for each in self.core.shared.everything() if keepalive_ms else ():
            if each.paused_since_ms is None:
                continue
            request, client = self.requests[each.number], self._client_of[each.number]
            quiet_ms = now_ms - max(each.paused_since_ms, request.filled_ms)
            if quiet_ms >= keepalive_ms and not client.is_full:
                request.filled_ms = now_ms
                client.send_body(KEEPALIVE_COMMENT)


def _for_pod(request: HttpRequest, continuation_id: str) -> bytes:
    """The headers for a pod: what its client wants, and who alone can continue a stream."""
    lines = [b"%b: %b\r\n" % each for each in request.named.items()]
    if continuation_id:
        lines.append(b"%b: %b\r\n" % (CONTINUATION_ID, continuation_id.encode()))
    return b"".join(lines)


class EngineQueues:
    """One open page for each engine; the next incarnation's takes its place."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._process = int.from_bytes(os.urandom(8))  # attempts of other processes are not ours
        self._pages: dict[str, QueueReader] = {}

    def name(self, attempt: int) -> bytes:
        """What an engine is told that this attempt is called."""
        return attempt_name(self._process, attempt).hex().encode()

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
