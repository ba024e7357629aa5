"""A device, its models and their clients, in virtual time. Rules decide; this obeys.

Every model is at rest, waking, awake, draining or releasing; `slots` of them fit at once. Clients
are closed loops: ask, wait, be served, think, ask again. A client that is refused asks again after
a second, and its wait goes on counting. A parked stream keeps what it has and resumes with a short
prefill; a cut one is lost.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

RETRY_MS = 1_000.0  # after a refusal: what clients do with Retry-After: 1
PREFILL_MS = 200.0  # of a stream that resumes


class Phase(StrEnum):
    """What a simulated model does."""

    RESTING = "resting"
    WAKING = "waking"
    AWAKE = "awake"
    DRAINING = "draining"
    RELEASING = "releasing"


@dataclass
class Costs:
    """Of one model. The defaults are those that POOL's own simulation used."""

    wake_ms: float = 300.0
    release_ms: float = 60.0


@dataclass
class Client:
    """Asks `model` from `start_ms` on, each request `service_ms` long, `times` of them."""

    model: str
    start_ms: float
    service_ms: Iterator[float]
    think_ms: Iterator[float]
    times: int
    can_park: bool = True
    priority: int = 0


@dataclass(eq=False)
class Request:
    """One request, from its first attempt to its last token."""

    number: int
    client: Client
    asked_ms: float  # first attempt
    counts_ms: float  # since when its wait counts between models
    left_ms: float  # of its service
    started_ms: float | None = None
    parked_ms: float | None = None
    ends_ms: float = 0.0
    run: int = 0  # which of its runs an end belongs to


@dataclass(eq=False)
class SimModel:
    """A model and what it has to do."""

    name: str
    costs: Costs
    phase: Phase = Phase.RESTING
    since_ms: float = 0.0  # of the phase
    is_open: bool = True  # the door: whether new requests are sent while it is awake
    queue: deque[Request] = field(default_factory=deque)
    parked: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    last_asked_ms: float = 0.0
    drained_ms: float | None = None

    @property
    def waiting(self) -> int:
        return len(self.queue) + len(self.parked)

    def oldest(self) -> Request | None:
        """The one of its requests that waits and counts for longest."""
        return min((*self.queue, *self.parked), key=lambda each: each.counts_ms, default=None)


@dataclass
class Figures:
    """What a run has shown. Times in ms."""

    waits_ms: list[float] = field(default_factory=list)
    pauses_ms: list[float] = field(default_factory=list)
    done: int = 0
    switches: int = 0
    refused: int = 0
    cut: int = 0
    parked: int = 0
    serving_ms: float = 0.0
    wanted_ms: float = 0.0


class Rules(Protocol):
    """Which model is awake. Called after every event; answers when to be called again."""

    name: str
    source: str

    def decide(self, world: World) -> float | None: ...

    def admits(self, world: World, model: SimModel) -> bool:
        """Whether a request is taken at all."""


class World:
    """One device. `run` to the end, then look at `figures`."""

    def __init__(
        self, models: dict[str, Costs], clients: list[Client], slots: int, rules: Rules
    ) -> None:
        self.now_ms = 0.0
        self.slots, self.rules = slots, rules
        self.models = {name: SimModel(name, costs) for name, costs in models.items()}
        self.figures = Figures()
        self._events: list[tuple[float, int, str, object, int]] = []
        self._order = itertools.count()
        self._numbers = itertools.count()
        for client in clients:
            self._at(client.start_ms, "ask", client)

    # ------------------------------------------------------------------ what rules may do

    def used(self) -> int:
        return sum(model.phase is not Phase.RESTING for model in self.models.values())

    def wake(self, model: SimModel) -> None:
        assert model.phase is Phase.RESTING, model.phase
        assert self.used() < self.slots, "more than the device holds"
        self.figures.switches += 1
        self._enter(model, Phase.WAKING)
        self._at(self.now_ms + model.costs.wake_ms, "awake", model)

    def drain(self, model: SimModel) -> None:
        """Shut the door; it releases its memory as soon as nothing runs any more."""
        assert model.phase is Phase.AWAKE, model.phase
        self._enter(model, Phase.DRAINING)
        model.is_open = False
        model.drained_ms = self.now_ms
        self._release_if_quiet(model)

    def reopen(self, model: SimModel) -> None:
        assert model.phase is Phase.DRAINING, model.phase
        model.phase, model.is_open = Phase.AWAKE, True

    def park(self, model: SimModel) -> None:
        """What runs and can be parked waits for the next turn, counted from the drain."""
        for request in [each for each in model.running if each.client.can_park]:
            self._stop(model, request)
            request.left_ms = request.ends_ms - self.now_ms + PREFILL_MS
            request.parked_ms = self.now_ms
            request.counts_ms = model.drained_ms or self.now_ms
            model.parked.append(request)
            self.figures.parked += 1
        self._release_if_quiet(model)

    def cut(self, model: SimModel) -> None:
        for request in list(model.running):
            self._stop(model, request)
            self.figures.cut += 1
            self._ask_again(request.client)
        self._release_if_quiet(model)

    def refuse(self, model: SimModel) -> None:
        """All that wait for it are refused, and ask again."""
        for request in model.queue:
            self._refused(request)
        model.queue.clear()

    # ------------------------------------------------------------------ what happens

    def run(self, until_ms: float) -> Figures:
        while self._events and self._events[0][0] <= until_ms:
            at_ms, _, what, subject, run = heapq.heappop(self._events)
            self._pass(at_ms)
            self._happen(what, subject, run)
            while self._events and self._events[0][0] <= self.now_ms:
                _, _, what, subject, run = heapq.heappop(self._events)
                self._happen(what, subject, run)
            self._settle()
        self._pass(until_ms)
        for model in self.models.values():
            self.figures.waits_ms += [self.now_ms - each.asked_ms for each in model.queue]
            self.figures.pauses_ms += [self.now_ms - (each.parked_ms or 0) for each in model.parked]
        return self.figures

    def _settle(self) -> None:
        """Send what may be sent, ask the rules, and again while that changes anything."""
        while True:
            self._send()
            before = [(model.phase, model.is_open, model.waiting) for model in self._all()]
            due_ms = self.rules.decide(self)
            if before == [(model.phase, model.is_open, model.waiting) for model in self._all()]:
                break
        if due_ms is not None:
            self._at(max(due_ms, self.now_ms + 1.0), "due", None)

    def _all(self) -> list[SimModel]:
        return [*self.models.values()]

    def _happen(self, what: str, subject: object, run: int) -> None:
        match what, subject:
            case "ask", Client():
                self._arrive(self._new(subject))
            case "retry", Request():
                self._arrive(subject)
            case "awake", SimModel():
                self._enter(subject, Phase.AWAKE)
                subject.is_open = True
            case "released", SimModel():
                self._enter(subject, Phase.RESTING)
            case "end", Request() if subject.run == run:
                model = self.models[subject.client.model]
                model.running.remove(subject)
                self.figures.done += 1
                self._ask_again(subject.client)
                self._release_if_quiet(model)

    def _new(self, client: Client) -> Request:
        service_ms = next(client.service_ms)
        number = next(self._numbers)
        return Request(number, client, self.now_ms, self.now_ms, service_ms)

    def _arrive(self, request: Request) -> None:
        model = self.models[request.client.model]
        model.last_asked_ms = self.now_ms
        if self.rules.admits(self, model):
            request.counts_ms = self.now_ms
            model.queue.append(request)
        else:
            self._refused(request)

    def _refused(self, request: Request) -> None:
        self.figures.refused += 1
        self._at(self.now_ms + RETRY_MS, "retry", request)

    def _send(self) -> None:
        for model in self.models.values():
            if model.phase is not Phase.AWAKE or not model.is_open:
                continue
            while model.parked:
                request = model.parked.popleft()
                self.figures.pauses_ms.append(self.now_ms - (request.parked_ms or 0.0))
                self._start(model, request)
            while model.queue:
                request = model.queue.popleft()
                self.figures.waits_ms.append(self.now_ms - request.asked_ms)
                self._start(model, request)

    def _start(self, model: SimModel, request: Request) -> None:
        request.started_ms = self.now_ms
        request.ends_ms = self.now_ms + request.left_ms
        request.run += 1
        model.running.append(request)
        model.last_asked_ms = self.now_ms
        self._at(request.ends_ms, "end", request, request.run)

    def _stop(self, model: SimModel, request: Request) -> None:
        model.running.remove(request)
        request.run += 1

    def _ask_again(self, client: Client) -> None:
        client.times -= 1
        if client.times > 0:
            self._at(self.now_ms + next(client.think_ms), "ask", client)

    def _release_if_quiet(self, model: SimModel) -> None:
        if model.phase is Phase.DRAINING and not model.running:
            self._enter(model, Phase.RELEASING)
            self._at(self.now_ms + model.costs.release_ms, "released", model)

    def _enter(self, model: SimModel, phase: Phase) -> None:
        model.phase, model.since_ms = phase, self.now_ms

    def _at(self, at_ms: float, what: str, subject: object, run: int = 0) -> None:
        heapq.heappush(self._events, (at_ms, next(self._order), what, subject, run))

    def _pass(self, at_ms: float) -> None:
        """Time goes on, and is counted: was anything served, was anything wanted?"""
        took_ms = at_ms - self.now_ms
        is_served = any(model.running for model in self.models.values())
        if is_served:
            self.figures.serving_ms += took_ms
        if is_served or any(model.waiting for model in self.models.values()):
            self.figures.wanted_ms += took_ms
        self.now_ms = at_ms
