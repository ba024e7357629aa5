"""Samples of every event of the lifecycle, and engines in every state."""

from __future__ import annotations

from engine.core import events as ev
from engine.core.events import EngineEvent, State
from engine.core.lifecycle import Lifecycle
from plumbing.pod.messages import Tier

INC = "e-0123456789abcdef"
SAMPLES: dict[type[EngineEvent], EngineEvent] = {
    ev.Launch: ev.Launch(INC),
    ev.Prepared: ev.Prepared(),
    ev.Granted: ev.Granted(INC, 7),
    ev.OtherGranted: ev.OtherGranted("other", 8),
    ev.Woken: ev.Woken(),
    ev.CanaryPassed: ev.CanaryPassed(),
    ev.Serving: ev.Serving(),
    ev.Failed: ev.Failed("child_exit", "http died"),
    ev.BudgetSpent: ev.BudgetSpent(1000),
    ev.Terminate: ev.Terminate(),
    ev.TerminateNow: ev.TerminateNow(),
    ev.HandOver: ev.HandOver(INC, "other"),
    ev.Drained: ev.Drained(),
    ev.Shall: ev.Shall(Tier.WARM, "a test"),
    ev.Rested: ev.Rested(),
    ev.WeightsPlaced: ev.WeightsPlaced(is_away=True),
    ev.Reaped: ev.Reaped(),
}
MAIN_LINE = [
    SAMPLES[kind]
    for kind in (ev.Launch, ev.Prepared, ev.Granted, ev.Woken, ev.CanaryPassed, ev.Serving)
]
STEPS_TO = {
    State.DEAD: 0,
    State.INIT: 1,
    State.STANDBY: 2,
    State.WAKING: 3,
    State.ACTIVE: 6,
}


RESTING_LINE = [ev.Shall(Tier.WARM, "a test"), ev.Drained(), ev.Rested()]
STEPS_TO_REST = {State.RELEASING: 2, State.RESTING: 3}


def engine_in(state: State, *, can_rest: bool = False) -> Lifecycle:
    """One of the states of a rest implies that it can."""
    engine = Lifecycle()
    if state is State.DRAINING:
        engine = engine_in(State.ACTIVE, can_rest=can_rest)
        engine.handle(ev.Terminate())
        return engine
    if state in STEPS_TO_REST:
        engine = engine_in(State.ACTIVE, can_rest=True)
        for event in RESTING_LINE[: STEPS_TO_REST[state]]:
            engine.handle(event)
        assert engine.state is state
        return engine
    for event in MAIN_LINE[: STEPS_TO[state]]:
        is_prepared = isinstance(event, ev.Prepared)
        engine.handle(ev.Prepared(can_rest) if is_prepared else event)
    assert engine.state is state
    return engine


def kinds(effects: list[ev.EngineEffect]) -> list[str]:
    return [
        type(effect).__name__ for effect in effects if not isinstance(effect, ev.RecordTransition)
    ]
