"""Admission: what a gateway may do with requests for a model, and when the model is expected.

A door is a function of what is known of its model; `tell` says those that have changed.

**Expected:** when a waiting model should be awake, from what each phase took before. For people,
and for requests whose deadline is earlier: they are told at once. It promises nothing (that is
`bound.py`), and is None where something was never measured, or where only an event can tell. A turn
of somebody else is expected to last as long as such turns did.

    asked to make room    the victims' drain and release, what of it is left   + its own raise
    waits for victims     until they may be asked, their drain and release     + its own raise
    behind another        until that one is awake, its turn, drain, release    + its own raise
    being raised          what is left of its raise
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pool.core import reasons
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
from pool.core.who_wakes import Decision, Raise, Wait, Yield


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
    if key == model.door_key:
        # A reason that changes is no news for those who wait; another time is, while it is pending.
        is_pending = model.state is ModelState.PENDING and isinstance(door, ShutDoor)
        if not is_pending or not isinstance(door, ShutDoor) or not is_news(door, model, now_ms):
            return False
    if not (model.door_key and binds_alike(model.door, door)):
        facts.door_number += 1
        model.door_number = facts.door_number
    model.door, model.door_key = door, key
    soon_ms = door.expected_ms if isinstance(door, ShutDoor) else None
    model.door_expected_ms = None if soon_ms is None else now_ms + soon_ms
    return True


def door_of(model: Model, now_ms: float) -> Door:
    """The door of a model whose phase is known."""
    refused = reasons.refusal(model)
    if refused is not None:
        return RefusedDoor(*refused)
    if model.state is ModelState.AWAKE or model.state in RISING:
        return (_open(model) if _is_open(model) else None) or _shut(model, now_ms)
    return _shut(model, now_ms)


def _is_open(model: Model) -> bool:
    """An open door stays open over a failover: the gateway replaces its engine by itself, and
    nobody waits for the pool."""
    if model.state is ModelState.AWAKE:
        return True
    return model.is_again and isinstance(model.door, OpenDoor)


def _open(model: Model) -> OpenDoor | None:
    holder = model.holder
    if holder is not None:
        return OpenDoor(holder.engine, holder.token)
    return model.door if isinstance(model.door, OpenDoor) else None


def _shut(model: Model, now_ms: float) -> ShutDoor:
    running = model.running if model.state in FALLING else Running.FINISH
    return ShutDoor(running, expected_ms(model, now_ms), reasons.shut(model))


def expected_ms(model: Model, now_ms: float) -> float | None:
    """Until it is awake, as far as is known; None also where nobody waits for it."""
    at_ms = awake_ms(model, now_ms) or model.expected_ms
    if at_ms is None or model.is_unload_ordered or model.state is ModelState.AWAKE:
        return None
    return max(0.0, at_ms - now_ms)


def door_key(model: Model, door: Door) -> tuple[object, ...]:
    """What makes it another door."""
    return model.state, door.running if isinstance(door, ShutDoor) else door


NEWS_MS = 1_000.0  # less is no news for somebody who waits,
NEWS_SHARE = 0.25  # nor is this part of what is left


def expect(
    models: Mapping[str, Model], decisions: Mapping[str, Decision], now_ms: float
) -> dict[str, float | None]:
    """When each model about which something was decided should be awake. `decisions` are in the
    order of the policy: who goes first stands first."""
    found: dict[str, float | None] = {}
    for name, decision in decisions.items():
        model = models.get(name)  # None: a lease
        if model is not None:
            found[name] = _expected(model, decision, models, found, now_ms)
    return found


def awake_ms(model: Model, now_ms: float) -> float | None:
    """Of a model that is being raised."""
    takes_ms = model.costs.raise_ms(model.floor) if model.state in RISING else None
    return None if takes_ms is None else max(now_ms, model.stage_since_ms + takes_ms)


def is_news(door: ShutDoor, model: Model, now_ms: float) -> bool:
    """Whether what is expected now differs much from what was said with this door."""
    old_ms = model.door_expected_ms
    if old_ms is None or door.expected_ms is None:
        return (old_ms is None) is not (door.expected_ms is None)
    spread_ms = max(NEWS_MS, NEWS_SHARE * door.expected_ms)
    return abs(now_ms + door.expected_ms - old_ms) > spread_ms


def _expected(
    model: Model,
    decision: Decision,
    models: Mapping[str, Model],
    found: Mapping[str, float | None],
    now_ms: float,
) -> float | None:
    own_ms = model.costs.raise_ms(model.held)
    room_ms: float | None = None
    match decision:
        case Raise():
            return awake_ms(model, now_ms)
        case Yield():
            room_ms = _left_ms((models.get(name) for name in model.victims), now_ms)
        case Wait() if decision.behind:
            other, first_ms = models.get(decision.behind), found.get(decision.behind)
            if other is not None and first_ms is not None and other.costs.turn_ms is not None:
                room_ms = first_ms + other.costs.turn_ms + _leaves_ms(other)
        case Wait() if model.state in FALLING:
            room_ms = _left_ms((model,), now_ms)
        case Wait() if not decision.is_outranked:  # else only its competitor's last answer tells
            asked = [models[name] for name in decision.victims if name in models]
            ends = [_turn_over_ms(each, decision.until_ms, now_ms) for each in asked]
            known_ends = [ms for ms in ends if ms is not None]
            if ends and len(known_ends) == len(ends):
                room_ms = max(known_ends)
    return None if own_ms is None or room_ms is None else room_ms + own_ms


def _turn_over_ms(victim: Model, until_ms: float | None, now_ms: float) -> float | None:
    """When a model that cannot be asked before `until_ms` has left."""
    if victim.state in RISING:
        up_ms, turn_ms = awake_ms(victim, now_ms), victim.costs.turn_ms
        return None if up_ms is None or turn_ms is None else up_ms + turn_ms + _leaves_ms(victim)
    if until_ms is None:
        return None
    since_ms, turn_ms = victim.awake_since_ms, victim.costs.turn_ms
    if victim.has_resumed and since_ms is not None and turn_ms is not None:
        # While its streams resume, `until_ms` is the latest that can be, and not what is expected.
        until_ms = min(until_ms, since_ms + turn_ms)
    return max(now_ms, until_ms) + _leaves_ms(victim)


def _left_ms(leaving: Iterable[Model | None], now_ms: float) -> float:
    """When the memory of all of these is free."""
    found = [now_ms]
    for model in leaving:
        if model is None or model.state not in FALLING:
            continue
        if model.state is ModelState.DRAINING:
            began_ms = now_ms if model.drained_ms is None else model.drained_ms
            found.append(max(now_ms, began_ms + _drains_ms(model)) + _releases_ms(model))
        else:
            found.append(model.stage_since_ms + _releases_ms(model))
    return max(found)


def _leaves_ms(model: Model) -> float:
    return _drains_ms(model) + _releases_ms(model)


def _drains_ms(model: Model) -> float:
    return model.rules.park_ms if model.costs.drain_ms is None else model.costs.drain_ms


def _releases_ms(model: Model) -> float:
    return model.costs.release_ms or 0.0
