"""When the engine rests and wakes: the idle rule, demand, and the door between them.

The tables go through each rule once. The simulation has an engine that obeys, gateways with
requests, and messages that arrive late: no goal `warm` while a request is on its way, and whoever
waits is served in the end.
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import sleep as ev
from gateway.core.events import DoorSet, GatewayDoor
from gateway.core.sleep import CLOSING_MS, SleepPolicy, SleepRules
from plumbing.pod.messages import Tier

AFTER_MS = 5_000.0
STATES = ("init", "standby", "waking", "active", "draining", "releasing", "resting", "dead")


class Table:
    """A policy of e1 under token 7 with one gateway, which has been quiet since the time 0."""

    def __init__(self, **rules: object) -> None:
        self.policy = SleepPolicy(SleepRules(**({"sleep_after_ms": AFTER_MS} | rules)))
        self.now_ms = 0.0
        self.do(ev.HolderIs("e1", 7))
        self.said("active")
        self.beat()

    def do(self, event: ev.SleepEvent, after_ms: float = 0.0) -> list[ev.SleepEffect]:
        self.now_ms += after_ms
        return self.policy.handle(event, self.now_ms)

    def said(self, state: str, goal: Tier = Tier.AWAKE, **more: object) -> list[ev.SleepEffect]:
        told = {"token": 7, "can_rest": True, **more}
        return self.do(ev.HolderSaid(state=state, goal=goal, **told))

    def beat(self, in_flight: int = 0, wanting: int = 0, quiet_ms: float | None = None, gateway=1):
        """A beat of a gateway that has obeyed the present door."""
        quiet_ms = quiet_ms if quiet_ms is not None else 0.0 if in_flight else self.now_ms
        number = self.policy.door.number
        return self.do(ev.LoadSaid(gateway, number, in_flight, wanting, quiet_ms))

    @property
    def door(self) -> GatewayDoor:
        return self.policy.door.door

    def rest(self) -> None:
        """It has rested for lack of requests."""
        self.do(ev.SleepTick(), AFTER_MS)
        assert goals(self.beat()) == [Tier.WARM]
        self.said("draining", Tier.WARM, is_answer=True)
        self.said("resting", Tier.WARM)
        self.beat()


def goals(effects: list[ev.SleepEffect]) -> list[Tier]:
    return [each.goal for each in effects if isinstance(each, ev.SendGoal)]


def doors(effects) -> list[GatewayDoor]:
    return [each.door for each in effects if isinstance(each, DoorSet)]


def test_quiet_for_so_long_closes_the_door_and_then_the_engine_rests():
    table = Table()
    assert table.do(ev.SleepTick(), AFTER_MS - 1) == []
    (closing,) = table.do(ev.SleepTick(), 1)
    assert (closing.door, closing.token) == (GatewayDoor.CLOSING, 7)
    # A beat from before says nothing about what has begun since.
    assert table.do(ev.LoadSaid(1, closing.number - 1, 0, 0, AFTER_MS)) == []
    told, goal, shut = table.beat()
    assert (told.kind, goal, shut.door) == ("sleep", ev.SendGoal(Tier.WARM), GatewayDoor.SHUT)
    # The engine has not read the goal yet, and a beat is from before the door was shut.
    assert table.said("active", Tier.AWAKE) == []
    assert table.do(ev.LoadSaid(1, closing.number, 1, 1, 0.0)) == []
    assert table.said("draining", Tier.WARM, is_answer=True)[0].reason.startswith("e1 is draining")
    table.said("resting", Tier.WARM)
    assert goals(table.beat()) == []
    assert "a request wakes it" in table.policy.door.reason


DISTURBED = {
    "busy": lambda table: table.beat(in_flight=1),
    "another gateway": lambda table: table.beat(in_flight=1, gateway=2),  # finishes its streams
    "cannot": lambda table: table.said("active", can_rest=False),
    "waking": lambda table: table.said("waking"),
    "lost": lambda table: table.do(ev.HolderLost()),
    "token": lambda table: table.do(ev.HolderIs("e1", 8)),
    "off": lambda table: None,
}


@pytest.mark.parametrize("why", DISTURBED)
def test_no_rest_while(why: str):
    table = Table(sleep_after_ms=0.0 if why == "off" else AFTER_MS)
    DISTURBED[why](table)
    assert table.do(ev.SleepTick(), AFTER_MS) == []
    assert table.door is GatewayDoor.OPEN


def test_quiet_counts_from_the_last_request_and_from_the_wake():
    """Also a request that came and went before the door closed, and a gateway that does not obey:
    each opens the door, and the time begins anew. Its end lets the engine rest."""
    table = Table()
    table.said("waking")
    table.now_ms = AFTER_MS - 1
    table.said("active")
    assert table.do(ev.SleepTick(), AFTER_MS - 1) == []
    assert doors(table.do(ev.SleepTick(), 1)) == [GatewayDoor.CLOSING]
    assert doors(table.beat(quiet_ms=20.0)) == [GatewayDoor.OPEN]
    assert table.do(ev.SleepTick(), AFTER_MS - 21) == []
    table.beat(gateway=2)
    assert doors(table.do(ev.SleepTick(), 1)) == [GatewayDoor.CLOSING]
    assert table.beat(gateway=1) == []
    assert doors(table.do(ev.SleepTick(), CLOSING_MS)) == [GatewayDoor.OPEN]
    assert table.do(ev.SleepTick(), AFTER_MS - 1) == []  # not again at once
    assert doors(table.do(ev.SleepTick(), 1)) == [GatewayDoor.CLOSING]
    table.beat(gateway=1)
    assert goals(table.do(ev.GatewayEnded(2))) == [Tier.WARM]


@pytest.mark.parametrize("state", ["active", "draining", "releasing", "resting"])
def test_a_request_wakes_an_engine_once_wherever_it_is_on_its_way_down(state: str):
    """At first it may not even have heard of the first goal, whose answer then does not answer the
    second."""
    table = Table()
    table.do(ev.SleepTick(), AFTER_MS)
    table.beat()
    if state != "active":
        table.said("draining", Tier.WARM, is_answer=True)
        table.said(state, Tier.WARM)
    told, goal, door = table.beat(in_flight=1, wanting=1)
    assert (told.kind, goal) == ("wake", ev.SendGoal(Tier.AWAKE))
    assert (door.door, "wakes it" in door.reason) == (GatewayDoor.SHUT, False)
    assert goals(table.beat(in_flight=2, wanting=2)) == []
    table.said("draining", Tier.WARM)
    assert table.door is GatewayDoor.SHUT
    table.said("resting", Tier.AWAKE, is_answer=True)
    assert table.door is GatewayDoor.SHUT
    assert doors(table.said("waking", Tier.AWAKE)) == [GatewayDoor.OPEN]
    table.now_ms += 20.0
    assert table.said("active", Tier.AWAKE) == [ev.HolderWoke(20.0)]


def test_only_an_operator_wakes_it_where_that_is_asked_for():
    table = Table(wakes_on_request=False)
    table.said("resting", Tier.WARM)
    assert not table.policy.door.does_open
    assert "understudy wake" in table.policy.door.reason
    assert goals(table.beat(in_flight=1, wanting=1)) == []
    # Somebody else's goal: gateways do the same as before, so there is nothing new to obey.
    number = table.policy.door.number
    (door,) = table.said("resting", Tier.AWAKE)
    assert (door.does_open, door.number) == (True, number)


@pytest.mark.parametrize("event", [ev.HolderLost(), ev.HolderIs("e2", 9), ev.HolderIs("e1", 9)])
def test_whatever_is_not_known_opens_the_door(event: ev.SleepEvent):
    table = Table()
    table.rest()
    assert doors(table.do(event)) == [GatewayDoor.OPEN]
    assert table.policy.goal is None


def test_a_goal_that_is_refused_is_told_and_not_sent_at_once_again():
    table = Table()
    table.do(ev.SleepTick(), AFTER_MS)
    table.beat()
    told, door = table.do(ev.GoalRefused("the backend cannot rest"))
    assert (told.severity, door.door) == ("warning", GatewayDoor.OPEN)
    assert "the backend cannot rest" in told.message
    assert table.do(ev.SleepTick(), AFTER_MS - 1) == []
    assert doors(table.do(ev.SleepTick(), 1)) == [GatewayDoor.CLOSING]


@given(
    state=st.sampled_from(STATES),
    goal=st.sampled_from(Tier),
    token=st.sampled_from([0, 7, 8]),
    can_rest=st.booleans(),
)
def test_the_door_is_shut_only_for_the_holder_and_only_below_awake(
    state: str, goal: Tier, token: int, can_rest: bool
):
    table = Table(sleep_after_ms=0.0)
    table.said(state, goal, token=token, can_rest=can_rest)
    is_holder = token == 7 and state in ("waking", "active", "draining", "releasing", "resting")
    is_below = state in ("draining", "releasing", "resting") or (
        can_rest and goal is not Tier.AWAKE
    )
    assert (table.door is GatewayDoor.SHUT) is (is_holder and is_below)


# ------------------------------------------------------------------------------ simulation


class SimGateway:
    """A gateway: its door, and requests that wait, or that the engine has."""

    def __init__(self) -> None:
        self.door = DoorSet(0, 7, GatewayDoor.OPEN)
        self.waiting = self.asked = 0
        self.quiet_since_ms = 0.0


class SimPod:
    """A policy, an engine that obeys, two gateways. Links are in order, and each as slow as it
    likes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ms = 0.0
        self.policy = SleepPolicy(SleepRules(sleep_after_ms=50.0))
        self.gateways = [SimGateway(), SimGateway()]
        self.state, self.goal, self.answered = "active", Tier.AWAKE, 0
        self.links: dict[str, deque] = {}
        self.rests = 0
        self.feed(ev.HolderIs("e1", 7))
        self.say()
        for number in range(len(self.gateways)):
            self.beat(number)
        while self.deliver():  # a gateway accepts nothing before its first beat was heard
            pass

    def feed(self, event: ev.SleepEvent) -> None:
        for effect in self.policy.handle(event, self.now_ms):
            match effect:
                case DoorSet():
                    for number in range(len(self.gateways)):
                        self.send(f"to {number}", self.obey, number, effect)
                case ev.SendGoal():
                    if effect.goal is Tier.WARM:
                        self.rests += 1
                        asked = sum(each.asked for each in self.gateways)
                        assert not asked, "a request is on its way to an engine that is to rest"
                        doors = {each.door.door for each in self.gateways}
                        assert doors == {GatewayDoor.CLOSING}, "another one may begin"
                    self.send("to engine", self.obey_goal, effect.goal, True)

    def send(self, link: str, *call: object) -> None:
        self.links.setdefault(link, deque()).append(call)

    def obey(self, number: int, door: DoorSet) -> None:
        gateway = self.gateways[number]
        gateway.door = door
        self.ask(gateway)
        self.beat(number)

    def ask(self, gateway: SimGateway) -> None:
        if gateway.door.door is GatewayDoor.OPEN and self.state == "active":
            gateway.asked, gateway.waiting = gateway.asked + gateway.waiting, 0

    def beat(self, number: int) -> None:
        gateway = self.gateways[number]
        in_flight = gateway.waiting + gateway.asked
        quiet_ms = 0.0 if in_flight else self.now_ms - gateway.quiet_since_ms
        said = ev.LoadSaid(number, gateway.door.number, in_flight, gateway.waiting, quiet_ms)
        self.send(f"from {number}", self.feed, said)

    def obey_goal(self, goal: Tier, is_answer: bool) -> None:
        self.goal = goal
        if goal is not Tier.AWAKE and self.state == "active":
            self.state = "draining"
        elif goal is Tier.AWAKE and self.state == "resting":
            self.state = "waking"
        self.say(is_answer=is_answer)

    def say(self, *, is_answer: bool = False) -> None:
        said = ev.HolderSaid(7, self.state, self.goal, True, is_answer=is_answer)
        self.send("from engine", self.feed, said)

    def step_engine(self) -> None:
        if self.state == "draining" and any(each.asked for each in self.gateways):
            return
        below = "resting" if self.goal is not Tier.AWAKE else "waking"
        after = {"draining": "releasing", "releasing": below, "waking": "active"}
        if self.state in after:
            self.state = after[self.state]
            self.say()

    def come(self, number: int) -> None:
        gateway = self.gateways[number]
        gateway.waiting += 1
        self.ask(gateway)
        if gateway.waiting:
            self.beat(number)

    def finish(self, number: int) -> None:
        gateway = self.gateways[number]
        if gateway.asked:
            gateway.asked, self.answered = gateway.asked - 1, self.answered + 1
            gateway.quiet_since_ms = self.now_ms

    def deliver(self) -> bool:
        ready = [link for link in self.links.values() if link]
        if ready:
            call, *arguments = self.rng.choice(ready).popleft()
            call(*arguments)
        return bool(ready)

    def settle(self) -> None:
        """Until nothing is under way any more: requests are answered, all messages delivered."""
        for _ in range(500):
            while self.deliver():
                pass
            self.step_engine()
            for number, gateway in enumerate(self.gateways):
                self.ask(gateway)
                self.finish(number)


@pytest.mark.parametrize("seed", range(80))
def test_no_request_is_on_its_way_at_a_rest_and_whoever_waits_is_served(seed: int):
    """Goal: rests cost no request. Method: requests come and end, an operator sends goals, beats
    and words are late, in any order."""
    pod = SimPod(seed)
    came = 0
    for _ in range(400):
        pod.now_ms += pod.rng.choice((0.0, 1.0, 30.0))
        number = pod.rng.randrange(2)
        match pod.rng.randrange(14):
            case 0:
                came += 1
                pod.come(number)
            case 1 | 2:
                pod.finish(number)
            case 3:
                pod.beat(number)
            case 4 | 5:
                pod.step_engine()
            case 6 if pod.rng.random() < 0.2:
                pod.obey_goal(pod.rng.choice((Tier.WARM, Tier.AWAKE)), is_answer=False)
            case 7:
                pod.ask(pod.gateways[number])
            case 8:
                pod.feed(ev.SleepTick())
            case _:
                pod.deliver()
    pod.settle()
    assert pod.answered == came
    assert not any(each.waiting or each.asked for each in pod.gateways)


def test_the_simulation_does_let_the_engine_rest():
    """Else the test above would be true of a policy that never does anything."""
    rests = 0
    for seed in range(20):
        pod = SimPod(seed)
        for _ in range(40):
            pod.now_ms += 20.0
            pod.feed(ev.SleepTick())
            pod.settle()
        rests += pod.rests
    assert rests >= 20
