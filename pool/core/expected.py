"""When a waiting model should be awake: an estimate from what each phase took before.

For people, and for requests whose deadline is earlier: they are told at once. It promises nothing
(that is `bound.py`), and is None where something was never measured, or where only an event can
tell. A turn of somebody else is expected to last as long as such turns did.

    asked to make room    the victims' drain and release, what of it is left   + its own raise
    waits for victims     until they may be asked, their drain and release     + its own raise
    behind another        until that one is awake, its turn, drain, release    + its own raise
    being raised          what is left of its raise
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pool.core.events import ShutDoor
from pool.core.known import KnownModel
from pool.core.states import ModelState
from pool.core.view import Decision, Raise, Wait, Yield

NEWS_MS = 1_000.0  # less is no news for somebody who waits,
NEWS_SHARE = 0.25  # nor is this part of what is left
_GOES_UP = (ModelState.LOADING, ModelState.WAKING)
_GOES_DOWN = (ModelState.DRAINING, ModelState.RELEASING, ModelState.UNLOADING)


def expect(
    models: Mapping[str, KnownModel], decisions: Mapping[str, Decision], now_ms: float
) -> dict[str, float | None]:
    """When each model about which something was decided should be awake. `decisions` are in the
    order of the policy: who goes first stands first."""
    found: dict[str, float | None] = {}
    for name, decision in decisions.items():
        known = models.get(name)  # None: a lease
        if known is not None:
            found[name] = _expected(known, decision, models, found, now_ms)
    return found


def awake_ms(known: KnownModel, now_ms: float) -> float | None:
    """Of a model that is being raised."""
    costs, model = known.costs, known.model
    match model.state:
        case ModelState.WAKING:
            takes_ms = costs.waking_ms(model.floor)
        case ModelState.LOADING:
            takes_ms = costs.raise_ms(model.floor)
        case _:
            takes_ms = None
    return None if takes_ms is None else max(now_ms, model.since_ms + takes_ms)


def is_news(door: ShutDoor, known: KnownModel, now_ms: float) -> bool:
    """Whether what is expected now differs much from what was said with this door."""
    old_ms = known.door_expected_ms
    if old_ms is None or door.expected_ms is None:
        return (old_ms is None) is not (door.expected_ms is None)
    spread_ms = max(NEWS_MS, NEWS_SHARE * door.expected_ms)
    return abs(now_ms + door.expected_ms - old_ms) > spread_ms


def _expected(
    known: KnownModel,
    decision: Decision,
    models: Mapping[str, KnownModel],
    found: Mapping[str, float | None],
    now_ms: float,
) -> float | None:
    own_ms = known.costs.raise_ms(known.model.floor)
    room_ms: float | None = None
    match decision:
        case Raise():
            return awake_ms(known, now_ms)
        case Yield():
            room_ms = _left_ms((models.get(name) for name in known.victims), now_ms)
        case Wait() if decision.behind:
            other, first_ms = models.get(decision.behind), found.get(decision.behind)
            if other is not None and first_ms is not None and other.costs.turn_ms is not None:
                room_ms = first_ms + other.costs.turn_ms + _leaves_ms(other)
        case Wait() if known.model.state in _GOES_DOWN:
            room_ms = _left_ms((known,), now_ms)
        case Wait() if not decision.is_outranked:  # else only its competitor's last answer tells
            asked = [models[name] for name in decision.victims if name in models]
            ends = [_turn_over_ms(each, decision.until_ms, now_ms) for each in asked]
            known_ends = [ms for ms in ends if ms is not None]
            if ends and len(known_ends) == len(ends):
                room_ms = max(known_ends)
    return None if own_ms is None or room_ms is None else room_ms + own_ms


def _turn_over_ms(victim: KnownModel, until_ms: float | None, now_ms: float) -> float | None:
    """When a model that cannot be asked before `until_ms` has left."""
    if victim.model.state in _GOES_UP:
        up_ms, turn_ms = awake_ms(victim, now_ms), victim.costs.turn_ms
        return None if up_ms is None or turn_ms is None else up_ms + turn_ms + _leaves_ms(victim)
    if until_ms is None:
        return None
    since_ms, turn_ms = victim.awake_since_ms, victim.costs.turn_ms
    if victim.has_resumed and since_ms is not None and turn_ms is not None:
        # While its streams resume, `until_ms` is the latest that can be, and not what is expected.
        until_ms = min(until_ms, since_ms + turn_ms)
    return max(now_ms, until_ms) + _leaves_ms(victim)


def _left_ms(leaving: Iterable[KnownModel | None], now_ms: float) -> float:
    """When the memory of all of these is free."""
    found = [now_ms]
    for known in leaving:
        if known is None or known.model.state not in _GOES_DOWN:
            continue
        if known.model.state is ModelState.DRAINING:
            began_ms = now_ms if known.drained_ms is None else known.drained_ms
            found.append(max(now_ms, began_ms + _drains_ms(known)) + _releases_ms(known))
        else:
            found.append(known.model.since_ms + _releases_ms(known))
    return max(found)


def _leaves_ms(known: KnownModel) -> float:
    return _drains_ms(known) + _releases_ms(known)


def _drains_ms(known: KnownModel) -> float:
    return known.rules.park_ms if known.costs.drain_ms is None else known.costs.drain_ms


def _releases_ms(known: KnownModel) -> float:
    return known.costs.release_ms or 0.0
