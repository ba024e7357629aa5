"""Goals of `offloaded`: who lets its weights go, when, and what a wake makes of it."""

from __future__ import annotations

import pytest

from engine.core import events as ev
from engine.core.events import State
from engine.core.lifecycle import Lifecycle, tier_of
from plumbing.pod.messages import Tier
from tests.engine.core.lifecycles import INC, MAIN_LINE, kinds

AWAY = ev.Shall(Tier.OFFLOADED, "a test")
WARM = ev.Shall(Tier.WARM, "a test")
AWAKE = ev.Shall(Tier.AWAKE, "a test")
REST = (ev.Drained(), ev.Rested())
PLACED = ev.WeightsPlaced(is_away=True)


def standby(*, can_offload: bool = True, goal: Tier = Tier.AWAKE) -> Lifecycle:
    engine = Lifecycle(goal=goal)
    engine.handle(MAIN_LINE[0])
    engine.handle(ev.Prepared(can_rest=True, can_offload=can_offload))
    assert engine.state is State.STANDBY
    return engine


def active(**more: bool) -> Lifecycle:
    engine = standby(**more)
    for event in MAIN_LINE[2:]:
        engine.handle(event)
    assert engine.state is State.ACTIVE
    return engine


def played(engine: Lifecycle, *events: ev.EngineEvent) -> list[ev.EngineEffect]:
    return [effect for event in events for effect in engine.handle(event)]


def tier(engine: Lifecycle) -> Tier:
    return tier_of(engine.state, is_away=engine.now.is_away)


def test_active_engine_rests_first_and_then_lets_its_weights_go():
    """One order after the other; the tier is what has been proven."""
    engine = active()
    assert "PlaceWeights" not in kinds(played(engine, AWAY, REST[0]))
    assert played(engine, REST[1])[-1] == ev.PlaceWeights(is_away=True)
    assert tier(engine) is Tier.WARM
    assert played(engine, PLACED) == [ev.ShowTier()]
    assert (engine.state, tier(engine)) == (State.RESTING, Tier.OFFLOADED)


def test_wake_brings_the_weights_back_by_itself_and_the_next_rest_lets_them_go_again():
    """No order to map them: the backend does it on its way to `woken`."""
    engine = active()
    played(engine, AWAY, *REST, PLACED)
    assert kinds(engine.handle(AWAKE)) == ["KeepGoal", "Ask"]
    played(engine, *MAIN_LINE[3:])
    assert (engine.state, tier(engine)) == (State.ACTIVE, Tier.AWAKE)
    assert played(engine, AWAY, *REST)[-1] == ev.PlaceWeights(is_away=True)


def test_goal_warm_maps_them_without_a_wake():
    """Offloaded, then warm, then warm again: one order to map them."""
    engine = active()
    played(engine, AWAY, *REST, PLACED)
    assert engine.handle(WARM)[-1] == ev.PlaceWeights(is_away=False)
    assert engine.handle(WARM) == []
    played(engine, ev.WeightsPlaced(is_away=False))
    assert (engine.state, tier(engine)) == (State.RESTING, Tier.WARM)


def test_standby_lets_its_weights_go_too_and_stays_a_standby():
    """Whether told while it is one, or before it was launched; granted, it rests as it is."""
    engine = standby()
    assert engine.handle(AWAY)[-1] == ev.PlaceWeights(is_away=True)
    engine.handle(PLACED)
    assert (engine.state, tier(engine)) == (State.STANDBY, Tier.OFFLOADED)
    assert "PlaceWeights" not in kinds(engine.handle(ev.Granted(INC, 7)))
    assert (engine.state, tier(engine)) == (State.RESTING, Tier.OFFLOADED)
    launched = Lifecycle(goal=Tier.OFFLOADED)
    launched.handle(MAIN_LINE[0])
    effects = launched.handle(ev.Prepared(can_rest=True, can_offload=True))
    assert effects[-1] == ev.PlaceWeights(is_away=True)


def test_granted_standby_that_must_be_awake_wakes_from_host_memory():
    """A failover to an offloaded standby whose goal has changed: the wake maps the weights."""
    engine = standby()
    played(engine, AWAY, PLACED)
    assert engine.handle(AWAKE)[-1] == ev.PlaceWeights(is_away=False)
    assert kinds(engine.handle(ev.Granted(INC, 7))) == ["Ask", "Claim"]
    played(engine, ev.WeightsPlaced(is_away=False), ev.Woken())
    assert not engine.now.is_away


def test_backend_that_cannot_offload_rests_warm():
    """The goal below awake is obeyed as far as it can be."""
    engine = active(can_offload=False)
    assert "PlaceWeights" not in kinds(played(engine, AWAY, *REST))
    assert (engine.state, tier(engine)) == (State.RESTING, Tier.WARM)


@pytest.mark.parametrize("end", [ev.Failed("child_exit", "it died"), ev.TerminateNow()])
def test_death_forgets_where_the_weights_were(end: ev.EngineEvent):
    """The next incarnation has its own, and is asked anew."""
    engine = active()
    played(engine, AWAY, *REST, PLACED, end)
    assert tier(engine) is Tier.COLD
