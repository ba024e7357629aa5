"""One model's requests in a pool, behind a door that the pool sets; and all lanes of one gateway.

    open      requests go to the engine that serves the model, `max_in_flight` at once
    shut      they wait as tickets; running ones may finish, or are parked, or are cut
    refused   they are answered with the pool's error
    unheard   no pool has spoken yet: an engine that answers a greeting accepts: send

A model whose turn is over *yields*. Its streams are cut behind a token and kept with their journal.
A request of which nothing was sent waits again, once; the second time the lane waits for its
answer, so that each gets one. None of this counts against the engine: it is no death and no break.
The lock server says which engine serves the model, so a failover needs no pool. The engine is
greeted before its first request; one that has slept since, under the same grant, is not again.

A gateway without a pool has one lane, a plain `Gateway`. A request's lane is found by its model,
then by the number of its attempt. Bytes go to the attempt itself, so an event costs the same with
and without a pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import asdict, replace

from gateway.core import events as ev
from gateway.core.answers import RETRY_AFTER_S, Failure, failure, refused_door
from gateway.core.client_request import Attempt, ClientRequest, RequestState, Turn
from gateway.core.events import (
    MAX_IN_FLIGHT,
    QUEUE_MAX,
    BreakCause,
    DoorSet,
    GatewayEffect,
    GatewayEvent,
    GatewayRules,
    LaneRules,
)
from gateway.core.machine import UNANSWERED, Gateway, Shared
from pool.core.events import (
    Door,
    ModelDemand,
    OpenDoor,
    RefusedDoor,
    Running,
    ShutDoor,
    Ticket,
    TicketKind,
)

# Without a pool an engine that rests may be woken by hand. Each greeting tries for 0.2 s.
GREET_UNHEARD_MS = 1_000.0
TICKETS_MAX = 512  # of one model in one message, as many as the largest queue has,
TICKETS_IN_ALL = 2048  # and of all: a parked stream has one too, and a frame is 256 KiB
ORDER_MS = 60_000.0  # by a priority, in the pool's order, whose last are beyond the limit
NO_ROOM = "pool.no_room"  # as refused in `pool.core.admission`
BEGUN = (RequestState.STREAMING, RequestState.RESUMING, RequestState.REPLAYING)


class Lane(Gateway):
    """The requests for one model."""

    def __init__(
        self,
        model: str,
        rules: GatewayRules,
        lane_rules: LaneRules,
        shared: Shared,
        is_full: Callable[[], bool],
    ) -> None:
        """`is_full`: whether too many requests wait in all lanes together."""
        super().__init__(rules, shared)
        self.model = model
        self.lane_rules = lane_rules
        self.door_number = 0
        self._is_wanted = True  # the pool hears of every demand
        self._expected_ms: float | None = None  # when it is awake, as far as is known
        self._is_full = is_full
        self._keep_alive_ms: float | None = None
        self._last_ms: float | None = None  # when a request came last, or the last one ended
        self._was_busy = False
        self._told: tuple[object, ...] = ()

    # ------------------------------------------------------------------ looking

    @property
    def door_word(self) -> str | None:
        """Such as `shut`."""
        return None if self.door is None else str(self.door.__struct_config__.tag)

    @property
    def in_flight(self) -> int:
        """Requests that an engine has."""
        return len(self.attempts)

    @property
    def queued(self) -> int:
        """New requests that wait: those that count against the limits."""
        return sum(
            each.state is RequestState.WAITING
            and not each.has_broken
            and not each.is_resumed_by_front
            for each in self.queue.waiting.values()
        )

    def demand(self, now_ms: float) -> ModelDemand:
        """All that the pool needs to know."""
        is_busy = bool(self.requests)
        if self._was_busy and not is_busy:
            self._last_ms = now_ms
        self._was_busy = is_busy
        waiting = sorted(self.queue.waiting.values(), key=lambda each: each.number)
        owners = [each.owner for each in self.attempts.values()]
        return ModelDemand(
            tickets=tuple(self._ticket(each) for each in waiting),
            in_flight=len(owners),
            cannot_park=sum(not self._may_yield(each) for each in owners),
            resuming=self.resuming,
            last_request_ms=self._last_ms,
            keep_alive_ms=self._keep_alive_ms,
            door=self.door_number,
        )

    def _ticket(self, request: ClientRequest) -> Ticket:
        is_parked = request.state is RequestState.PARKED
        since_ms = (request.paused_since_ms or 0.0) if is_parked else request.waits_since_ms
        kind = TicketKind.AGAIN if request.has_broken else TicketKind.NEW
        if is_parked or request.is_resumed_by_front:
            kind = TicketKind.PARKED
        return Ticket(request.number, since_ms, request.priority, kind)

    # ------------------------------------------------------------------ what happens

    def _happened(self, event: GatewayEvent, now_ms: float) -> None:
        super()._happened(event, now_ms)
        if isinstance(self.door, ShutDoor) and self.door.running is not Running.FINISH:
            self._yield(now_ms)  # a stream has begun only now

    def look(self) -> None:
        super().look()
        in_flight, waiting = self.in_flight, len(self.queue.waiting)
        # Behind an open door the pool has nothing to decide, but when all is quiet.
        is_open = isinstance(self.door, OpenDoor)
        counts = (in_flight > 0, waiting > 0) if is_open else (in_flight, waiting)
        told = (self.door_number, self._keep_alive_ms, self.resuming > 0, *counts)
        if told != self._told:
            self._told = told
            self.outbox.append(ev.DemandChanged())

    # ------------------------------------------------------------------ requests

    def _came(self, came: ev.RequestCame, now_ms: float) -> None:
        self._note_keep_alive(came.keep_alive_ms)
        self._last_ms = now_ms
        super()._came(came, now_ms)
        request = self.requests.get(came.request)
        if request is None:
            return
        request.priority = priority = self.lane_rules.priority_for(came.priority)
        request.order_key = (now_ms + priority * self.lane_rules.starve_after_ms, came.request)
        why = self._refusal(request)
        if why is not None:
            self.fail(request, why)

    def _note_keep_alive(self, wanted_ms: float | None) -> None:
        """The longest of those requests that are here together."""
        if self.requests:
            default_ms = self.lane_rules.keep_alive_ms
            ways = (wanted_ms, self._keep_alive_ms)
            wanted_ms = max(ways, key=lambda each: default_ms if each is None else each)
        self._keep_alive_ms = wanted_ms

    def _refusal(self, request: ClientRequest) -> Failure | None:
        """Why this new request does not even wait."""
        if isinstance(self.door, RefusedDoor):
            return refused_door(self.door)
        if request.is_resumed_by_front:
            return None
        is_first = len(self.queue.waiting) == 1
        if is_first and self.target.hello is not None and self._may_send() and self._has_room:
            return None
        if self.queued > self.lane_rules.queue_max:
            why = f"{self.queued - 1} requests wait for {self.model}"
            return failure("pool.queue_full", why=why)
        if self._is_full():
            return failure("pool.queue_full", why="the queue of the whole pool is full")
        return self._no_engine if self._is_hopeless(request) else None

    def _is_hopeless(self, request: ClientRequest) -> bool:
        """Whether its model will not be awake by its deadline, as far as is known."""
        is_shut = isinstance(self.door, ShutDoor) and self._expected_ms is not None
        deadline_ms = request.waits_since_ms + self._limit_ms(request)
        return is_shut and (self._expected_ms or 0.0) > deadline_ms

    @property
    def _has_room(self) -> bool:
        return self.in_flight < (self.lane_rules.max_in_flight or MAX_IN_FLIGHT)

    def _is_overdue(self, request: ClientRequest, now_ms: float) -> bool:
        return now_ms - request.waits_since_ms >= self._limit_ms(request)

    def _limit_ms(self, request: ClientRequest) -> float:
        park_ms, wait_ms = self.rules.park_timeout_ms, self.lane_rules.wait_ms
        return park_ms if request.is_resumed_by_front else wait_ms

    @property
    def waits_for(self) -> str:
        if isinstance(self.door, ShutDoor):
            return self.door.reason or f"{self.model} is not awake"
        return super().waits_for

    @property
    def _no_engine(self) -> Failure:
        if not self.waits_for:
            return failure("pool.busy", model=self.model, in_flight=self.in_flight)
        expected_ms = self._expected_ms if isinstance(self.door, ShutDoor) else None
        wait_s = 0 if expected_ms is None else math.ceil((expected_ms - self._now_ms) / 1000)
        words = {"model": self.model, "why": self.waits_for}
        return failure("pool.not_awake", retry_s=max(RETRY_AFTER_S, wait_s), **words)

    # ------------------------------------------------------------------ the door

    def _set_door(self, event: DoorSet, now_ms: float) -> None:
        if event.rules is not None:
            self.lane_rules = replace(self.lane_rules, **asdict(event.rules))
        old, door, self.door_number = self.door, event.door, event.number
        super()._set_door(event, now_ms)
        match door:
            case ShutDoor() if door != old:
                self._shut(door, now_ms)
            case RefusedDoor() if door != old:
                for request in list(self.queue.waiting.values()):
                    # A lease or an order takes room for a while, and no stream is cut for that.
                    is_kept = request.state is RequestState.PARKED and door.code == NO_ROOM
                    if not is_kept:
                        self.fail(request, refused_door(door))

    def _open(self, old: Door | None, now_ms: float) -> None:
        door = self.door
        # The pool may have heard of it, and the lock server not.
        if self.target.grant is None and isinstance(door, OpenDoor):
            self.target.take(ev.EngineGranted(door.engine, door.token, "", self.model), now_ms)
        if not isinstance(old, OpenDoor) and self.target.hello is None:
            self._begin_anew(is_death=False, now_ms=now_ms)  # while it rests nothing is in it
            last, grant = self.target.last_hello, self.target.grant
            if last and grant and (last.engine, last.token) == (grant.engine, grant.token):
                self.target.hello = last  # it has slept since, and would say the same
            else:
                self._greet()

    def _shut(self, door: ShutDoor, now_ms: float) -> None:
        self._expected_ms = None if door.expected_ms is None else now_ms + door.expected_ms
        if door.running is not Running.FINISH:
            self._yield(now_ms)
        if door.running is Running.CUT:
            self._cut(door)
        for request in list(self.queue.waiting.values()):
            if request.state is RequestState.WAITING and self._is_hopeless(request):
                self.fail(request, self._no_engine)

    def _may_yield(self, request: ClientRequest) -> bool:
        """Whether its engine may be left now without harm to it."""
        is_once = request.is_lean or not request.is_inference or request.was_requeued
        is_kept = request.state in BEGUN or request.is_front_stream
        return is_kept or (request.state in UNANSWERED and not is_once)

    def _yield(self, now_ms: float) -> None:
        """Park streams behind a token, and let unanswered requests wait again."""
        for attempt in list(self.attempts.values()):
            request = attempt.owner
            if self._may_yield(request):
                request.was_requeued |= request.state in UNANSWERED
                self.broke(attempt, BreakCause.YIELDED, now_ms)

    def _cut(self, door: ShutDoor) -> None:
        """The last resort: end what could not yield."""
        for attempt in list(self.attempts.values()):
            request = attempt.owner
            if request.state in UNANSWERED:
                self.drop(request)
                self.fire(request, Turn.BREAK)
            why = door.reason or "its turn"
            self.fail(request, failure("pool.cut", model=self.model, why=why))

    @property
    def _greet_again_ms(self) -> float:
        return GREET_UNHEARD_MS if self.door is None else super()._greet_again_ms


class Lanes:
    """All requests of one gateway. `by_model`: in the order in which models were named; without a
    pool one lane, of the model "", which has no door of a pool."""

    def __init__(
        self,
        rules: GatewayRules,
        models: Mapping[str, LaneRules] | None = None,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        self.shared = Shared(rules.memory_bytes_max)
        self.outbox = self.shared.outbox
        self._queue_max = queue_max
        self.lanes = {  # of a pool
            model: Lane(model, rules, lane_rules, self.shared, self._is_full)
            for model, lane_rules in (models or {}).items()
        }
        self.by_model: Mapping[str, Gateway] = self.lanes or {"": Gateway(rules, self.shared)}
        self.alone = self.by_model.get("")  # the only lane of a gateway without a pool
        self._all = tuple(self.by_model.values())

    def attempt(self, number: int) -> Attempt:
        lane = self._lane_of(number)
        assert lane is not None
        return lane.attempts[number]

    def handle(self, event: GatewayEvent | None, now_ms: float) -> Sequence[GatewayEffect]:
        """What follows from `event`, with all that was in the outbox. What is about a model that is
        not here is ignored."""
        if self.alone is not None and not getattr(event, "model", ""):
            return self.alone.handle(event, now_ms)
        if event is None or isinstance(event, ev.Tick | ev.GatewayEnds):
            return [effect for each in self._all for effect in each.handle(event, now_ms)]
        number = getattr(event, "attempt", None) or getattr(event, "greeting", None)
        found = None if number is None else self._lane_of(number)
        lane = found or self.by_model.get(getattr(event, "model", ""))
        return self.shared.take() if lane is None else lane.handle(event, now_ms)

    @property
    def needs_ticks(self) -> bool:
        """Whether anything waits for time to pass."""
        if self.alone is not None:
            return self.alone.needs_ticks
        return any(lane.needs_ticks for lane in self._all)

    def demand(self, now_ms: float) -> dict[str, ModelDemand]:
        """All that the pool needs to know, by model: at most so many tickets as one message can
        carry."""
        whole = {model: lane.demand(now_ms) for model, lane in self.lanes.items()}
        busy = sum(bool(each.tickets) for each in whole.values())
        most = min(TICKETS_MAX, TICKETS_IN_ALL // max(1, busy))
        return {
            model: replace(each, tickets=first_of(each.tickets, most))
            for model, each in whole.items()
        }

    def _lane_of(self, number: int) -> Gateway | None:
        """Of an attempt or a greeting, None if that is over."""
        if self.alone is not None:
            return self.alone
        for lane in self._all:
            if number in lane.attempts or number == lane.target.greeting:
                return lane
        return None

    def _is_full(self) -> bool:
        return sum(lane.queued for lane in self.lanes.values()) > self._queue_max


def first_of(tickets: tuple[Ticket, ...], most: int) -> tuple[Ticket, ...]:
    """Those that are first in the order of the policy, in the order of their ids."""
    if len(tickets) <= most:
        return tickets
    found = sorted(tickets, key=lambda each: each.since_ms + each.priority * ORDER_MS)
    return tuple(sorted(found[:most], key=lambda each: each.id))
