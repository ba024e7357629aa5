"""Why a model is not awake: for status, `explain`, admission and the plan.

`refusal` has the reasons for which its requests are refused, `_waits` those for which they wait: of
both the first that holds counts. `PHASES` says for each phase what a client is told that waits.

Why a head waits for room is known to the plan alone, which composes it here: what it needs, what is
free, who holds the rest. No sentence names a remaining time: it would be another one at every look.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from plumbing.pod.messages import Tier
from plumbing.text import duration, size
from pool.core.facts import Facts
from pool.core.ledger import DeviceView
from pool.core.model import LEASE_PREFIX, Model
from pool.core.states import FALLING, HOST, RISING, ModelState, PoolRules
from pool.core.who_sleeps import Victim
from pool.core.who_yields import (
    IDLE_MS_MAX,
    Candidate,
    Head,
    Obstacle,
    has_shadow,
    has_work,
    idle_after_ms,
    protection_ms,
)

S = ModelState

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


# -------------------------------------------------------------------------------- waiting

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


# -------------------------------------------------------------------------------- of the plan

# Of a model that has tickets and is on its way down, or loads for nobody.
MOVING: Mapping[ModelState, str] = {
    S.LOADING: "{name} is loading",
    S.DRAINING: "{name} makes room for another model first, and then waits for its turn",
}
# Why a model that a head needs cannot be asked yet.
OBSTACLES: Mapping[Obstacle, str] = {
    Obstacle.QUIET: "{name} has no requests, and makes room once it has had none for {quiet}",
    Obstacle.PROTECTED: "{name} has work and is protected for the first {turn} of its turn",
    Obstacle.YOUNG: "{name} has work, and only a request that has waited for {wait} interrupts it",
    Obstacle.BETTER: "{name} has requests of a better priority",
    Obstacle.RAISED: "{name} is {state}, because requests wait for it",
    Obstacle.NONE: "{name} can be evicted",
}
WORKS = "{name} has work, and a request waits up to {within} for it to end"
_HARD_TO_MOVE = frozenset({ModelState.UNLOADING, ModelState.RELEASING, ModelState.FAILED})
NAMED_MAX = 4  # holders in one sentence: it is read by people


def held_for_ever(model: Model) -> Mapping[str, int]:
    """What of it no other model can have: all of a pinned one, and a shadow that is kept."""
    if not model.is_pinned:
        return {}
    if not model.rules.shadow_keeps or not has_shadow(model):
        return model.booked
    both = {*model.booked, *model.shadow_bytes}
    return {name: model.booked.get(name, 0) + model.shadow_bytes.get(name, 0) for name in both}


def never(
    model: Model,
    needed: int,
    device: DeviceView,
    models: Sequence[Model],
    margin_bytes: int,
) -> str:
    """Only what never yields is in the way."""
    where = _where(device.name)
    parts = []
    for other in models:
        held = held_for_ever(other).get(device.name, 0) if other is not model else 0
        if held:
            verb = "holds" if other.is_lease else "is pinned and holds"
            parts.append(f"{_name(other)} {verb} {size(held)}")
    if len(parts) > NAMED_MAX:
        parts[NAMED_MAX:] = [f"{len(parts) - NAMED_MAX} more"]
    if device.outside_bytes:
        parts.append(f"{size(device.outside_bytes)} is used by programs outside the pool")
    if device.name != HOST and margin_bytes:
        parts.append(f"{size(margin_bytes)} is kept free")
    holders = ", ".join(parts)
    return (
        f"{_name(model)} needs {size(needed)} {where}, which has {size(device.total_bytes)}"
        f"{': ' if holders else ''}{holders}"
    )


def waiting(
    head: Head,
    free: Mapping[str, int],
    found: Sequence[Candidate],
    chosen: Collection[Victim],
    spared: Sequence[str],
    rules: PoolRules,
) -> str:
    """Somebody who is needed cannot be asked yet. `spared`: who would be unloaded otherwise."""
    names = {victim.model for victim in chosen if not victim.is_shadow}
    parts = [
        WORKS.format(name=each.model.name, within=duration(IDLE_MS_MAX))
        if spared and has_work(each.model)
        else _obstacle(each, head.model, rules)
        for each in found
        if each.model.name in names and (spared or each.obstacle is not Obstacle.NONE)
    ]
    sentence = f"{_wants(head, free)}: {'; '.join(parts[:NAMED_MAX])}"
    if not spared:
        return sentence
    return f"{sentence}; so {', '.join(spared[:NAMED_MAX])} need not be unloaded"


def making_room(victims: Sequence[str]) -> str:
    """Those who were asked have not left yet."""
    if not victims:
        return "the memory that it needs is being released"
    names = ", ".join(victims[:NAMED_MAX])
    return f"{names} {'makes' if len(victims) == 1 else 'make'} room for it"


def stuck(head: Head, free: Mapping[str, int], models: Iterable[Model]) -> str:
    """Nobody who could be asked has enough, and it is not held for ever either."""
    parts = []
    for other in models:
        held = sum(other.booked.get(name, 0) for name in head.extra)
        if not held or other.name == head.model.name:
            continue
        if other.is_blind:
            parts.append(f"{other.name} is not fully known yet and holds {size(held)}")
        elif other.state in _HARD_TO_MOVE:
            parts.append(f"{other.name} is {other.state.value} and holds {size(held)}")
    rest = "; ".join(parts[:NAMED_MAX]) or "processes that the pool cannot evict hold the rest"
    return f"{_wants(head, free)}: {rest}"


def unheard(device: str) -> str:
    """Nothing is given away on a device of which something is not known yet."""
    return (
        f"an engine {_where(device)}, or the memory service, has not reported since the pool "
        "started"
    )


def behind(model: Model, before: Model) -> str:
    return f"{_name(model)} is behind {_name(before)}"


def moving(model: Model) -> str:
    """It was asked to make room, or sleeps, and cannot turn round any more."""
    text = MOVING.get(
        model.state, "the memory of {name} is being released; after that it waits for its turn"
    )
    return text.format(name=model.name)


def _wants(head: Head, free: Mapping[str, int]) -> str:
    name = max(head.extra, key=lambda each: head.extra[each] - free[each])
    who = _name(head.model)
    if free[name] < 0:
        return f"{who} waits: {size(-free[name])} more is in use {_where(name)} than fits"
    return (
        f"{who} needs {size(head.extra[name])} more {_where(name)}, "
        f"where {size(max(0, free[name]))} is free"
    )


def _obstacle(each: Candidate, head: Model, rules: PoolRules) -> str:
    model = each.model
    return OBSTACLES[each.obstacle].format(
        name=model.name,
        state=model.state.value,
        quiet=duration(idle_after_ms(model)),
        turn=duration(protection_ms(model, rules)),
        wait=duration(head.rules.max_wait_ms),
    )


def _where(device: str) -> str:
    return "in host memory" if device == HOST else f"on device {device}"


def _name(model: Model) -> str:
    """As people know it."""
    if model.is_lease:
        return f"lease {model.name.removeprefix(LEASE_PREFIX)}"
    return model.name
