"""When the engine of a pod without a pool sleeps and wakes, and the door between the two.

The table goes through each rule once. The simulation has an engine that obeys, a gateway with
requests, the one that it has replaced, and messages to and from the engine that arrive late: no
goal `warm` while a request is in the engine or on its way, and whoever waits is served in the end.
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.events import DoorSet
from gateway.core.machine import NEVER_MS
from gateway.core.sleep_door import SendGoal, SleepDoor, SleepRules
from plumbing.pod.messages import EngineReportMsg, Tier

AFTER_MS = 5_000.0
STATES = ("init", "standby", "waking", "active", "draining", "releasing", "resting", "dead")


def report(state: str, goal: Tier = Tier.AWAKE, token: int = 7, *, can_rest: bool = True):
    return EngineReportMsg("e1", "i", token, state, Tier.AWAKE, goal, "", 0, 0, can_rest)


class Table:
    """The door of e1 under token 7, at a gateway that has been quiet since the time 0."""

    def __init__(self, **rules: object) -> None:
        self.core = SleepDoor(SleepRules(**({"keep_alive_ms": AFTER_MS} | rules)))
        self.now_ms = 0.0
        self.core.holder_is("e1", 7, 0.0)
        self.said("active")

    def said(self, state: str, goal: Tier = Tier.AWAKE, *, is_answer: bool = False, **more: object):
        return self.core.heard(report(state, goal, **more), self.now_ms, is_answer=is_answer)

    def load(self, wanting: int = 0, quiet_ms: float | None = None, after: float = 0.0):
        self.now_ms += after
        quiet_ms = self.now_ms if quiet_ms is None else quiet_ms
        return self.core.load(wanting, quiet_ms, self.now_ms)

    @property
    def is_shut(self) -> bool:
        return self.core.door is not None


def goals(effects) -> list[Tier]:
    return [each.goal for each in effects if isinstance(each, SendGoal)]


def test_quiet_for_so_long_shuts_the_door_and_then_sends_the_goal():
    table = Table()
    assert table.load(after=AFTER_MS - 1) == []
    told, door, goal = table.load(after=1)
    assert (told.kind, goal) == ("sleep", SendGoal(Tier.WARM))
    assert door.door == table.core.door is not None
    assert table.said("active", Tier.AWAKE) == []  # it has not read the goal yet
    (door,) = table.said("draining", Tier.WARM, is_answer=True)
    assert door.door.reason.startswith("e1 is draining")
    table.said("resting", Tier.WARM)
    assert goals(table.load()) == []
    assert "a request wakes it" in table.core.door.reason


@pytest.mark.parametrize(
    "disturb",
    [
        lambda table: table.said("active", can_rest=False),
        lambda table: table.said("waking"),
        lambda table: table.core.lost(0.0),
        lambda table: table.core.holder_is("e1", 8, 0.0),
        lambda table: setattr(table.core, "has_predecessor", True),
        lambda table: setattr(table.core, "rules", SleepRules()),
    ],
    ids=["cannot", "waking", "lost", "token", "another gateway", "off"],
)
def test_no_sleep_while(disturb):
    table = Table()
    disturb(table)
    assert table.load(after=AFTER_MS) == []
    assert not table.is_shut


def test_quiet_counts_from_the_last_request_from_the_wake_and_from_a_refusal():
    table = Table()
    table.said("waking")
    table.now_ms = AFTER_MS - 1
    table.said("active")
    assert table.load(after=AFTER_MS - 1) == []
    assert table.load(quiet_ms=20.0, after=1) == []
    assert goals(table.load(quiet_ms=AFTER_MS, after=AFTER_MS)) == [Tier.WARM]
    told, door = table.core.refused("the backend cannot rest", table.now_ms)
    assert (told.severity, door) == ("warning", DoorSet())
    assert "the backend cannot rest" in told.message
    assert table.load(after=AFTER_MS - 1) == []
    assert goals(table.load(after=1)) == [Tier.WARM]


@pytest.mark.parametrize("state", ["active", "draining", "releasing", "resting"])
def test_a_request_wakes_an_engine_once_wherever_it_is_on_its_way_down(state: str):
    """At first it may not even have heard of the first goal, whose answer then does not answer the
    second."""
    table = Table()
    table.load(after=AFTER_MS)
    if state != "active":
        table.said("draining", Tier.WARM, is_answer=True)
        table.said(state, Tier.WARM)
    told, door, goal = table.load(wanting=1, quiet_ms=0.0)
    assert (told.kind, goal) == ("wake", SendGoal(Tier.AWAKE))
    assert "wakes it" not in door.door.reason
    assert goals(table.load(wanting=2, quiet_ms=0.0)) == []
    table.said("draining", Tier.WARM)
    assert table.is_shut
    table.said("resting", Tier.AWAKE, is_answer=True)
    assert table.is_shut
    table.said("waking", Tier.AWAKE)
    assert not table.is_shut
    table.now_ms += 20.0
    (told,) = table.said("active", Tier.AWAKE)
    assert (told.kind, told.data) == ("woken", {"duration_ms": 20.0})
    table.said("draining", Tier.WARM)  # by order: who waited before is served
    assert goals(table.load()) == []


def test_only_an_operator_wakes_it_where_that_is_asked_for():
    table = Table(wakes_on_request=False)
    table.said("resting", Tier.WARM)
    assert table.core.door.expected_ms == NEVER_MS
    assert "understudy wake" in table.core.door.reason
    assert goals(table.load(wanting=1, quiet_ms=0.0)) == []
    (door,) = table.said("resting", Tier.AWAKE)
    assert door.door.expected_ms is None


@pytest.mark.parametrize("holder", [None, ("e2", 9), ("e1", 9)])
def test_whatever_is_not_known_opens_the_door(holder: tuple[str, int] | None):
    table = Table()
    table.said("resting", Tier.WARM)
    core = table.core
    (door,) = core.holder_is(*holder, 0.0) if holder else core.lost(0.0)
    assert door == DoorSet()
    assert core.goal is None


@given(
    state=st.sampled_from(STATES),
    goal=st.sampled_from(Tier),
    token=st.sampled_from([0, 7, 8]),
    can_rest=st.booleans(),
)
def test_the_door_is_shut_only_for_the_holder_and_only_below_awake(
    state: str, goal: Tier, token: int, can_rest: bool
):
    table = Table(keep_alive_ms=0.0)
    table.said(state, goal, token=token, can_rest=can_rest)
    is_holder = token == 7 and state in ("waking", "active", "draining", "releasing", "resting")
    is_below = state in ("draining", "releasing", "resting") or (
        can_rest and goal is not Tier.AWAKE
    )
    assert table.is_shut is (is_holder and is_below)


# ------------------------------------------------------------------------------ simulation


class SimPod:
    """A gateway with its door, an engine that obeys, and the link between them, as slow as it
    likes. `old`: requests of the gateway that this one has replaced."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ms = self.quiet_since_ms = 0.0
        self.core = SleepDoor(SleepRules(keep_alive_ms=50.0))
        self.is_shut = False
        self.waiting = self.asked = self.old = self.answered = self.sleeps = 0
        self.state, self.goal = "active", Tier.AWAKE
        self.links: tuple[deque, deque] = (deque(), deque())  # to the engine, and from it
        self.core.holder_is("e1", 7, 0.0)
        self.say()

    def perform(self, effects) -> None:
        for effect in effects:
            match effect:
                case DoorSet():
                    self.is_shut = effect.door is not None
                    self.send()
                case SendGoal():
                    if effect.goal is Tier.WARM:
                        self.sleeps += 1
                        assert not self.asked + self.old, "a request is in an engine that rests"
                        assert self.is_shut, "another one may be sent"
                    self.links[0].append((effect.goal, True))

    def send(self) -> None:
        if not self.is_shut and self.state == "active":
            self.asked, self.waiting = self.asked + self.waiting, 0
        elif self.is_shut and self.waiting:
            self.load_soon = True

    load_soon = False

    def load(self) -> None:
        self.load_soon = False
        quiet_ms = 0.0 if self.waiting + self.asked else self.now_ms - self.quiet_since_ms
        self.perform(self.core.load(self.waiting, quiet_ms, self.now_ms))

    def obey(self, goal: Tier, is_answer: bool) -> None:
        self.goal = goal
        if goal is not Tier.AWAKE and self.state == "active":
            self.state = "draining"
        elif goal is Tier.AWAKE and self.state == "resting":
            self.state = "waking"
        self.say(is_answer=is_answer)

    def say(self, *, is_answer: bool = False) -> None:
        self.links[1].append((report(self.state, self.goal), is_answer))

    def step_engine(self) -> None:
        if self.state == "draining" and self.asked + self.old:
            return
        below = "resting" if self.goal is not Tier.AWAKE else "waking"
        after = {"draining": "releasing", "releasing": below, "waking": "active"}
        if self.state in after:
            self.state = after[self.state]
            self.say()

    def finish(self) -> None:
        if self.asked:
            self.asked, self.answered = self.asked - 1, self.answered + 1
            self.quiet_since_ms = self.now_ms
        elif self.old:
            self.old -= 1
        if not self.old:
            self.core.has_predecessor = False

    def deliver(self) -> bool:
        ready = [link for link in self.links if link]
        if ready:
            link = self.rng.choice(ready)
            what, is_answer = link.popleft()
            if link is self.links[0]:
                self.obey(what, is_answer)
            else:
                self.perform(self.core.heard(what, self.now_ms, is_answer=is_answer))
        return bool(ready)

    def settle(self) -> None:
        """Until nothing is under way any more: requests are answered, all messages delivered."""
        for _ in range(300):
            while self.deliver():
                pass
            self.step_engine()
            self.send()
            self.finish()
            self.load()


def walked(seed: int) -> SimPod:
    """Requests come and end, a gateway is replaced, an operator sends goals, words are late, in any
    order; in the end everybody has an answer."""
    pod, came = SimPod(seed), 0
    for _ in range(400):
        pod.now_ms += pod.rng.choice((0.0, 1.0, 30.0))
        match pod.rng.randrange(14):
            case 0:
                came, pod.waiting = came + 1, pod.waiting + 1
                pod.send()
            case 1 | 2:
                pod.finish()
            case 3:
                pod.load()
            case 4 | 5:
                pod.step_engine()
            case 6 if pod.rng.random() < 0.2:
                pod.obey(pod.rng.choice((Tier.WARM, Tier.AWAKE)), is_answer=False)
            case 7:
                pod.send()
            case 8 if pod.rng.random() < 0.1:
                pod.old, pod.asked = pod.asked, 0
                pod.answered += pod.old
                pod.core.has_predecessor = True
            case _:
                pod.deliver()
        if pod.load_soon:
            pod.load()
    pod.settle()
    assert pod.answered == came
    assert not pod.waiting + pod.asked
    return pod


@pytest.mark.parametrize("part", range(4))
def test_no_request_is_on_its_way_at_a_sleep_and_whoever_waits_is_served(part: int):
    """Goal: sleeps cost no request, and there are some."""
    assert sum(walked(seed).sleeps for seed in range(20 * part, 20 * part + 20)) >= 10
