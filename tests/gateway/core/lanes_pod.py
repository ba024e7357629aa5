"""A pool in virtual time: several models on one device, of which one is awake, behind `Lanes`.

The pool of this simulation is the simplest there can be: it gives each model its turn, whoever
waits. Checked with each event: nothing is sent past a shut door, no engine rests while a request is
in it, every request ends once.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core import events as ev
from gateway.core.client_request import Attempt
from gateway.core.events import DoorSet, LaneRules
from gateway.core.lanes import Lanes
from pool.core.events import Door, OpenDoor, RefusedDoor, Running, ShutDoor
from tests.gateway.core.pod import ERA, Client, Pod

FINISH = ShutDoor(Running.FINISH, None, "another model is awake")
PARK = ShutDoor(Running.PARK, None, "another model is awake")
CUT = ShutDoor(Running.CUT, None, "another model is awake")


@dataclass
class Model:
    """One model, the engine that stands for it, and its door."""

    name: str
    token: int = 0
    is_awake: bool = False
    is_dead: bool = False  # and its shadow is not granted yet
    door: Door | None = None
    number: int = 0
    opened: int = 0  # requests that were asked since the door opened

    @property
    def engine(self) -> str:
        return f"{self.name}-{self.token}"


class LanesPod(Pod):
    """Engines are named by their model and their token."""

    def __init__(
        self,
        seed: int = 1,
        names: tuple[str, ...] = ("a", "b"),
        lane_rules: LaneRules | None = None,
        queue_max: int = 512,
        **options: object,
    ) -> None:
        super().__init__(seed, **options)
        self.gateway = Lanes(
            self.gateway.rules, dict.fromkeys(names, lane_rules or LaneRules()), queue_max
        )  # type: ignore[assignment]
        self.models = {name: Model(name) for name in names}
        self.model_of: dict[int, Model] = {}
        self.drained = None  # what is to happen once the model that yields is quiet
        self.yielding: Model | None = None
        self.on_demand = lambda: None

    # ---- requests

    def ask(self, kind: str = "chat", max_tokens: int = 24, model: str = "a", **more) -> Client:
        self.wishes = {name: more.pop(name) for name in ("priority",) if name in more}
        self.model_of[len(self.clients) + 1] = self.models[model]
        return super().ask(kind, max_tokens, **more)

    def _came(self, client: Client) -> ev.RequestCame:
        came = super()._came(client)
        fields = (came.request, came.path, came.body_bytes, came.is_inference, came.is_stream)
        return ev.RequestCame(*fields, model=self.model_of[client.number].name, **self.wishes)

    def leave(self, client: Client) -> None:
        client.outcome = "left"
        self.handle(ev.ClientLeft(client.number, self.model_of[client.number].name))

    def perform(self, effects) -> None:
        super().perform(effects)
        if any(isinstance(each, ev.DemandChanged) for each in effects):
            self.at(1.0, self._demand_came)

    def _ask(self, effect: ev.SendRequest) -> None:
        model = self.model_of[effect.request]
        assert isinstance(model.door, OpenDoor | None), "sent past a shut door"
        assert effect.engine.startswith(f"{model.name}-"), "sent to another model's engine"
        model.opened += 1
        super()._ask(effect)

    def _attempt(self, number: int) -> Attempt:
        return self.gateway.attempt(number)

    # ---- engines and doors

    def stand(self, name: str, *, is_awake: bool = False) -> None:
        """An engine is granted the model's lock."""
        model = self.models[name]
        model.token += 1
        model.is_awake, model.is_dead = is_awake, False
        self.handle(ev.EngineGranted(model.engine, model.token, ERA, name))

    def set_door(self, name: str, door: Door) -> None:
        model = self.models[name]
        model.door, model.number = door, model.number + 1
        if isinstance(door, OpenDoor):
            model.opened = 0
        self.handle(DoorSet(name, model.number, door))

    def awake(self, name: str) -> None:
        """It stands, is awake, and its door opens."""
        if not self.models[name].token:
            self.stand(name)
        self.models[name].is_awake = True
        model = self.models[name]
        self.set_door(name, OpenDoor(model.engine, model.token))

    def rest(self, name: str) -> None:
        """Its engine rests, which it does only when nothing is in it."""
        model = self.models[name]
        inside = [each for each in self.upstreams.values() if each.engine == model.engine]
        assert not any(each.is_open for each in inside), "rests under a request"
        model.is_awake = False

    def die(self, name: str) -> None:
        """Its engine dies and its shadow is granted, and awake if the door is open."""
        model = self.models[name]
        if model.is_dead:
            return
        model.is_dead = True
        self.deaths += 1
        for upstream in list(self.upstreams.values()):
            if upstream.engine == model.engine:
                self.break_off(upstream)
        self.at(60.0, lambda: self.stand(name, is_awake=isinstance(model.door, OpenDoor)))

    def switch(
        self, old: str, new: str, park_ms: float = 40.0, cut_ms: float | None = None
    ) -> None:
        """`old` yields, and `new` is awake once `old` is quiet."""
        self.yielding = self.models[old]
        self.set_door(old, FINISH)
        number = self.models[old].number
        self.at(park_ms, lambda: self._press(old, number, PARK))
        if cut_ms is not None:
            self.at(cut_ms, lambda: self._press(old, number + 1, CUT))

        def go_on() -> None:
            self.rest(old)
            self.at(10.0, lambda: self.awake(new))

        self.drained = go_on
        self._demand_came()

    def _press(self, name: str, number: int, door: ShutDoor) -> None:
        if self.models[name].number == number and self.drained is not None:
            self.set_door(name, door)

    def _demand_came(self) -> None:
        self.on_demand()
        if self.drained is None or self.yielding is None:
            return
        demand = self.gateway.demand(self.now_ms)[self.yielding.name]
        if demand.door == self.yielding.number and not demand.in_flight:
            go_on, self.drained = self.drained, None
            go_on()

    def _serves(self, engine: str, token: int) -> bool:
        model = self.models[engine.partition("-")[0]]
        return (
            model.is_awake and not model.is_dead and (model.engine, model.token) == (engine, token)
        )

    def demand(self, name: str = "a"):
        return self.gateway.demand(self.now_ms)[name]


def refused(code: str = "pool.failed", retry_after_s: int | None = 5) -> RefusedDoor:
    return RefusedDoor(code, "the model has failed", retry_after_s)


def switching(seed: int = 1, **options) -> LanesPod:
    """`a` is awake, `b` rests."""
    pod = LanesPod(seed, **options)
    pod.stand("b")
    pod.set_door("b", FINISH)
    pod.awake("a")
    return pod


def error(pod: LanesPod, client) -> str:
    assert client.outcome == "error"
    return client.ending.code
