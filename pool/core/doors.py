"""What a gateway may do with requests for a model, and how long they wait: the door, the expected
time, the bound.

A door is a function of what is known of its model.

**Expected:** when a waiting model should be awake, from what each phase took before. For people,
and for requests whose deadline is earlier: they are told at once. It promises nothing (that is the
bound, below), and is None where something was never measured, or where only an event can tell. A
turn of somebody else is expected to last as long as such turns did.

    asked to make room    the victims' drain and release, what of it is left   + its own raise
    waits for victims     until they may be asked, their drain and release     + its own raise
    behind another        until that one is awake, its turn, drain, release    + its own raise
    being raised          what is left of its raise

**Bound:** how long a ticket can wait at most, part by part, so that `explain` can print it.

    max(max_wait, 2 s) + (D_i + S_i) + Σ_j (W_j + P_j + D_j + S_j) + W_i
      + starve_after · (p − p_best)

i is the ticket's model, j each model that shares devices with it, also through others. W is the
budget of a raise, resumed streams included, P the protection of a turn, D a drain, S the release of
memory. A competitor has at most one turn first, since what a yielding model still wants is younger
than the ticket; and the second term is that of a ticket just behind its own model's barrier. Once
the last term is over, no later ticket goes before it. The 2 s are `IDLE_MS_MAX`, in which a head
may wait for an awake model to be idle rather than have others unloaded (`victims.py`): they begin
with the ticket, as `max_wait` does, and add nothing unless that is shorter.

A budget is a minute at least, and most raises take milliseconds: so beside the bound there is the
same sum with what was measured in the place of every budget (`measured_bound`). It holds for as
long as nothing takes longer than it did.

Models that never yield take no turns. The bound is of a ticket whose model fits: it says nothing
where a lease or a stranger takes the room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from plumbing.pod.messages import Tier
from pool.core.events import Door, OpenDoor, RefusedDoor, Running, ShutDoor
from pool.core.model import KnownModel
from pool.core.states import FALLING, RISING, ModelState
from pool.core.victims import IDLE_MS_MAX, protection_ms
from pool.core.view import Decision, ModelView, PoolRules, Raise, Wait, Yield

FAILED_RETRY_S = 60  # somebody has to look at it first
NO_ROOM_RETRY_S = 60


def door_of(known: KnownModel, now_ms: float) -> Door:
    """The door of a model whose state is known."""
    match known.state:
        case ModelState.AWAKE | ModelState.WAKING | ModelState.LOADING if _is_open(known):
            return _open(known) or _shut(known, now_ms)
        case ModelState.FAILED:
            retry_s = None if known.is_permanent else FAILED_RETRY_S
            why = (
                f"model {known.name} has failed: {known.fault.rstrip('.')};"
                f" `understudy pool reset {known.name}` retries it"
            )
            return RefusedDoor("pool.failed", why, retry_s)
        case ModelState.UNLOADING | ModelState.RELEASING | ModelState.DRAINING if (
            known.is_unload_ordered
        ):
            if known.state is ModelState.UNLOADING:
                return RefusedDoor("pool.not_loaded", reason_of(known), None)
        case ModelState.COLD | ModelState.PENDING if known.goal is Tier.COLD and not (
            known.rules.is_on_demand or known.load_ordered_ms is not None
        ):
            why = (
                f"model {known.name} is not loaded on demand; load it with `understudy pool load "
                f"{known.name}`"
            )
            return RefusedDoor("pool.not_loaded", why, None)
    if known.never is not None and known.state is ModelState.PENDING:
        why = f"model {known.name} does not fit: {known.never}"
        return RefusedDoor("pool.no_room", why, NO_ROOM_RETRY_S)
    return _shut(known, now_ms)


def _is_open(known: KnownModel) -> bool:
    """An open door stays open over a failover: the gateway replaces its engine by itself, and
    nobody waits for the pool."""
    if known.state is ModelState.AWAKE:
        return True
    return known.is_again and isinstance(known.door, OpenDoor)


def _open(known: KnownModel) -> OpenDoor | None:
    holder = known.holder
    if holder is not None:
        return OpenDoor(holder.engine, holder.token)
    return known.door if isinstance(known.door, OpenDoor) else None


def _shut(known: KnownModel, now_ms: float) -> ShutDoor:
    running = known.running if known.state in FALLING else Running.FINISH
    return ShutDoor(running, expected_ms(known, now_ms), reason_of(known))


def expected_ms(known: KnownModel, now_ms: float) -> float | None:
    """Until it is awake, as far as is known; None also where nobody waits for it."""
    at_ms = awake_ms(known, now_ms) or known.expected_ms
    if at_ms is None or known.is_unload_ordered or known.state is ModelState.AWAKE:
        return None
    return max(0.0, at_ms - now_ms)


def reason_of(known: KnownModel) -> str:
    """Why requests wait, in one sentence."""
    name = known.name
    if known.is_unload_ordered:
        return f"an operator is unloading model {name}"
    match known.state:
        case ModelState.PENDING:
            return f"model {name} waits for room: {known.wait or 'it was requested just now'}"
        case ModelState.LOADING:
            return f"model {name} is being loaded: {known.reason}"
        case ModelState.WAKING:
            return f"model {name} is waking up"
        case ModelState.DRAINING:
            return f"model {name} is finishing its requests: {known.reason}"
        case ModelState.RELEASING | ModelState.UNLOADING:
            return f"model {name} is freeing its memory: {known.reason}"
        case _:
            return f"model {name} is {known.state}"


def is_other_door(known: KnownModel, door: Door, now_ms: float) -> bool:
    """Whether it must be told: another key, or another time at which a pending model is expected.
    A number that nobody waits for to be obeyed may grow."""
    if door_key(known, door) != known.door_key:
        return True
    is_pending = known.state is ModelState.PENDING
    return is_pending and isinstance(door, ShutDoor) and is_news(door, known, now_ms)


def door_key(known: KnownModel, door: Door) -> tuple[object, ...]:
    """What makes it another door. A reason that changes is no news for those who wait."""
    match door:
        case ShutDoor():
            return known.state, door.running
        case _:
            return known.state, door


NEWS_MS = 1_000.0  # less is no news for somebody who waits,
NEWS_SHARE = 0.25  # nor is this part of what is left


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
    takes_ms = known.costs.raise_ms(known.floor) if known.state in RISING else None
    return None if takes_ms is None else max(now_ms, known.stage_since_ms + takes_ms)


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
    own_ms = known.costs.raise_ms(known.held)
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
        case Wait() if known.state in FALLING:
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


def _left_ms(leaving: Iterable[KnownModel | None], now_ms: float) -> float:
    """When the memory of all of these is free."""
    found = [now_ms]
    for known in leaving:
        if known is None or known.state not in FALLING:
            continue
        if known.state is ModelState.DRAINING:
            began_ms = now_ms if known.drained_ms is None else known.drained_ms
            found.append(max(now_ms, began_ms + _drains_ms(known)) + _releases_ms(known))
        else:
            found.append(known.stage_since_ms + _releases_ms(known))
    return max(found)


def _leaves_ms(known: KnownModel) -> float:
    return _drains_ms(known) + _releases_ms(known)


def _drains_ms(known: KnownModel) -> float:
    return known.rules.park_ms if known.costs.drain_ms is None else known.costs.drain_ms


def _releases_ms(known: KnownModel) -> float:
    return known.costs.release_ms or 0.0


class TurnBound(Struct, frozen=True):
    """The longest turn of one competitor, from its raise to the proof that its memory is free."""

    model: str
    raise_ms: float
    protection_ms: float
    drain_ms: float  # infinite: requests that cannot be parked are never cut
    release_ms: float

    @property
    def total_ms(self) -> float:
        return self.raise_ms + self.protection_ms + self.drain_ms + self.release_ms


class WaitBound(Struct, frozen=True):
    """The parts of the bound, in the order of the formula."""

    max_wait_ms: float  # `IDLE_MS_MAX` at least
    own_drain_ms: float
    own_release_ms: float
    turns: tuple[TurnBound, ...]
    raise_ms: float
    behind_ms: float  # until no ticket of a better priority goes first any more

    @property
    def total_ms(self) -> float:
        own_ms = self.max_wait_ms + self.own_drain_ms + self.own_release_ms + self.raise_ms
        return own_ms + sum(turn.total_ms for turn in self.turns) + self.behind_ms


def drain_ms(model: ModelView) -> float:
    """Until the last request has ended or is parked; infinite if some can be neither."""
    if not model.cannot_park:
        return model.rules.park_ms
    return float("inf") if model.rules.cut_ms is None else model.rules.cut_ms


def measured_bound(
    name: str, priority: int, models: Sequence[ModelView], rules: PoolRules
) -> WaitBound | None:
    """If nothing takes longer than it did. None: not everything has been measured yet."""
    if unmeasured(name, models):
        return None
    measured = [
        replace(each, load_ms=each.raise_ms)
        for each in _in_turn(name, models)
        if each.raise_ms is not None
    ]
    return bound(name, priority, measured, rules)


def unmeasured(name: str, models: Sequence[ModelView]) -> list[str]:
    """The models that `measured_bound` waits for: they have not been awake yet."""
    return [each.name for each in _in_turn(name, models) if each.raise_ms is None]


def _in_turn(name: str, models: Sequence[ModelView]) -> list[ModelView]:
    """The model and those that take turns with it."""
    (model,) = (each for each in models if each.name == name)
    return [model, *(each for each in sharing_with(name, models) if not each.rules.is_pinned)]


def bound(name: str, priority: int, models: Sequence[ModelView], rules: PoolRules) -> WaitBound:
    """Of a ticket of that priority for the model `name`."""
    sharing = sharing_with(name, models)
    (model,) = (each for each in models if each.name == name)
    in_use = [each.rules.priority for each in (model, *sharing)]
    in_use += [each.ticket.priority for each in (model, *sharing) if each.ticket is not None]
    behind = max(0, priority - min(in_use))
    return WaitBound(
        max_wait_ms=max(model.rules.max_wait_ms, IDLE_MS_MAX),
        own_drain_ms=drain_ms(model),
        own_release_ms=model.release_ms,
        turns=tuple(
            TurnBound(
                each.name,
                each.load_ms,
                protection_ms(each, rules),
                drain_ms(each),
                each.release_ms,
            )
            for each in sharing
            if not each.rules.is_pinned
        ),
        raise_ms=model.load_ms,
        behind_ms=behind * rules.starve_after_ms,
    )


def sharing_with(name: str, models: Sequence[ModelView]) -> list[ModelView]:
    """All models that share devices with it, also through others."""
    (model,) = (each for each in models if each.name == name)
    devices = {*model.rules.devices}
    rest = [each for each in models if each.name != name]
    found: list[ModelView] = []
    while True:
        near = [each for each in rest if not devices.isdisjoint(each.rules.devices)]
        if not near:
            return sorted(found, key=lambda each: each.name)
        rest = [each for each in rest if devices.isdisjoint(each.rules.devices)]
        found += near
        devices.update(*(each.rules.devices for each in near))
