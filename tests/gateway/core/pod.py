"""A pod in virtual time: the gateway's core, engines that live and die, and clients.

It is the shell of a simulation: it performs every effect, delivers bytes one group at a time, and
checks with each event what must never happen. `Shell` is what every such shell does.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core import events as ev
from gateway.core.client_request import Attempt
from gateway.core.machine import REPLAYS, TICK_MS, Gateway
from plumbing.gateway_protocol import Continuation, Hello
from tests.gateway.core.model import PATHS, Play, read_answer, whole_output

ERA = "00112233aabbccdd"
OUTCOMES = {
    ev.Ending.WHOLE: "whole",
    ev.Ending.BROKEN: "aborted",
    ev.Ending.REFUSED: "error",
}


@dataclass
class Client:
    """One request and what became of it."""

    number: int
    kind: str
    prompt: str
    max_tokens: int
    is_poison: bool = False
    is_stream: bool = True
    body_bytes: int = 100
    sent: bytearray = field(default_factory=bytearray)
    head: Continuation | None = None
    outcome: str = ""  # whole, aborted, error
    status: int = 0
    ended_ms: float = 0.0
    asked: list[tuple[float, str, int, int | None]] = field(default_factory=list)
    resumed: list[ev.StreamResumed] = field(default_factory=list)
    ending: ev.RequestEnded | None = None

    @property
    def answer(self):
        return read_answer(bytes(self.sent))

    def check_whole(self) -> None:
        """It is what an uninterrupted run gives, and the client saw one answer."""
        answer = self.answer
        tokens = whole_output(self.prompt, self.max_tokens)
        uninterrupted = Play(self.kind, self.prompt, self.max_tokens, random.Random(1))
        groups = [events for events, _, _ in uninterrupted.groups()]
        expected = read_answer(b"".join([*groups, uninterrupted.tail()]))
        assert self.outcome == "whole"
        assert answer.text == expected.text
        assert answer.finish == expected.finish
        assert answer.usage == expected.usage == [len(tokens)]
        assert (answer.openings, answer.ends) == (expected.openings, 1)
        assert len(answer.ids) == len(expected.ids)
        assert answer.errors == []
        if answer.sequence:
            first = answer.sequence[0]
            assert answer.sequence == list(range(first, first + len(answer.sequence)))
        assert self.ending is not None
        assert self.ending.tokens == len(tokens)
        assert 0 <= sum(each.pause_ms for each in self.resumed) <= self.ended_ms


@dataclass
class Upstream:
    """One attempt at an engine: a play, delivered step by step."""

    attempt: int
    client: Client
    engine: str
    token: int
    core: Attempt
    is_open: bool = True
    made: int = 0


class Shell:
    """Time, and the clients of the core `gateway`. What goes to engines is for `act`."""

    _is_ticking = False
    tick_ms, now_ms = TICK_MS, 0.0

    def __init__(self, seed: int, gateway: Any) -> None:
        self.rng, self.gateway = random.Random(seed), gateway
        self.clients: dict[int, Client] = {}  # by the number of their request
        self.records: list[ev.GatewayRecord] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, ms: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_ms + ms, next(self._count), what))

    def run(self, until_ms: float = 1e9, is_over: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is left to happen."""
        while self._queue and self._queue[0][0] <= until_ms:
            if is_over():
                return
            due_ms, _, what = heapq.heappop(self._queue)
            self.now_ms = max(self.now_ms, due_ms)
            what()
        self.now_ms = max(self.now_ms, until_ms) if self._queue else self.now_ms

    def ask(self, kind: str = "chat", max_tokens: int = 24, **more: object) -> Client:
        number = len(self.clients) + 1
        prompt = str(more.pop("prompt", f"prompt {number}"))
        client = Client(number, kind, prompt, max_tokens, **more)  # type: ignore[arg-type]
        self.clients[number] = client
        self.handle(self._came(client))
        return client

    def _came(self, client: Client) -> ev.RequestCame:
        path = PATHS.get(client.kind, client.kind)
        return ev.RequestCame(
            client.number, path, client.body_bytes, path in PATHS.values(), client.is_stream
        )

    def leave(self, client: Client) -> None:
        client.outcome = "left"
        self.handle(ev.ClientLeft(client.number))

    def handle(self, event: ev.GatewayEvent) -> None:
        self.perform(self.gateway.handle(event, self.now_ms))

    def perform(self, effects: Sequence[ev.GatewayEffect]) -> None:
        for effect in effects:
            match effect:
                case ev.SendHead():
                    client = self.clients[effect.request]
                    assert client.head is None
                    client.head = effect.continuation
                case ev.RequestEnded():
                    self.end(effect)
                case ev.GatewayRecord():
                    self.record(effect)
                case _:
                    self.act(effect)
        if self.gateway.needs_ticks and not self._is_ticking:
            self._is_ticking = True
            self.at(self.tick_ms, self._tick)

    def act(self, effect: ev.GatewayEffect) -> None: ...

    def _tick(self) -> None:
        self._is_ticking = False
        self.handle(ev.Tick())

    def record(self, record: ev.GatewayRecord) -> None:
        self.records.append(record)

    def end(self, effect: ev.RequestEnded) -> None:
        client = self.clients[effect.request]
        client.ending = effect
        client.sent += effect.event
        if effect.ending is ev.Ending.REFUSED:
            assert client.head is None
            client.status = effect.why.status
        if effect.ending is not ev.Ending.CLIENT_GONE:
            assert not client.outcome, f"{client.outcome}, then {effect.ending}"
            client.outcome, client.ended_ms = OUTCOMES[effect.ending], self.now_ms


class Pod(Shell):
    """Engines are named by their tokens: e1 holds token 1. One at a time is alive and granted."""

    is_alive = misspells = False
    tells_breaks = True  # connections of a dead engine are seen to break
    token = deaths = resuming_max = 0
    refusals, refused_with = 0, 503  # so many resumes are answered with it first
    continuation_id, continuation = "c" * 16, Continuation.EXACT
    queued: frozenset[int] = frozenset()  # of the engine that died last

    def __init__(
        self,
        seed: int,
        rules: ev.GatewayRules | None = None,
        *,
        slots: int | None = None,
        fixes_ids: bool = False,
        step_ms: float = 5.0,
    ) -> None:
        super().__init__(seed, Gateway(rules or ev.GatewayRules()))
        self.upstreams: dict[int, Upstream] = {}
        self.fixes_ids, self.step_ms = fixes_ids, step_ms
        self.slots = slots  # requests that run at once; the others are queued
        self.running: set[int] = set()  # attempts
        self.on_group: Callable[[Upstream], None] = lambda upstream: None
        self.on_ask: Callable[[Upstream], None] = lambda upstream: None
        self.asks: list[tuple[Client, int]] = []  # with the token of the engine asked

    # ---- what happens

    def grant(self) -> None:
        """The next engine is granted and serves."""
        self.token += 1
        self.is_alive = True
        self.handle(ev.EngineGranted(f"e{self.token}", self.token, ERA, queued=self.queued))

    def kill(self, fence_ms: float = 60.0) -> None:
        """The engine dies; the next one is granted after the fence."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.deaths += 1
        if self.slots is not None:
            self.queued = frozenset(self.upstreams.keys() - self.running)
        if self.tells_breaks:
            for upstream in list(self.upstreams.values()):
                self.break_off(upstream)
        self.at(fence_ms, self.grant)

    def break_off(self, upstream: Upstream, cause: ev.BreakCause = ev.BreakCause.CLOSED) -> None:
        upstream.is_open = False
        self.handle(ev.AnswerEnded(upstream.attempt, cause))

    # ---- what follows

    def act(self, effect: ev.GatewayEffect) -> None:
        match effect:
            case ev.GreetEngine():
                self.at(1.0, lambda: self._greet(effect))
            case ev.SendRequest():
                self._ask(effect)
            case ev.DropAttempt():
                if (upstream := self.upstreams.pop(effect.attempt, None)) is not None:
                    upstream.is_open = False

    def record(self, record: ev.GatewayRecord) -> None:
        super().record(record)
        if isinstance(record, ev.StreamResumed):
            self.clients[record.request].resumed.append(record)

    def _greet(self, effect: ev.GreetEngine) -> None:
        if not self._serves(effect.engine, effect.token):
            self.handle(ev.HelloCame(effect.greeting, None, "connection refused"))
            return
        hello = Hello(effect.engine, effect.token, self.continuation_id, self.continuation, 1 << 20)
        self.handle(ev.HelloCame(effect.greeting, hello))

    def _attempt(self, number: int) -> Attempt:
        return self.gateway.attempts[number]

    # ---- engines

    def _serves(self, engine: str, token: int) -> bool:
        return self.is_alive and token == self.token

    def _ask(self, effect: ev.SendRequest) -> None:
        client = self.clients[effect.request]
        others = [each for each in self.upstreams.values() if each.client is client]
        assert not others, "a request at two engines"
        journal = None if effect.journal is None else list(effect.journal.tokens)
        if journal is not None:
            assert sum(effect.journal.chunks) == len(journal)
        size = None if journal is None else len(journal)
        client.asked.append((self.now_ms, effect.engine, effect.token, size))
        core = self._attempt(effect.attempt)
        upstream = Upstream(effect.attempt, client, effect.engine, effect.token, core)
        self.upstreams[effect.attempt] = upstream
        self.asks.append((client, effect.token))
        replays = sum(each.state in REPLAYS for each in self.gateway.shared.everything())
        self.resuming_max = max(self.resuming_max, replays)
        self.on_ask(upstream)
        self.at(1.0, lambda: self._answer(upstream, journal))

    def _answer(self, upstream: Upstream, journal: list[int] | None) -> None:
        if not upstream.is_open:
            return
        if not self._serves(upstream.engine, upstream.token):
            upstream.is_open = False
            self.handle(ev.AnswerEnded(upstream.attempt, ev.BreakCause.UNREACHED))
            return
        if self.slots is not None and upstream.attempt not in self.running:
            if len(self.running & self.upstreams.keys()) >= self.slots:
                self.at(1.0, lambda: self._answer(upstream, journal))
                return
            self.running.add(upstream.attempt)
        if journal is not None and self.refusals:
            self.refusals -= 1
            self._head(upstream, self.refused_with, Continuation.RETRY, False)
            return
        client = upstream.client
        if not client.is_stream:
            self._head(upstream, 200, Continuation.RETRY, False)
            self.at(self.step_ms * client.max_tokens, lambda: self._whole(upstream))
            return
        self._head(upstream, 200, self.continuation, True)
        play = Play(client.kind, client.prompt, client.max_tokens, self.rng, journal)
        play.misspells = self.misspells and journal is not None
        if self.fixes_ids:
            play.ids = {"id": "m-1", "created": 17, "tool": "call-1"}
        groups = list(play.groups())
        self._deliver(upstream, groups, play.tail())

    def _head(
        self, upstream: Upstream, status: int, continuation: Continuation, is_stream: bool
    ) -> None:
        self.handle(
            ev.HeadCame(
                upstream.attempt, status, upstream.engine, upstream.token, continuation, is_stream
            )
        )

    def _whole(self, upstream: Upstream) -> None:
        if upstream.is_open and not upstream.client.is_poison:
            self.upstreams.pop(upstream.attempt)
            self.handle(ev.AnswerEnded(upstream.attempt))

    def _deliver(self, upstream: Upstream, groups: list, tail: bytes) -> None:
        """One group now, the next one step later."""
        if not upstream.is_open:
            return
        if groups:
            events, tokens, chunks = groups.pop(0)
            upstream.made += len(tokens)
            self._send(upstream, "group", events, tokens, chunks)
            self.on_group(upstream)
            self.at(self.step_ms, lambda: self._deliver(upstream, groups, tail))
        else:
            self.upstreams.pop(upstream.attempt, None)
            self._send(upstream, "end", tail)

    def _send(self, upstream: Upstream, method: str, *what: object) -> None:
        upstream.client.sent += getattr(upstream.core, method)(*what, self.now_ms)
        self.perform(self.gateway.handle(ev.Tick(), self.now_ms))
