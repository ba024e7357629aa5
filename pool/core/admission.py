"""Admission: what a gateway may do with requests for a model, when it is expected, and why they
wait: for clients, status and `explain`.

A door is a function of what is known of its model; `tell` says those that have changed. The
expected time is for people, and for requests whose deadline is earlier: they are told at once. It
promises nothing (`bound_ms` does).
"""

from __future__ import annotations

from collections.abc import Iterator

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
from pool.core.who_wakes import unheard

S = ModelState


def tell(facts: Facts, *, says_again: bool) -> None:
    """Say the doors that have changed; `says_again`: all of them. While a model is recovering the
    door on file stands: nothing better is known."""
    for name in [name for name in facts.models if name in facts.shown]:
        model = facts.models[name]
        stands = model.door is not None and model.is_recovering
        is_other = not model.is_unknown and not stands and _set_door(facts, model)
        if (is_other or says_again) and model.door is not None:
            facts.say(SetModelDoor(name, model.door_number, model.door))
    facts.shown.clear()


def _set_door(facts: Facts, model: Model) -> bool:
    """Whether it is another one. A number that no gateway must obey first may grow; a reason
    that changes is no news for those who wait."""
    door = door_of(facts, model)
    key = door_key(model, door)
    if key == model.door_key:
        return False
    if not (model.door_key and binds_alike(model.door, door)):
        facts.door_number += 1
        model.door_number = facts.door_number
    model.door, model.door_key = door, key
    return True


def door_key(model: Model, door: Door) -> tuple[object, ...]:
    """What makes it another door."""
    return model.state, model.has_plan, door.running if isinstance(door, ShutDoor) else door


def door_of(facts: Facts, model: Model) -> Door:
    """The door of a model whose phase is known. An open one stays open over a failover: the gateway
    replaces its engine by itself, and does not wait for the pool."""
    refused = refusal(model)
    if refused is not None:
        return RefusedDoor(*refused)
    was_open = isinstance(model.door, OpenDoor)
    if model.state is ModelState.AWAKE or (model.state in RISING and model.is_again and was_open):
        if model.holder is not None:
            return OpenDoor(model.holder.name, model.token)
        if isinstance(model.door, OpenDoor):
            return model.door
    running = model.running if model.state in FALLING else Running.FINISH
    return ShutDoor(running, expected_ms(facts, model), shut(model))


def expected_ms(facts: Facts, model: Model) -> float | None:
    """Until it is awake, if each phase takes as long as before. None: something was never measured,
    or only an event can tell, such as the end of another model's turn."""
    raise_ms = model.costs.raise_ms(model.held)
    if raise_ms is None or model.is_unload_ordered:
        return None
    if model.state in RISING:
        return max(0.0, model.stage_since_ms + raise_ms - facts.now_ms)
    if model.state is not ModelState.PENDING or not model.has_plan:
        return None
    victims = [facts.models[name] for name in model.victims]
    return max((_leaves_in_ms(each) for each in victims), default=0.0) + raise_ms


def _leaves_in_ms(victim: Model) -> float:
    """Its drain and its release."""
    costs = victim.costs
    drain_ms = victim.rules.park_ms if costs.drain_ms is None else costs.drain_ms
    return (drain_ms if victim.goal is Tier.AWAKE else 0.0) + (costs.release_ms or 0.0)


# ------------------------------------------------------------------ why requests wait

RETRY_S = 60  # an operator has to look at it first, or another model to leave


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
    why = model.wait or "a request waits for it" if model.state is S.PENDING else model.reason
    if model.is_unload_ordered:
        why = "an operator is unloading it"
    return f"model {model.name} is {model.state.value}: {why}"


STOPPED = "waiting for all gateways to confirm that they stopped sending"


def _waits(facts: Facts, model: Model) -> Iterator[str | None]:
    """One after the other; None or "": this one is none."""
    if model.is_unknown or model.is_recovering:
        missing = [each.name for each in model.engines if each.said is None and not each.is_gone]
        if missing:
            yield f"no report of {', '.join(missing)} has come since the pool started"
        yield "an engine is changing its state and has not reported the new one yet"
    if model.state is S.PENDING:
        if model.is_blind:
            yield unheard(model.rules.devices[0])
        yield model.never or model.wait
    if model.state in RISING:
        engine = model.main()
        if model.is_unload_ordered:
            yield f"{STOPPED}; then it is unloaded"
        if engine.said is None or not engine.is_connected:
            yield f"{engine.name} is not connected to the pool"
        elif not engine.has_obeyed:
            yield f"{engine.name} has not answered its newest goal, {engine.goal}"
        else:
            fault = f", after a fault: {engine.said.fault}" if engine.said.fault else ""
            yield f"waiting for {engine.name}, which is {engine.said.state}{fault}"
    if model.state is S.DRAINING:
        count, stander = facts.demand.in_flight(model.name), model.stander()
        if count:
            yield f"requests that still run: {count}"
        if not facts.demand.is_quiet(model.name, model.door_number):
            yield STOPPED
        if stander is None or stander.said is None:
            yield "no engine holds its lock, so idleness cannot be confirmed"
        else:
            yield f"{stander.name} has {stander.said.in_flight} requests, or is not connected"
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
