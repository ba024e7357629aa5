"""Goal: whatever turns, deaths, clients and cuts there are, in any order, nothing is sent past a
shut door, no engine rests under a request, and every request ends once, whole unless it was cut
(P3 and P5 of the pool).

Method: seeded schedules of a pool in virtual time; then one rule after the other is broken, and the
schedules notice.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from gateway.core import events as ev
from gateway.core import lanes as lane_module
from gateway.core.events import BreakCause, LaneRules
from gateway.core.lanes import Lane, Lanes
from gateway.core.machine import UNANSWERED, Gateway, LaneTarget
from pool.core.events import OpenDoor
from tests.gateway.core.lanes_pod import LanesPod
from tests.gateway.core.model import KINDS

END_MS = 6_000.0


class Schedule:
    """One run: two or three models, of which one is awake at a time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        names = ("a", "b", "c")[: self.rng.choice((2, 2, 3))]
        rules = LaneRules(max_in_flight=self.rng.choice((2, 5, 256)))
        self.pod = LanesPod(seed, names, rules, step_ms=2.0)
        self.cut_ms = self.rng.choice((None, None, 120.0))
        self.names = names
        self.turn = 0
        for name in names[1:]:
            self.pod.stand(name)
        self.pod.awake(names[0])
        for _ in range(self.rng.randrange(4, 14)):
            self.pod.at(self.rng.uniform(0.0, END_MS / 2), self._come)
        for _ in range(self.rng.randrange(3)):
            self.pod.at(self.rng.uniform(0.0, END_MS), self._die)
        self.pod.at(self._length_ms(), self._switch)

    def _length_ms(self) -> float:
        """Long enough for a replay, as the pool's protection is."""
        return self.rng.uniform(100.0, 300.0)

    def _come(self) -> None:
        client = self.pod.ask(
            self.rng.choice(KINDS),
            self.rng.choice((1, 8, 60, 150)),
            self.rng.choice(self.names),
            is_stream=self.rng.random() < 0.7,
            priority=self.rng.choice((0, 0, 0, 3)),
        )
        if self.rng.random() < 0.15:
            self.pod.at(self.rng.uniform(0.0, 500.0), lambda: self._leave(client))

    def _leave(self, client) -> None:
        if not client.outcome:
            self.pod.leave(client)

    def _die(self) -> None:
        if self.pod.drained is None and any(each.is_awake for each in self.pod.models.values()):
            self.pod.die(self.rng.choice(self.names))

    def _switch(self) -> None:
        old = self.names[self.turn % len(self.names)]
        if self.pod.drained is None and self.pod.models[old].is_awake:
            self.turn += 1
            new = self.names[self.turn % len(self.names)]
            self.pod.switch(old, new, self.rng.choice((1.0, 30.0)), self.cut_ms)
        if self.pod.now_ms < END_MS or any(not each.outcome for each in self.pod.clients.values()):
            self.pod.at(self._length_ms(), self._switch)

    def run(self) -> None:
        self.pod.run(10 * END_MS)
        for client in self.pod.clients.values():
            if client.outcome == "left":
                continue
            if client.ending is not None and client.ending.code == "pool.cut":
                assert self.cut_ms is not None
            elif client.is_stream:
                client.check_whole()
            else:
                assert client.outcome == "whole", client
        assert self.pod.gateway.shared.memory_bytes == 0
        for model in self.pod.models.values():
            assert not self.pod.demand(model.name).tickets
            assert isinstance(model.door, OpenDoor) or not self.pod.demand(model.name).in_flight


@pytest.mark.parametrize("part", range(4))
def test_every_request_ends_once_and_none_is_sent_past_a_shut_door(part: int):
    parked = requeued = 0
    for seed in range(50 * part, 50 * part + 50):
        schedule = Schedule(seed)
        schedule.run()
        clients = schedule.pod.clients.values()
        parked += sum(isinstance(each, ev.StreamPaused) for each in schedule.pod.records)
        requeued += sum(len(each.asked) > 1 and not each.is_stream for each in clients)
    assert parked > 20
    assert requeued > 5


# ------------------------------------------------------------------ planted mutations


def schedules() -> None:
    for seed in range(60):
        Schedule(seed).run()


def dies_at_rest() -> None:
    """A stream makes five tokens in each turn, and its engine dies in each rest."""
    pod = LanesPod(step_ms=20.0)
    pod.stand("b")
    pod.awake("a")
    client = pod.ask("chat", 60)
    for turn in range(4):
        pod.at(60.0 + 1_000.0 * turn, lambda: pod.switch("a", "b", park_ms=1.0))
        pod.at(300.0 + 1_000.0 * turn, lambda: pod.die("a"))
        pod.at(800.0 + 1_000.0 * turn, lambda: pod.switch("b", "a", park_ms=1.0))
    pod.run()
    client.check_whole()


def outlasts_its_turn() -> None:
    """An answer without a stream takes half a second, a turn a fifth."""
    pod = LanesPod()
    pod.stand("b")
    pod.awake("a")
    client = pod.ask("chat", 100, is_stream=False)
    for turn in range(6):
        pod.at(200.0 + 800.0 * turn, lambda: pod.switch("a", "b", park_ms=1.0))
        pod.at(600.0 + 800.0 * turn, lambda: pod.switch("b", "a", park_ms=1.0))
    pod.run()
    assert (client.outcome, len(client.asked)) == ("whole", 2)


@pytest.mark.parametrize("scenario", [dies_at_rest, outlasts_its_turn])
def test_scenario_passes_with_every_rule_in_place(scenario):
    """Goal: a failure below is the mutation's. Method: the same, without one; `schedules` are those
    above."""
    scenario()


broke, drop, demand = Gateway.broke, Gateway.drop, Lane.demand


def yielding_is_a_break(self, attempt, cause, now_ms):
    broke(self, attempt, BreakCause.CLOSED if cause is BreakCause.YIELDED else cause, now_ms)


def forgets_to_drop(self, request):
    """The engine goes on with what was parked."""
    attempt = request.attempt
    drop(self, request)
    if attempt is not None:
        self.outbox.pop()


def yields_without_end(self, request):
    return request.state in (*lane_module.BEGUN, *UNANSWERED)


def counts_streams_only(self, now_ms):
    streams = sum(each.owner.is_stream for each in self.attempts.values())
    return msgspec.structs.replace(demand(self, now_ms), in_flight=streams)


MUTATIONS = {
    "asks past a shut door": (
        {(Lane, "_may_send"): lambda self: True, (LaneTarget, "part"): lambda self: None},
        schedules,
    ),
    "an unanswered request is none": ({(Lane, "demand"): counts_streams_only}, schedules),
    "parked streams stay in the engine": ({(Gateway, "drop"): forgets_to_drop}, schedules),
    "yielding is a break": ({(Gateway, "broke"): yielding_is_a_break}, dies_at_rest),
    "unanswered requests yield without end": (
        {(Lane, "_may_yield"): yields_without_end},
        outlasts_its_turn,
    ),
    "a door that opens greets nobody": ({(Lane, "_open"): lambda *_: None}, schedules),
    "numbers do not tell the lane": (
        {(Lanes, "_lane_of"): lambda self, number: self._all[0]},
        schedules,
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch):
    patches, scenario = MUTATIONS[name]
    for (owner, attribute), mutation in patches.items():
        monkeypatch.setattr(owner, attribute, mutation)
    with pytest.raises((AssertionError, KeyError)):
        scenario()
