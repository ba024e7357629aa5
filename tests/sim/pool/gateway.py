"""Gateways: each holds requests, obeys doors late, and tells the pool what it has."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from pool.core.events import (
    DemandCame,
    Door,
    ModelDemand,
    OpenDoor,
    RefusedDoor,
    Running,
    SetModelDoor,
    ShutDoor,
    Ticket,
    TicketKind,
)
from tests.sim.pool.timeline import Line

if TYPE_CHECKING:
    from tests.sim.pool.engine import Engine
    from tests.sim.pool.world import World

SHUT = ShutDoor(Running.FINISH, None, "no pool yet")


class Kind(Enum):
    """How a request can be continued."""

    STREAM = "stream"  # parked at a token
    RETRY = "retry"  # asked again: nothing was delivered
    NONE = "none"


class Request:
    """One request of one client, from arrival to its only end."""

    def __init__(
        self, gateway: Gateway, number: int, model: str, kind: Kind, needs_ms: float, priority: int
    ) -> None:
        self.gateway, self.id, self.model, self.kind = gateway, number, model, kind
        self.left_ms, self.priority = needs_ms, priority
        self.since_ms = gateway.world.timeline.now_ms
        self.ticket = TicketKind.NEW
        self.has_yielded = False  # it was sent again once for a yield
        self.engine: Engine | None = None  # that has it
        self.sent_ms = 0.0
        self.tries = 0
        self.has_begun = False  # an engine has accepted it
        self.outcome = ""

    @property
    def can_park(self) -> bool:
        if self.kind is Kind.STREAM:
            return self.engine is None or self.engine.can_resume
        return self.kind is Kind.RETRY and not self.has_yielded

    def is_left(self, engine: Engine) -> bool:
        """Whether its client or its gateway no longer waits for this engine."""
        return self.engine is not engine

    def answered(self, engine: Engine) -> None:
        if self.engine is engine:
            self.gateway.leave(self)
            self.end("answered")

    def broken(self, engine: Engine) -> None:
        """Its engine has died, or did not accept it."""
        if self.engine is engine:
            self.gateway.broken(self)

    def end(self, outcome: str) -> None:
        assert not self.outcome, f"request {self.id} ends twice: {self.outcome}, {outcome}"
        self.outcome = outcome
        self.gateway.world.law.ended(self)


class Lane:
    """What a gateway has for one model."""

    def __init__(self) -> None:
        self.number = 0  # of the door
        self.is_told = False  # it has heard of a pool, ever
        self.door: Door = SHUT
        self.holder: tuple[Engine, int] | None = None  # the newest grant
        self.tickets: dict[int, Request] = {}
        self.running: dict[int, Request] = {}


class Gateway:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.up = self.down = Line()
        self.is_linked = self.is_losing = self.is_due = False
        self.begin()

    def begin(self) -> None:
        """A process without a request."""
        self.last_ms: dict[str, float] = {}
        self.lanes = {model: Lane() for model in self.world.rules}

    # ------------------------------------------------------------------ requests come and go

    def arrive(self, request: Request) -> None:
        lane = self.lanes[request.model]
        self.last_ms[request.model] = self.world.timeline.now_ms
        if isinstance(lane.door, RefusedDoor):
            request.end("refused")
            return
        self.wait(request)
        self.dispatch(lane)
        self.changed()

    def wait(self, request: Request) -> None:
        lane = self.lanes[request.model]
        assert request.id not in lane.tickets, f"request {request.id} has two tickets"
        assert request.id not in lane.running, f"request {request.id} waits and runs"
        assert not request.outcome, f"request {request.id} waits although it has ended"
        lane.tickets[request.id] = request

    def expire(self, request: Request, outcome: str) -> None:
        """Its client leaves, or its deadline has come."""
        if request.outcome:
            return
        if request.engine is not None:
            if outcome == "expired":
                return  # a deadline is for waiting
            self.leave(request)
        else:
            del self.lanes[request.model].tickets[request.id]
        request.end(outcome)
        self.changed()

    def leave(self, request: Request) -> None:
        """It is at no engine any more."""
        engine = request.engine
        assert engine is not None
        lane = self.lanes[request.model]
        del lane.running[request.id]
        request.engine = None
        spent = self.world.timeline.now_ms - request.sent_ms
        if request.kind is Kind.STREAM:
            request.left_ms = max(0.0, request.left_ms - spent)
        self.world.timeline.soon(engine.disconnected, request)
        self.dispatch(lane)
        self.changed()

    def broken(self, request: Request) -> None:
        """Failover: what can be continued waits for the next engine, at its old place."""
        self.leave(request)
        if request.kind is Kind.NONE and request.has_begun:
            request.end("lost")
        else:
            is_begun = request.kind is Kind.STREAM and request.has_begun
            self.again(request, TicketKind.PARKED if is_begun else request.ticket)

    def again(self, request: Request, ticket: TicketKind) -> None:
        if ticket is not TicketKind.NEW:
            request.ticket = ticket
            request.since_ms = self.world.timeline.now_ms
        self.wait(request)
        self.world.timeline.soon(self.dispatch, self.lanes[request.model])

    # ------------------------------------------------------------------ doors

    def forget_door_numbers(self) -> None:
        """Another pool counts anew."""
        for lane in self.lanes.values():
            lane.number = 0

    def set_door(self, order: SetModelDoor) -> None:
        self.world.timeline.soon(self.obey, order, self.lanes[order.model])

    def obey(self, order: SetModelDoor, lane: Lane) -> None:
        if lane is not self.lanes[order.model] or order.number <= lane.number:
            return
        lane.number, lane.door, lane.is_told = order.number, order.door, True
        match order.door:
            case OpenDoor():
                self.dispatch(lane)
            case ShutDoor(running=running):
                if running is not Running.FINISH:
                    self.park(lane)
                if running is Running.CUT:
                    self.cut(lane)
            case RefusedDoor():
                for request in list(lane.tickets.values()):
                    del lane.tickets[request.id]
                    request.end("refused")
        self.changed()

    def park(self, lane: Lane) -> None:
        for request in list(lane.running.values()):
            if request.can_park:
                is_begun = request.kind is Kind.STREAM and request.has_begun
                self.leave(request)
                request.has_yielded = True
                self.again(request, TicketKind.PARKED if is_begun else TicketKind.AGAIN)

    def cut(self, lane: Lane) -> None:
        for request in list(lane.running.values()):
            self.leave(request)
            request.end("cut")

    def target(self, lane: Lane) -> Engine | None:
        """Who is sent requests: the engine of the open door, or a newer holder."""
        door = lane.door
        if not lane.is_told and lane.holder is not None:
            return lane.holder[0]  # it has never heard of a pool: whoever accepts
        if not isinstance(door, OpenDoor):
            return None
        if lane.holder is not None and lane.holder[1] > door.token:
            return lane.holder[0]
        return self.world.engines.get(door.engine)

    def dispatch(self, lane: Lane) -> None:
        """Parked streams first, then by priority and arrival."""
        engine = self.target(lane) if lane.tickets else None
        if engine is None or not self.world.accepts(engine):
            return
        while lane.tickets and len(lane.running) < self.world.in_flight_max:
            request = min(lane.tickets.values(), key=place)
            del lane.tickets[request.id]
            lane.running[request.id] = request
            self.world.law.sent(request)
            request.engine, request.sent_ms = engine, self.world.timeline.now_ms
            request.tries += 1
            self.world.timeline.soon(engine.receive, request)

    # ------------------------------------------------------------------ its neighbours

    def granted(self, model: str, engine: Engine, token: int) -> None:
        lane = self.lanes[model]
        if lane.holder is None or token > lane.holder[1]:
            lane.holder = (engine, token)
            self.dispatch(lane)

    def accepting(self, model: str) -> None:
        """An engine of this model begins to accept."""
        self.dispatch(self.lanes[model])
        self.changed()

    def changed(self) -> None:
        """Said soon, and once for whatever changes until then."""
        if self.is_linked and not self.is_due:
            self.is_due = True
            self.world.timeline.soon(self.say)

    def say(self) -> None:
        self.is_due = False
        if self.is_linked:
            self.world.timeline.send(self.up, self.world.pool.hear_gateway, self.demand())

    def demand(self) -> DemandCame:
        models = {}
        for model, lane in self.lanes.items():
            tickets = tuple(
                Ticket(each.id, each.since_ms, each.priority, each.ticket)
                for each in lane.tickets.values()
            )
            running, last_ms = lane.running.values(), self.last_ms.get(model)
            if tickets or running or lane.is_told or last_ms is not None:
                models[model] = ModelDemand(
                    tickets=tickets,
                    in_flight=len(running),
                    cannot_park=sum(not request.can_park for request in running),
                    last_request_ms=last_ms,
                    door=lane.number,
                )
        return DemandCame(gateway=self.name, models=models)

    def die(self) -> None:
        """All its clients see their connections end; another one starts without a request."""
        for lane in self.lanes.values():
            for request in (*lane.running.values(), *lane.tickets.values()):
                if request.engine is not None:
                    self.world.timeline.soon(request.engine.disconnected, request)
                request.engine = None
                request.end("lost")
            lane.running.clear()
            lane.tickets.clear()
        self.world.pool.unlink_gateway(self)
        self.begin()
        self.world.pool.gateway_died(self.name)
        self.name = f"{self.name}+"
        for model, lock in self.world.locks.items():
            if lock.holder is not None:
                self.granted(model, lock.holder, lock.token)


def place(request: Request) -> tuple[bool, int, int]:
    return request.ticket is not TicketKind.PARKED, request.priority, request.id
