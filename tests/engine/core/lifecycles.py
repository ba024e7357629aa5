"""Samples of every event of the lifecycle, and engines in every state."""

from __future__ import annotations

from engine.core import events as ev
from engine.core.events import Command, EngineEffect, EngineEvent, State, Transition
from engine.core.lifecycle import Lifecycle
from plumbing.pod.messages import Tier

INC = "e-0123456789abcdef"
NEXT = "e-1111111111111111"
ASK, TELL, KILL = Command.ASK, Command.TELL_LOCK_SERVER, Command.KILL_TREE
DRAIN, PLACE = Command.DRAIN_BACKEND, Command.PLACE_WEIGHTS
AWAIT, KEEP_GOAL, EXIT = Command.AWAIT_SUCCESSOR, Command.KEEP_GOAL, Command.EXIT
RELAUNCH, STAY_COLD = Command.RELAUNCH, Command.STAY_COLD

SLEEP = ev.Shall(Tier.WARM, "a test")
WAKE = ev.Shall(Tier.AWAKE, "a test")
HAND_OVER = ev.HandOver(INC, "other")
DIED = ev.Failed("child_exit", "http died")
REAPED = ev.Reaped()
SAMPLES: dict[type[EngineEvent], EngineEvent] = {
    type(event): event
    for event in (
        *(ev.Launch(INC), ev.Prepared(), ev.Granted(INC, 7), ev.OtherGranted("other", 8)),
        *(ev.Woken(), ev.Serving(), DIED, ev.BudgetSpent(1000)),
        *(ev.Terminate(), ev.TerminateNow(), HAND_OVER, ev.Drained(), SLEEP, ev.Rested()),
        *(ev.WeightsPlaced(is_away=True), REAPED),
    )
}
MAIN_LINE = [SAMPLES[kind] for kind in (ev.Launch, ev.Prepared, ev.Granted, ev.Woken, ev.Serving)]
SERVED = MAIN_LINE[3:]
STEPS_TO = {State.DEAD: 0, State.INIT: 1, State.STANDBY: 2, State.WAKING: 3, State.ACTIVE: 5}
RESTING_LINE = [SLEEP, ev.Drained(), ev.Rested()]
STEPS_TO_REST = {State.RELEASING: 2, State.RESTING: 3}


def engine_in(state: State, *, can_rest: bool = False, can_offload: bool = False) -> Lifecycle:
    """One of the states of a rest implies that it can."""
    engine = Lifecycle()
    if state is State.DRAINING:
        engine = engine_in(State.ACTIVE, can_rest=can_rest)
        engine.handle(ev.Terminate())
    elif state in STEPS_TO_REST:
        engine = engine_in(State.ACTIVE, can_rest=True, can_offload=can_offload)
        played(engine, *RESTING_LINE[: STEPS_TO_REST[state]])
    else:
        for event in MAIN_LINE[: STEPS_TO[state]]:
            is_prepared = isinstance(event, ev.Prepared)
            engine.handle(ev.Prepared(can_rest, can_offload) if is_prepared else event)
    assert engine.state is state
    return engine


def played(engine: Lifecycle, *events: EngineEvent) -> list[EngineEffect]:
    """Everything that follows from `events`."""
    return [effect for event in events for effect in engine.handle(event)]


def asked(engine: Lifecycle, *events: EngineEvent) -> list[EngineEffect]:
    """The same without transitions."""
    return [each for each in played(engine, *events) if not isinstance(each, Transition)]


def path_of(effects: list[EngineEffect]) -> list[State]:
    return [effect.target for effect in effects if isinstance(effect, Transition)]


def exit_of(engine: Lifecycle) -> tuple[int | None, str | None]:
    """With what the supervisor ends."""
    now = engine.now
    return (0, None) if now.is_leaving else (now.exit_code, now.reason)
