"""Why a head waits, in one sentence for operators: what it needs, what is free, who holds the rest.

No sentence names a remaining time: it would be another one at every look. `Wait.until_ms` stands
beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from plumbing.text import duration, size
from pool.core.states import HOST, ModelState
from pool.core.tickets import LEASE_PREFIX
from pool.core.victims import (
    IDLE_MS_MAX,
    Candidate,
    Head,
    Obstacle,
    has_shadow,
    has_work,
    idle_after_ms,
    protection_ms,
)
from pool.core.view import DeviceView, ModelView, PoolRules, Victim

_HARD_TO_MOVE = frozenset({ModelState.UNLOADING, ModelState.RELEASING, ModelState.FAILED})
NAMED_MAX = 4  # holders in one sentence: it is read by people


def held_for_ever(model: ModelView) -> Mapping[str, int]:
    """What of it no other model can have: all of a pinned one, and a shadow that is kept."""
    if not model.rules.is_pinned:
        return {}
    if not model.rules.shadow_keeps or not has_shadow(model):
        return model.booked
    both = {*model.booked, *model.shadow_bytes}
    return {name: model.booked.get(name, 0) + model.shadow_bytes.get(name, 0) for name in both}


def never(
    model: ModelView,
    needed: int,
    device: DeviceView,
    models: Sequence[ModelView],
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
        _works(each.model)
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


def stuck(head: Head, free: Mapping[str, int], models: Iterable[ModelView]) -> str:
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


def behind(model: ModelView, before: ModelView) -> str:
    return f"{_name(model)} is behind {_name(before)}"


def moving(model: ModelView) -> str:
    """It was asked to make room, or rests, and cannot turn round any more."""
    match model.state:
        case ModelState.LOADING:
            return f"{model.name} is loading"
        case ModelState.DRAINING:
            return f"{model.name} makes room for another model first, and then waits for its turn"
        case _:
            return f"the memory of {model.name} is being released; after that it waits for its turn"


def _wants(head: Head, free: Mapping[str, int]) -> str:
    name = max(head.extra, key=lambda each: head.extra[each] - free[each])
    who = _name(head.model)
    if free[name] < 0:
        return f"{who} waits: {size(-free[name])} more is in use {_where(name)} than fits"
    return (
        f"{who} needs {size(head.extra[name])} more {_where(name)}, "
        f"where {size(max(0, free[name]))} is free"
    )


def _works(model: ModelView) -> str:
    within = duration(IDLE_MS_MAX)
    return f"{model.name} has work, and a request waits up to {within} for it to end"


def _obstacle(each: Candidate, head: ModelView, rules: PoolRules) -> str:
    name = each.model.name
    match each.obstacle:
        case Obstacle.QUIET:
            after = duration(idle_after_ms(each.model))
            return f"{name} has no requests, and makes room once it has had none for {after}"
        case Obstacle.PROTECTED:
            turn = duration(protection_ms(each.model, rules))
            return f"{name} has work and is protected for the first {turn} of its turn"
        case Obstacle.YOUNG:
            after = duration(head.rules.max_wait_ms)
            return f"{name} has work, and only a request that has waited for {after} interrupts it"
        case Obstacle.BETTER:
            return f"{name} has requests of a better priority"
        case Obstacle.RAISED:
            return f"{name} is {each.model.state.value}, because requests wait for it"
        case Obstacle.NONE:
            return f"{name} can be evicted"


def _where(device: str) -> str:
    return "in host memory" if device == HOST else f"on device {device}"


def _name(model: ModelView) -> str:
    """As people know it."""
    if model.is_lease:
        return f"lease {model.name.removeprefix(LEASE_PREFIX)}"
    return model.name
