"""The listening socket under random schedules: none refused, none lost, and one gateway accepts.

Method: `listener_world`, from one seed each, which a failure prints; then the rules of the arbiter
and of a gateway left out one by one, which the same schedules must catch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest

from lockserver.core.listener import HaveYield, LendTo, Listener
from lockserver.messages import Stage
from tests.sim import listener_world
from tests.sim.kit import replayable, seeds
from tests.sim.listener_world import HOLD_MS, GatewayModel, ListenerWorld

Faults = dict[str, float]
PLANNED: Faults = {"replace": 0.5}
DEATHS: Faults = {"replace": 0.3, "kill": 0.3}
RACES: Faults = {"replace": 1.0, "kill": 1.0}
WILD: Faults = {"replace": 0.3, "kill": 0.2, "stop": 0.2, "resume": 0.2, "cut": 0.2}
HANGS: Faults = {"replace": 0.5, "stop": 0.1}
SERVERS: Faults = {"replace": 0.3, "kill": 0.1, "kill_server": 0.2}
RUN_MS = 20_000.0


def run(faults: Faults, runs: int, **how: bool) -> Counter[str]:
    """The counts of all schedules together."""
    counts: Counter[str] = Counter()
    for seed in seeds(runs):
        world = ListenerWorld(seed, faults, **how)
        with replayable(seed, lambda world=world: world.trace):
            world.run(RUN_MS)
        counts += world.counts
    return counts


def test_planned_replacements_lose_and_refuse_nothing():
    counts = run(PLANNED, 20)
    assert counts["replaced"] > 50
    assert (counts["lost"], counts["refused"]) == (0, 0)


def test_deaths_lose_what_is_in_the_dead_one_and_refuse_nothing():
    counts = run(DEATHS, 20) + run(RACES, 50)
    assert counts["lost"] > 20
    assert counts["refused"] == 0


@pytest.mark.parametrize(("faults", "has_watchdog"), [(WILD, True), (WILD, False), (HANGS, False)])
def test_stopped_gateways_and_cut_connections_refuse_nothing(faults, has_watchdog):
    assert run(faults, 20, has_watchdog=has_watchdog)["accepted"] > 1000


def test_a_lock_server_that_restarts_gets_its_socket_back():
    assert run(SERVERS, 20)["accepted"] > 1000


def test_without_a_gateway_clients_are_refused_and_the_next_one_is_lent_the_address():
    """Goal: no client waits for nobody. Method: none for longer than the hold, then one."""
    world = ListenerWorld(1, {})
    world.restart_ms = None
    world.run(HOLD_MS + 2000)
    assert world.counts["refused"] > 0
    world.start()
    world.run(2000)
    refused = world.counts["refused"]
    world.run(2000)
    assert world.counts["refused"] == refused
    assert world.counts["accepted"] > 0


# ------------------------------------------------------------------ planted


def lends_before_the_yield(patch: pytest.MonkeyPatch) -> None:
    said = Listener.said

    def lent(self, gateway, stage, now_ms):
        effects = said(self, gateway, stage, now_ms)
        if any(isinstance(each, HaveYield) for each in effects) and self.successor:
            return [*effects, *self._free(now_ms)]
        return effects

    patch.setattr(Listener, "said", lent)


def asks_nobody_to_yield(patch: pytest.MonkeyPatch) -> None:
    said = Listener.said
    patch.setattr(
        Listener,
        "said",
        lambda self, *what: [x for x in said(self, *what) if not isinstance(x, HaveYield)],
    )


def waits_for_ever_for_one_that_hangs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("lockserver.core.listener.YIELD_MS", math.inf)


def closes_early(patch: pytest.MonkeyPatch) -> None:
    init = Listener.__init__
    patch.setattr(Listener, "__init__", lambda self, hold_ms, now_ms: init(self, 100.0, now_ms))


def never_closes(patch: pytest.MonkeyPatch) -> None:
    init = Listener.__init__
    patch.setattr(Listener, "__init__", lambda self, hold_ms, now_ms: init(self, math.inf, now_ms))


def forgets_the_successor_of_a_dead_one(patch: pytest.MonkeyPatch) -> None:
    def left(self, gateway, now_ms):
        self._stages.pop(gateway, None)
        if gateway == self.holder:
            self.holder, self.since_ms = "", now_ms
        return []

    patch.setattr(Listener, "left", left)


def gives_nothing_back_to_one_that_has_yielded(patch: pytest.MonkeyPatch) -> None:
    newest = Listener._newest
    patch.setattr(
        Listener,
        "_newest",
        lambda self, stage: "" if stage is Stage.YIELDS else newest(self, stage),
    )


def forgets_who_hands_the_socket_back(patch: pytest.MonkeyPatch) -> None:
    said = Listener.said

    def heard(self, gateway, stage, now_ms):
        if stage is Stage.ACCEPTS and self.holder != gateway:
            self._stages[gateway] = stage
            return []
        return said(self, gateway, stage, now_ms)

    patch.setattr(Listener, "said", heard)


def lends_to_the_oldest(patch: pytest.MonkeyPatch) -> None:
    """A gateway that finishes its requests gets it before its successor."""

    def lend(self, now_ms):
        gateway = self._newest(Stage.YIELDS) or self.successor
        if not gateway:
            return []
        self._hold(gateway, now_ms)
        return [LendTo(gateway)]

    patch.setattr(Listener, "_lend", lend)


def a_gateway_accepts_after_its_yield(patch: pytest.MonkeyPatch) -> None:
    def told(self, world):
        if self.stage is Stage.ACCEPTS:
            self.say(world, Stage.YIELDS)

    patch.setattr(GatewayModel, "told_to_yield", told)


def a_gateway_keeps_its_word_to_itself(patch: pytest.MonkeyPatch) -> None:
    """It stops accepting and does not say so, and the server's patience is long."""
    patch.setattr("lockserver.core.listener.YIELD_MS", 60_000.0)

    def told(self, world):
        self.listening, self.stage = False, Stage.YIELDS

    patch.setattr(GatewayModel, "told_to_yield", told)


def a_gateway_closes_its_connections_when_it_yields(patch: pytest.MonkeyPatch) -> None:
    told = GatewayModel.told_to_yield

    def cut(self, world):
        told(self, world)
        world.counts["lost"] += len(self.requests)
        self.requests.clear()

    patch.setattr(GatewayModel, "told_to_yield", cut)


Rule = Callable[[pytest.MonkeyPatch], None]
CAUGHT_BY: dict[Rule, Callable[[], object]] = {
    lends_before_the_yield: test_planned_replacements_lose_and_refuse_nothing,
    asks_nobody_to_yield: test_planned_replacements_lose_and_refuse_nothing,
    waits_for_ever_for_one_that_hangs: lambda: run(HANGS, 20, has_watchdog=False),
    closes_early: test_deaths_lose_what_is_in_the_dead_one_and_refuse_nothing,
    never_closes: test_without_a_gateway_clients_are_refused_and_the_next_one_is_lent_the_address,
    forgets_the_successor_of_a_dead_one: lambda: run(RACES, 50),
    gives_nothing_back_to_one_that_has_yielded: lambda: run(RACES, 50),
    forgets_who_hands_the_socket_back: test_a_lock_server_that_restarts_gets_its_socket_back,
    lends_to_the_oldest: test_planned_replacements_lose_and_refuse_nothing,
    a_gateway_accepts_after_its_yield: test_planned_replacements_lose_and_refuse_nothing,
    a_gateway_keeps_its_word_to_itself: test_planned_replacements_lose_and_refuse_nothing,
    a_gateway_closes_its_connections_when_it_yields: (
        test_planned_replacements_lose_and_refuse_nothing
    ),
}


@pytest.mark.parametrize("rule", CAUGHT_BY, ids=lambda rule: rule.__name__)
def test_every_planted_rule_is_caught(rule: Rule, monkeypatch: pytest.MonkeyPatch):
    rule(monkeypatch)
    assert listener_world.YIELD_MS  # the world's own patience does not change
    with pytest.raises(AssertionError):
        CAUGHT_BY[rule]()
