"""Why a model is not awake: one table for status, `explain`, admission and the plan.

`REFUSALS` are the reasons for which its requests are refused, `WAITS` those for which they wait:
of both, the first row that holds counts. Each row has a code, when it holds (a function that
returns the words of its sentence, or None), the sentence, and the fix, if there is one. `PHASES`
says for each phase what a client is told that waits.

Why a head waits for room is known to the plan alone, which composes it here: what it needs, what is
free, who holds the rest. No sentence names a remaining time: it would be another one at every look.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from plumbing.pod.messages import Tier
from plumbing.text import duration, size
from pool.core.facts import Facts
from pool.core.ledger import DeviceView
from pool.core.model import LEASE_PREFIX, Model, ModelEngine
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
Words = Mapping[str, object]  # of a sentence

RETRY_S = 60  # somebody has to look at it first, or somebody else to leave


class RefusalRow(Struct, frozen=True):
    """`holds`: the words, if it is so. `retry_s`: when a client may try again, None: not by
    itself."""

    code: str
    holds: Callable[[Model], Words | None]
    sentence: str
    fix: str = ""
    retry_s: int | None = None


class WaitRow(Struct, frozen=True):
    """As `RefusalRow`, with the pool around the model."""

    code: str
    holds: Callable[[Facts, Model], Words | None]
    sentence: str


def _if(is_so: object, **words: object) -> Words | None:
    return words if is_so else None


# -------------------------------------------------------------------------------- refused


def _is_not_on_demand(model: Model) -> bool:
    is_down = model.state in (S.COLD, S.PENDING) and model.goal is Tier.COLD
    return is_down and not (model.rules.is_on_demand or model.load_ordered_ms is not None)


REFUSALS = (
    RefusalRow(
        "pool.failed",
        lambda model: _if(model.state is S.FAILED, fault=model.fault.rstrip(".")),
        "model {name} has failed: {fault}",
        "`understudy pool reset {name}` retries it",
    ),
    RefusalRow(
        "pool.not_loaded",
        lambda model: _if(model.state is S.UNLOADING and model.is_unload_ordered),
        "an operator is unloading model {name}",
    ),
    RefusalRow(
        "pool.not_loaded",
        lambda model: _if(_is_not_on_demand(model)),
        "model {name} is not loaded on demand",
        "load it with `understudy pool load {name}`",
    ),
    RefusalRow(
        "pool.no_room",
        lambda model: _if(model.never and model.state is S.PENDING, why=model.never),
        "model {name} does not fit: {why}",
        retry_s=RETRY_S,
    ),
)

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
    """Code, sentence and seconds until a client may try again; None: its requests are not refused.
    A fault that may pass is worth another try."""
    for row in REFUSALS:
        words = row.holds(model)
        if words is not None:
            text = "; ".join(each for each in (row.sentence, row.fix) if each)
            is_passing = row.code == "pool.failed" and not model.is_permanent
            retry_s = RETRY_S if is_passing else row.retry_s
            return row.code, text.format(name=model.name, **words), retry_s
    return None


def shut(model: Model) -> str:
    """Why requests wait, in one sentence."""
    if model.is_unload_ordered:
        return f"an operator is unloading model {model.name}"
    text = PHASES.get(model.state, "model {name} is {state}")
    wait = model.wait or "it was requested just now"
    return text.format(name=model.name, wait=wait, reason=model.reason, state=model.state)


# -------------------------------------------------------------------------------- waiting


def _missing(facts: Facts, model: Model) -> Words | None:
    if not (model.is_unknown or model.is_recovering):
        return None
    missing = [each.name for each in model.engines if each.said is None and not each.is_gone]
    return _if(missing, engines=", ".join(missing), have="has" if len(missing) == 1 else "have")


def _main(model: Model, phases: Collection[ModelState]) -> ModelEngine | None:
    return model.main() if model.state in phases else None


def _is_silent(facts: Facts, model: Model) -> Words | None:
    engine = _main(model, RISING)
    is_silent = engine is not None and (engine.said is None or not engine.is_connected)
    return _if(is_silent and engine, engine=engine.name if engine else "")


def _is_deaf(facts: Facts, model: Model) -> Words | None:
    engine = _main(model, RISING)
    is_deaf = engine is not None and not engine.has_obeyed
    return _if(is_deaf and engine, engine=engine.name, goal=engine.goal) if engine else None


# What an engine in each state does next, on its way up.
_STEPS = {"dead": "start", "init": "start", "standby": "wake", "waking": "wake", "resting": "wake"}


def _rises(facts: Facts, model: Model) -> Words | None:
    engine = _main(model, RISING)
    if engine is None or engine.said is None:
        return None
    fault = f" after a fault: {engine.said.fault}" if engine.said.fault else ""
    step = _STEPS.get(engine.said.state, "be active")
    return {"engine": engine.name, "step": step, "fault": fault}


def _runs(facts: Facts, model: Model) -> Words | None:
    count = facts.demand.in_flight(model.name) if model.state is S.DRAINING else 0
    return _if(count, count=count, are="request is" if count == 1 else "requests are")


def _is_sent_to(facts: Facts, model: Model) -> Words | None:
    is_quiet = facts.demand.is_quiet(model.name, model.door_number)
    return _if(model.state is S.DRAINING and not is_quiet)


def _is_busy(facts: Facts, model: Model) -> Words | None:
    engine = model.stander()
    if model.state is not S.DRAINING or engine is None:
        return None
    count = engine.said.in_flight if engine.said is not None else 0
    return {"engine": engine.name, "is": f"has {count} requests" if count else "is not connected"}


def _is_held(facts: Facts, model: Model) -> Words | None:
    why = facts.ledger.why_not_free(model) if model.frees is not None else None
    return _if(why, why=why)


WAITS = (
    WaitRow("unheard", _missing, "{engines} {have} not reported since the pool started"),
    WaitRow(
        "changing",
        lambda facts, model: _if(model.is_unknown or model.is_recovering),
        "an engine is changing its state and has not reported the new one yet",
    ),
    WaitRow(
        "unheard_device",
        lambda facts, model: _if(
            model.state is S.PENDING and model.is_blind, why=unheard(model.rules.devices[0])
        ),
        "{why}",
    ),
    WaitRow(
        "room",
        lambda facts, model: _if(
            model.state is S.PENDING and (model.never or model.wait),
            why=model.never or model.wait,
        ),
        "{why}",
    ),
    WaitRow(
        "unload",
        lambda facts, model: _if(model.state in RISING and model.is_unload_ordered),
        "waiting for all gateways to confirm that they stopped sending; then it is unloaded",
    ),
    WaitRow("engine_away", _is_silent, "{engine} is not connected to the pool"),
    WaitRow("engine_deaf", _is_deaf, "{engine} has not answered its newest goal, {goal}"),
    WaitRow("engine", _rises, "waiting for {engine} to {step}{fault}"),
    WaitRow("requests", _runs, "{count} {are} still running"),
    WaitRow(
        "gateways",
        _is_sent_to,
        "waiting for all gateways to confirm that they stopped sending",
    ),
    WaitRow("engine_busy", _is_busy, "{engine} {is}"),
    WaitRow(
        "no_holder",
        lambda facts, model: _if(model.state is S.DRAINING),
        "no engine holds its lock, so idleness cannot be confirmed",
    ),
    WaitRow("memory", _is_held, "{why}"),
    WaitRow("never", lambda facts, model: _if(model.never, why=model.never), "{why}"),
)


def wait_of(facts: Facts, model: Model) -> str | None:
    """What it waits for now: which component, and which report or proof of it; None: nothing."""
    for row in WAITS:
        words = row.holds(facts, model)
        if words is not None:
            found = [row.sentence.format_map(words)]
            break
    else:
        found = []
    if model.state in FALLING and not (model.is_unknown or model.is_recovering):
        # It makes room, and may be wanted again already.
        found += [model.never or (model.wait if model.is_wanted else "")]
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
