"""Admission: what a gateway may do with requests for a model, when it is expected, and why they
wait: for clients, status and `explain`.

A door is a function of what is known of its model; `tell` says those that have changed.

**Expected:** when a waiting model should be awake, from what each phase took before: what is left
of its own raise, or until those who make room have left, and its raise then. For people, and for
requests whose deadline is earlier: they are told at once. It promises nothing (`bound_ms` does),
and is None where something was never measured, or where only an event can tell, such as the end of
somebody else's turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from plumbing.pod.messages import Tier
from pool.core.events import (
    Door,
    OpenDoor,
    RefusedDoor,
    Running,
    SetModelDoor,
    ShutDoor,
    binds_alike,
)
from pool.core.facts import Facts
from pool.core.model import Model
from pool.core.states import FALLING, RISING, ModelState
from pool.core.who_wakes import Decision, Wait, Yield, unheard

S = ModelState


def tell(facts: Facts, *, says_again: bool) -> None:
    """Say the doors that have changed; `says_again`: all of them. While a model is recovering the
    door on file stands: nobody knows better."""
    for name in [name for name in facts.models if name in facts.shown]:
        model = facts.models[name]
        stands = model.door is not None and model.is_recovering
        is_other = not model.is_unknown and not stands and _set_door(facts, model)
        if (is_other or says_again) and model.door is not None:
            facts.say(SetModelDoor(name, model.door_number, model.door))
    facts.shown.clear()


def _set_door(facts: Facts, model: Model) -> bool:
    """Whether it is another one. A number that nobody waits for to be obeyed may grow."""
    now_ms, door = facts.now_ms, door_of(model, facts.now_ms)
    key = door_key(model, door)
    soon_ms = door.expected_ms if isinstance(door, ShutDoor) else None
    if key == model.door_key:
        # A reason that changes is no news for those who wait; another time is, while it is pending.
        is_pending = model.state is ModelState.PENDING and isinstance(door, ShutDoor)
        if not is_pending or not _is_news(model, soon_ms, now_ms):
            return False
    if not (model.door_key and binds_alike(model.door, door)):
        facts.door_number += 1
        model.door_number = facts.door_number
    model.door, model.door_key = door, key
    model.door_expected_ms = None if soon_ms is None else now_ms + soon_ms
    return True


def door_key(model: Model, door: Door) -> tuple[object, ...]:
    """What makes it another door."""
    return model.state, door.running if isinstance(door, ShutDoor) else door


def door_of(model: Model, now_ms: float) -> Door:
    """The door of a model whose phase is known. An open one stays open over a failover: the gateway
    replaces its engine by itself, and nobody waits for the pool."""
    refused = refusal(model)
    if refused is not None:
        return RefusedDoor(*refused)
    was_open = isinstance(model.door, OpenDoor)
    if model.state is ModelState.AWAKE or (model.state in RISING and model.is_again and was_open):
        if model.holder is not None:
            return OpenDoor(model.holder.engine, model.holder.token)
        if isinstance(model.door, OpenDoor):
            return model.door
    running = model.running if model.state in FALLING else Running.FINISH
    return ShutDoor(running, expected_ms(model, now_ms), shut(model))


# ------------------------------------------------------------------ when it is expected

NEWS_MS = 1_000.0  # less is no news for somebody who waits,
NEWS_SHARE = 0.25  # nor is this part of what is left


def expected_ms(model: Model, now_ms: float) -> float | None:
    """Until it is awake, as far as is known; None also where nobody waits for it."""
    at_ms = model.expected_ms
    if model.state in RISING:
        takes_ms = model.costs.raise_ms(model.floor)
        at_ms = at_ms if takes_ms is None else model.stage_since_ms + takes_ms
    if at_ms is None or model.is_unload_ordered or model.state is ModelState.AWAKE:
        return None
    return max(0.0, at_ms - now_ms)


def expect(facts: Facts, decisions: Mapping[str, Decision]) -> None:
    """Note when each model about which something was decided should be awake."""
    for name, model in facts.models.items():
        at_ms = _awake_at_ms(facts, model, decisions.get(name))
        if model.expected_ms != at_ms:
            model.expected_ms = at_ms
            facts.shown.add(name)


def _is_news(model: Model, soon_ms: float | None, now_ms: float) -> bool:
    """Whether what is expected now differs much from what was said with this door."""
    old_ms = model.door_expected_ms
    if old_ms is None or soon_ms is None:
        return (old_ms is None) is not (soon_ms is None)
    return abs(now_ms + soon_ms - old_ms) > max(NEWS_MS, NEWS_SHARE * soon_ms)


def _awake_at_ms(facts: Facts, model: Model, decision: Decision | None) -> float | None:
    own_ms, from_ms = model.costs.raise_ms(model.held), facts.now_ms
    match decision:
        case Yield():
            leaving = model.victims
        case Wait(until_ms=float() as until_ms) if not decision.is_outranked:
            leaving, from_ms = decision.victims, max(from_ms, until_ms)
        case Wait() if model.state in FALLING and not decision.behind:
            leaving = (model.name,)
        case _:
            return None
    victims = [facts.models[name] for name in leaving if name in facts.models]
    if own_ms is None or any(each.has_resumed or each.state in RISING for each in victims):
        return None  # while streams resume, only they can tell when the turn ends
    return max([from_ms, *(_left_ms(each, from_ms) for each in victims)]) + own_ms


def _left_ms(model: Model, asked_ms: float) -> float:
    """When the memory is free of one that leaves, or is asked to at `asked_ms`."""
    costs = model.costs
    drain_ms = model.rules.park_ms if costs.drain_ms is None else costs.drain_ms
    release_ms = costs.release_ms or 0.0
    match model.state:
        case ModelState.DRAINING:
            return max(asked_ms, (model.drained_ms or asked_ms) + drain_ms) + release_ms
        case ModelState.AWAKE:
            return asked_ms + drain_ms + release_ms
        case state if state in FALLING:
            return model.stage_since_ms + release_ms
        case _:
            return asked_ms


# ------------------------------------------------------------------ why requests wait

RETRY_S = 60  # somebody has to look at it first, or somebody else to leave

# What a client is told that waits.
PHASES: Mapping[ModelState, str] = {
    S.PENDING: "model {name} waits for room: {wait}",
    S.LOADING: "model {name} is being loaded: {reason}",
    S.WAKING: "model {name} is waking up",
    S.DRAINING: "model {name} is finishing its requests: {reason}",
    S.RELEASING: "model {name} is freeing its memory: {reason}",
    S.UNLOADING: "model {name} is freeing its memory: {reason}",
}


def refusal(model: Model) -> tuple[str, str, int | None] | None:
    """Code, sentence and seconds until a client may try again (None: not by itself); None: its
    requests are not refused. A fault that may pass is worth another try."""
    name = model.name
    is_down = model.state in (S.COLD, S.PENDING) and model.goal is Tier.COLD
    if model.state is S.FAILED:
        fault = model.fault.rstrip(".")
        why = f"model {name} has failed: {fault}; `understudy pool reset {name}` retries it"
        return "pool.failed", why, None if model.is_permanent else RETRY_S
    if model.state is S.UNLOADING and model.is_unload_ordered:
        return "pool.not_loaded", f"an operator is unloading model {name}", None
    if is_down and not (model.rules.is_on_demand or model.load_ordered_ms is not None):
        fix = f"load it with `understudy pool load {name}`"
        return "pool.not_loaded", f"model {name} is not loaded on demand; {fix}", None
    if model.never and model.state is S.PENDING:
        return "pool.no_room", f"model {name} does not fit: {model.never}", RETRY_S
    return None


def shut(model: Model) -> str:
    """Why requests wait, in one sentence."""
    if model.is_unload_ordered:
        return f"an operator is unloading model {model.name}"
    text = PHASES.get(model.state, "model {name} is {state}")
    wait = model.wait or "it was requested just now"
    return text.format(name=model.name, wait=wait, reason=model.reason, state=model.state)


# What an engine in each state does next, on its way up.
_STEPS = {"dead": "start", "init": "start", "standby": "wake", "waking": "wake", "resting": "wake"}


def _waits(facts: Facts, model: Model) -> Iterator[str | None]:
    """One after the other; None or "": this one is none."""
    state = model.state
    if model.is_unknown or model.is_recovering:
        missing = [each.name for each in model.engines if each.said is None and not each.is_gone]
        if missing:
            have = "has" if len(missing) == 1 else "have"
            yield f"{', '.join(missing)} {have} not reported since the pool started"
        yield "an engine is changing its state and has not reported the new one yet"
    if state is S.PENDING:
        if model.is_blind:
            yield unheard(model.rules.devices[0])
        yield model.never or model.wait
    if state in RISING:
        engine = model.main()
        name, said = engine.name, engine.said
        if model.is_unload_ordered:
            what = "all gateways to confirm that they stopped sending"
            yield f"waiting for {what}; then it is unloaded"
        if said is None or not engine.is_connected:
            yield f"{name} is not connected to the pool"
        elif not engine.has_obeyed:
            yield f"{name} has not answered its newest goal, {engine.goal}"
        else:
            fault = f" after a fault: {said.fault}" if said.fault else ""
            yield f"waiting for {name} to {_STEPS.get(said.state, 'be active')}{fault}"
    if state is S.DRAINING:
        count, engine_there = facts.demand.in_flight(model.name), model.stander()
        if count:
            yield f"{count} {'request is' if count == 1 else 'requests are'} still running"
        if not facts.demand.is_quiet(model.name, model.door_number):
            yield "waiting for all gateways to confirm that they stopped sending"
        if engine_there is None or engine_there.said is None:
            yield "no engine holds its lock, so idleness cannot be confirmed"
        elif engine_there.said.in_flight:
            yield f"{engine_there.name} has {engine_there.said.in_flight} requests"
        else:
            yield f"{engine_there.name} is not connected"
    if model.frees is not None:
        yield facts.ledger.why_not_free(model)
    yield model.never


def wait_of(facts: Facts, model: Model) -> str | None:
    """What it waits for now: which component, and which report or proof of it; None: nothing."""
    found = [next(filter(None, _waits(facts, model)), "")]
    if model.state in FALLING and not (model.is_unknown or model.is_recovering):
        # It makes room, and may be wanted again already.
        found.append(model.never or (model.wait if model.is_wanted else ""))
    return "; ".join(dict.fromkeys(each for each in found if each)) or None


def next_of(facts: Facts, model: Model) -> str:
    """Why a model that somebody waits for does not serve yet."""
    if model.state is S.FAILED:
        return model.fault
    return wait_of(facts, model) or shut(model)
