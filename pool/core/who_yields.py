"""Whom a head evicts: for a ticket that needs room, no more victims and no deeper than needed, the
cheapest first.

    class  who                                          to              when
    1      a model that loads, and no ticket waits      cold            now
    2      warm, with a copy in host memory             offloaded       now
    3, 4   awake and idle                               warm, offloaded now
    5      warm, or awake and idle, without a copy      cold            now
    6      awake with work                              warm, offloaded past its protection and the
                                                                        head's `max_wait`, if its
                                                                        priority is not better
    7      all of these                                 cold            as above

Within a class the least recently asked yields first. A model that leaves already may be asked to
leave deeper. Never one that is pinned or on its way up for a ticket; a granted lease is pinned.

None is asked until all that are needed may be asked: to ask early those who may be would leave the
device idle until the last one's protection ends. And no model is unloaded (classes 5 and 7) for a
head that is younger than `IDLE_MS_MAX`, if awake models have enough, which may be idle by then: who
is unloaded has to load again, half a second with the smallest model, half a minute with vLLM. This
wait passes with `max_wait`, and no head before it adds another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from operator import gt, itemgetter

from msgspec import Struct
from msgspec.structs import replace

from plumbing.pod.messages import Tier
from pool.core.demand import TicketView, order_of
from pool.core.model import Model
from pool.core.states import NEVER_MS, REST, RISING, ModelState, PoolRules
from pool.core.who_sleeps import Victim, sleeps_at_ms

# Awake and quiet for so long is idle, however costly it is to wake again; so a head need not wait
# longer for that.
IDLE_MS_MAX = 2_000.0
UNLOADS, AT_WORK = (5, 7), 6  # classes
# These hold their tier, or fall to it, and may be asked to go deeper.
_AT_REST = frozenset({*REST, ModelState.PENDING, ModelState.DRAINING, ModelState.RELEASING})

# By what it is, or the tier that it holds or falls to, and whether its weights are in host memory
# too: the way down, each step with its class.
_DESCENTS: Mapping[tuple[str, bool], tuple[tuple[int, Tier], ...]] = {
    ("loading", True): ((1, Tier.COLD),),
    ("loading", False): ((1, Tier.COLD),),
    (Tier.WARM, True): ((2, Tier.OFFLOADED), (7, Tier.COLD)),
    (Tier.WARM, False): ((5, Tier.COLD),),
    (Tier.OFFLOADED, True): ((7, Tier.COLD),),
    (Tier.OFFLOADED, False): ((7, Tier.COLD),),
    (Tier.COLD, True): (),
    (Tier.COLD, False): (),
    ("idle", True): ((3, Tier.WARM), (4, Tier.OFFLOADED), (7, Tier.COLD)),
    ("idle", False): ((3, Tier.WARM), (5, Tier.COLD)),
    ("working", True): ((6, Tier.WARM), (6, Tier.OFFLOADED), (7, Tier.COLD)),
    ("working", False): ((6, Tier.WARM), (7, Tier.COLD)),
}


class Obstacle(StrEnum):
    """Why a model that a head needs cannot be asked now, for operators."""

    NONE = ""
    QUIET = "{name} has no requests, and makes room once it has had none for {quiet}"
    PROTECTED = "{name} has work and is protected for the first {turn} of its turn"
    YOUNG = "{name} has work, and only a request that has waited for {wait} interrupts it"
    BETTER = "{name} has requests of a better priority"
    RAISED = "{name} is {state}, because requests wait for it"


class Step(Struct, frozen=True):
    """One way for a model to give room. `freed`: in all that it gives, from what it holds now, on
    each device that is short, in their order."""

    rank: tuple[int, tuple[bool, float, float, str], int]
    tier: Tier
    freed: Sequence[int]


class Candidate(Struct, frozen=True):
    """Who may give room, from when, and how: `steps` from the first to the deepest. `ready_ms`:
    infinite if only an event can tell. `idle_ms`: when a model that is quiet will be idle."""

    model: Model
    steps: Sequence[Step]
    ready_ms: float
    idle_ms: float = NEVER_MS
    obstacle: Obstacle = Obstacle.NONE


class Head(Struct, frozen=True):
    """For whom room is made. `extra`: what is to be booked to raise it; `places`: the devices on
    which others are behind it."""

    model: Model
    ticket: TicketView
    order: tuple[int, float]
    extra: Mapping[str, int]
    places: tuple[str, ...]

    def is_before(self, other: Model, now_ms: float, rules: PoolRules) -> bool:
        """A plan that stands goes before every ticket."""
        if other.ticket is None or self.model.has_plan:
            return True
        return self.order < order_of(other.ticket, now_ms, rules)


def protection_ms(model: Model, rules: PoolRules) -> float:
    """For how long it is no victim while it has work, from when it is awake and has resumed its
    streams: a turn in which they only replay would be followed by another one of that kind."""
    return max(model.rules.min_runtime_ms, rules.quantum_factor * model.switch_ms)


def idle_after_ms(model: Model) -> float:
    """For how long it must be quiet to be idle."""
    return min(IDLE_MS_MAX, model.switch_ms)


def idle_from_ms(model: Model) -> float:
    """From when it is idle; infinite while it has work."""
    if model.in_flight or model.ticket is not None:
        return NEVER_MS
    return sleeps_at_ms(model.last_request_ms, model.awake_since_ms or 0.0, idle_after_ms(model))


# ------------------------------------------------------------------------------------ candidates


def candidates(
    head: Head,
    short: Mapping[str, int],
    models: Iterable[Model],
    now_ms: float,
    rules: PoolRules,
) -> list[Candidate]:
    """All who could ever give room on the devices that are short of it."""
    found = []
    names = tuple(short)
    for model in models:
        if model.is_blind or model.is_pinned or model.name == head.model.name:
            continue
        candidate = _candidate(head, names, model, now_ms, rules)
        if candidate is not None and candidate.steps:
            found.append(candidate)
    return found


def _candidate(
    head: Head, names: Sequence[str], model: Model, now_ms: float, rules: PoolRules
) -> Candidate | None:
    match model.state:
        case state if state in _AT_REST:
            return Candidate(model, _steps(model, names, model.tier), now_ms)
        case ModelState.AWAKE:
            idle_ms = idle_from_ms(model)
            if idle_ms <= now_ms:
                return Candidate(model, _steps(model, names, "idle"), now_ms)
            ready_ms, obstacle = _ready(head, model, now_ms, rules)
            if idle_ms < ready_ms:
                ready_ms, obstacle = idle_ms, Obstacle.QUIET
            return Candidate(model, _steps(model, names, "working"), ready_ms, idle_ms, obstacle)
        case ModelState.LOADING if _may_unload(head, model, now_ms, rules):
            return Candidate(model, _steps(model, names, "loading"), now_ms)
        case state if state in RISING:
            steps = _steps(model, names, "working")
            return Candidate(model, steps, NEVER_MS, obstacle=Obstacle.RAISED)
        case _:
            return None


def _may_unload(head: Head, model: Model, now_ms: float, rules: PoolRules) -> bool:
    """Whether a load may be broken off."""
    if model.ticket is None:
        return True
    is_backing_off = model.back_off_until_ms is not None and model.back_off_until_ms > now_ms
    return model.is_again and (is_backing_off or head.is_before(model, now_ms, rules))


def _ready(head: Head, model: Model, now_ms: float, rules: PoolRules) -> tuple[float, Obstacle]:
    """From when a model with work may be asked, and what it takes longest to wait for."""
    behind = max(0, head.ticket.priority - model.rules.priority)
    reasons = (
        ((model.turn_from_ms or 0.0) + protection_ms(model, rules), Obstacle.PROTECTED),
        (head.ticket.since_ms + head.model.rules.max_wait_ms, Obstacle.YOUNG),
        (head.ticket.since_ms + behind * rules.starve_after_ms, Obstacle.BETTER),
    )
    ready_ms, obstacle = max(reasons, key=lambda reason: reason[0])
    return (ready_ms, obstacle) if ready_ms > now_ms else (now_ms, Obstacle.NONE)


def _steps(model: Model, names: Sequence[str], what: str) -> tuple[Step, ...]:
    """From what it holds downwards, as far as that gives room where it is short. Victims of one
    class are sorted by `who`."""
    steps: list[Step] = []
    held = _holds(model)
    is_last = model.ticket is not None and model.state is not ModelState.AWAKE
    who = (is_last, model.last_request_ms, model.awake_since_ms or 0.0, model.name)
    before = [0] * len(names)
    for klass, tier in _DESCENTS[what, model.has_copy]:
        needs = model.needs.get(tier)
        if needs is None:
            if tier is not Tier.COLD:
                continue
            needs = {}
        if len(names) == 1:  # nearly always: a comprehension would cost more than all the rest
            freed = [held.get(names[0], 0) - needs.get(names[0], 0)]
        else:
            freed = [held.get(name, 0) - needs.get(name, 0) for name in names]
        if freed[0] > before[0] or any(map(gt, freed, before)):
            steps.append(Step((klass, who, len(steps)), tier, freed))
            before = freed
    return tuple(steps)


def _holds(model: Model) -> Mapping[str, int]:
    """What it will hold if it is not asked. At rest that is its tier's, so that no plan counts on
    memory of a dead engine twice: it is booked, and leaves already."""
    if model.state in _AT_REST:
        return model.needs.get(model.tier, model.booked)
    return model.booked


# ------------------------------------------------------------------------------------ choosing


def ready_ms(found: Iterable[Candidate], short: Mapping[str, int]) -> float | None:
    """From when those that may be asked then have enough room. None: never, as things stand."""
    missing = [*short.values()]
    for each in sorted(found, key=lambda candidate: candidate.ready_ms):
        missing = _less(missing, each.steps[-1].freed)
        if max(missing) <= 0:
            return each.ready_ms
    return None


def choose(found: Iterable[Candidate], short: Mapping[str, int]) -> dict[Victim, Sequence[int]]:
    """Whom to ask, with what each gives. They do have enough (`ready_ms`)."""
    order = [(step.rank, step, each) for each in found for step in each.steps]
    order.sort(key=itemgetter(0))
    missing = [*short.values()]
    taken: list[tuple[Step, list[Step]]] = []
    chosen: dict[str, list[Step]] = {}
    for _, step, each in order:
        if max(missing) <= 0:
            break
        steps = chosen.setdefault(each.model.name, [])
        more = _less(step.freed, steps[-1].freed) if steps else step.freed
        if any(gain > 0 and lack > 0 for gain, lack in zip(more, missing, strict=True)):
            steps.append(step)
            taken.append((step, steps))
            missing = _less(missing, more)
    for step, steps in reversed(taken):
        if steps[-1] is not step:
            continue  # deeper than this, and that is needed
        more = _less(step.freed, steps[-2].freed) if len(steps) > 1 else step.freed
        without = [lack + gain for lack, gain in zip(missing, more, strict=True)]
        if max(without) <= 0:
            steps.pop()
            missing = without
    return {
        Victim(name, steps[-1].tier): steps[-1].freed for name, steps in chosen.items() if steps
    }


def _less(some: Sequence[int], other: Sequence[int]) -> list[int]:
    return [mine - taken for mine, taken in zip(some, other, strict=True)]


def unloads(chosen: Iterable[Victim], models: Iterable[Model]) -> bool:
    """Whether one of them would have to load again. A load that is broken off was for none."""
    loading = {model.name for model in models if model.state is ModelState.LOADING}
    return any(victim.tier is Tier.COLD and victim.model not in loading for victim in chosen)


def spares(
    found: Iterable[Candidate], short: Mapping[str, int], last_ms: float
) -> tuple[float, dict[Victim, Sequence[int]]] | None:
    """Until when to wait, and whom to ask then, so that no model has to load again: for an awake
    model that is idle at that time, else for those that are at work, until `last_ms`."""
    gentle = []
    for each in found:
        steps = tuple(step for step in each.steps if step.rank[0] not in UNLOADS)
        if steps and steps[0].rank[0] == AT_WORK:
            is_late = last_ms < each.idle_ms < NEVER_MS
            if not is_late and each.model.state is not ModelState.LOADING:
                idle_ms = min(each.idle_ms, last_ms)
                gentle.append(replace(each, steps=steps, ready_ms=idle_ms))
        elif steps:
            gentle.append(replace(each, steps=steps))
    at_ms = ready_ms(gentle, short)
    if at_ms is None:
        return None
    return at_ms, choose([each for each in gentle if each.ready_ms <= at_ms], short)


# ------------------------------------------------------------------------------------ the bound


def bound_ms(
    name: str,
    priority: int,
    models: Sequence[Model],
    rules: PoolRules,
    *,
    is_measured: bool = False,
) -> float | None:
    """How long a ticket of that priority for the model `name` can wait at most: with the budgets of
    all raises, or with what they took, None while one of them was not measured yet. Infinite: a
    drain has no end.

        max(max_wait, 2 s) + (D_i + S_i) + Σ_j (W_j + P_j + D_j + S_j) + W_i
          + starve_after · (p − p_best)

    i is the ticket's model, j each model that shares devices with it, also through others. W is the
    budget of a raise, resumed streams included, P the protection of a turn, D a drain, S the
    release of memory. A competitor has at most one turn first, since what a yielding model still
    wants is younger than the ticket; the second term is that of a ticket just behind its own
    model's barrier. The 2 s are `IDLE_MS_MAX`, which begin with the ticket as `max_wait` does.

    A budget is a minute at least, and most raises take milliseconds, so the sum of what was
    measured is shown beside it. Models that never yield take no turns. Where a lease or a stranger
    takes the room, the bound says nothing.
    """
    (model,) = (each for each in models if each.name == name)
    sharing = sharing_with(name, models)
    turns = [each for each in sharing if not each.is_pinned]
    raises = [each.raise_ms if is_measured else each.raise_budget_ms for each in (model, *turns)]
    known = [ms for ms in raises if ms is not None]
    if len(known) < len(raises):
        return None
    in_use = [each.rules.priority for each in (model, *sharing)]
    in_use += [each.ticket.priority for each in (model, *sharing) if each.ticket is not None]
    behind = max(0, priority - min(in_use))
    return (
        max(model.rules.max_wait_ms, IDLE_MS_MAX)
        + sum(known)
        + sum(_drain_ms(each) + (each.costs.release_ms or 0.0) for each in (model, *turns))
        + sum(protection_ms(each, rules) for each in turns)
        + behind * rules.starve_after_ms
    )


def _drain_ms(model: Model) -> float:
    """Until the last request has ended or is parked; infinite if some can be neither."""
    return model.rules.cut_ms if model.cannot_park else model.rules.park_ms


def sharing_with(name: str, models: Sequence[Model]) -> list[Model]:
    """All models that share devices with it, also through others."""
    (model,) = (each for each in models if each.name == name)
    devices = {*model.rules.devices}
    rest = [each for each in models if each.name != name]
    found: list[Model] = []
    while near := [each for each in rest if not devices.isdisjoint(each.rules.devices)]:
        rest = [each for each in rest if each not in near]
        found += near
        devices.update(*(each.rules.devices for each in near))
    return sorted(found, key=lambda each: each.name)
