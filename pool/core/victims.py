"""Who gives room to a head: no more of them and no deeper than needed, the cheapest first.

    class  who                                          to              when
    0      shadows, unless `shadow: keeps`              cold            now
    1      a model that loads, and nobody waits for it  cold            now
    2      warm                                         offloaded ¹     now
    3, 4   awake and idle                               warm, deeper ¹  now
    5      awake with work                              warm, deeper ¹  past its protection and the
                                                                        head's `max_wait`, if its
                                                                        priority is not better
    6      all of these                                 cold            as above

¹ Cold at once without a copy in host memory; one that works, in class 6. Within a class the least
recently asked yields first. A model that leaves already may be asked to leave deeper. Never one
that is pinned or on its way up for a ticket; a granted lease is pinned.

The surprising thing: nobody is asked until all who are needed may be asked. To ask early those who
may be would leave the device idle until the last one's protection ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from plumbing.part.tier import Tier
from pool.core.states import ModelState
from pool.core.tickets import order_of
from pool.core.view import ModelView, PoolRules, TicketView, Victim

IDLE_MS_MAX = 2_000.0  # awake and quiet for so long is idle, however costly it is to wake again
_KEEPS_ITS_TIER = frozenset(
    {
        *(ModelState.OFFLOADED, ModelState.WARM, ModelState.PENDING),
        *(ModelState.DRAINING, ModelState.RELEASING),
    }
)

# By what it is, or the tier that it holds or falls to, and whether its weights are in host memory
# too: the way down, each step with its class.
_DESCENTS: Mapping[tuple[str, bool], tuple[tuple[int, Tier], ...]] = {
    ("loading", True): ((1, Tier.COLD),),
    ("loading", False): ((1, Tier.COLD),),
    (Tier.WARM, True): ((2, Tier.OFFLOADED), (6, Tier.COLD)),
    (Tier.WARM, False): ((2, Tier.COLD),),
    (Tier.OFFLOADED, True): ((6, Tier.COLD),),
    (Tier.OFFLOADED, False): ((6, Tier.COLD),),
    (Tier.COLD, True): (),
    (Tier.COLD, False): (),
    ("idle", True): ((3, Tier.WARM), (4, Tier.OFFLOADED), (6, Tier.COLD)),
    ("idle", False): ((3, Tier.WARM), (4, Tier.COLD)),
    ("working", True): ((5, Tier.WARM), (5, Tier.OFFLOADED), (6, Tier.COLD)),
    ("working", False): ((5, Tier.WARM), (6, Tier.COLD)),
}


class Obstacle(StrEnum):
    """Why a model cannot be asked now."""

    NONE = ""
    PROTECTED = "protected"  # it has work, and is in its protection
    YOUNG = "young"  # it has work, and the head's ticket is too young
    BETTER = "better"  # it has work, and the better priority
    RAISED = "raised"  # it is on its way up for a ticket


class Step(Struct, frozen=True):
    """One way for a model to give room. `freed`: in all that it gives, from what it holds now."""

    rank: tuple[int, bool, float, float, str, int]
    tier: Tier
    freed: Mapping[str, int]


class Candidate(Struct, frozen=True):
    """Who may give room, from when, and how: `steps` from the first to the deepest. `ready_ms`:
    infinite if only an event can tell."""

    model: ModelView
    steps: Sequence[Step]
    ready_ms: float
    obstacle: Obstacle = Obstacle.NONE
    is_shadow: bool = False


class Head(Struct, frozen=True):
    """For whom room is made. `extra`: what is to be booked to raise it; `places`: the devices on
    which others are behind it."""

    model: ModelView
    ticket: TicketView
    order: tuple[int, float]
    extra: Mapping[str, int]
    places: tuple[str, ...]

    def is_before(self, other: ModelView, now_ms: float, rules: PoolRules) -> bool:
        """A plan that stands goes before every ticket."""
        if other.ticket is None or self.model.has_plan:
            return True
        return self.order < order_of(other.ticket, now_ms, rules)


def protection_ms(model: ModelView, rules: PoolRules) -> float:
    """For how long it is no victim while it has work, from when it is awake."""
    return max(model.rules.min_runtime_ms, rules.quantum_factor * model.switch_ms)


def quiet_since_ms(model: ModelView) -> float:
    """Since when nobody has asked; a model that was woken a moment ago has not been asked yet."""
    return max(model.last_request_ms, model.awake_since_ms or 0.0)


def idle_from_ms(model: ModelView) -> float:
    """From when it is idle; infinite while it has work."""
    if model.in_flight or model.ticket is not None:
        return float("inf")
    return quiet_since_ms(model) + min(IDLE_MS_MAX, model.switch_ms)


# ------------------------------------------------------------------------------------ candidates


def candidates(
    head: Head,
    short: Mapping[str, int],
    models: Iterable[ModelView],
    now_ms: float,
    rules: PoolRules,
) -> list[Candidate]:
    """All who could ever give room on the devices that are short of it."""
    found = []
    for model in models:
        is_head = model.name == head.model.name
        if has_shadow(model) and not model.rules.shadow_keeps:
            freed = {name: model.shadow_bytes.get(name, 0) for name in short}
            if any(freed.values()):
                step = Step(_rank(0, model, is_last=is_head), Tier.COLD, freed)
                found.append(Candidate(model, (step,), now_ms, is_shadow=True))
        if is_head or model.rules.is_pinned:
            continue
        candidate = _candidate(head, short, model, now_ms, rules)
        if candidate is not None and candidate.steps:
            found.append(candidate)
    return found


def _candidate(
    head: Head, short: Mapping[str, int], model: ModelView, now_ms: float, rules: PoolRules
) -> Candidate | None:
    match model.state:
        case ModelState.OFFLOADED | ModelState.WARM | ModelState.PENDING:
            return Candidate(model, _steps(model, short, model.tier), now_ms)
        case ModelState.DRAINING | ModelState.RELEASING:
            return Candidate(model, _steps(model, short, model.tier), now_ms)
        case ModelState.AWAKE:
            idle_ms = idle_from_ms(model)
            if idle_ms <= now_ms:
                return Candidate(model, _steps(model, short, "idle"), now_ms)
            ready_ms, obstacle = _ready(head, model, now_ms, rules)
            return Candidate(
                model, _steps(model, short, "working"), min(ready_ms, idle_ms), obstacle
            )
        case ModelState.LOADING if _may_unload(head, model, now_ms, rules):
            return Candidate(model, _steps(model, short, "loading"), now_ms)
        case ModelState.LOADING | ModelState.WAKING:
            steps = _steps(model, short, "working")
            return Candidate(model, steps, float("inf"), Obstacle.RAISED)
        case _:
            return None


def _may_unload(head: Head, model: ModelView, now_ms: float, rules: PoolRules) -> bool:
    """Whether a load may be broken off."""
    if model.ticket is None:
        return True
    is_backing_off = model.back_off_until_ms is not None and model.back_off_until_ms > now_ms
    return model.is_loading_again and (is_backing_off or head.is_before(model, now_ms, rules))


def _ready(head: Head, model: ModelView, now_ms: float, rules: PoolRules) -> tuple[float, Obstacle]:
    """From when a model with work may be asked, and what it takes longest to wait for."""
    behind = max(0, head.ticket.priority - model.rules.priority)
    reasons = (
        ((model.awake_since_ms or 0.0) + protection_ms(model, rules), Obstacle.PROTECTED),
        (head.ticket.since_ms + head.model.rules.max_wait_ms, Obstacle.YOUNG),
        (head.ticket.since_ms + behind * rules.starve_after_ms, Obstacle.BETTER),
    )
    ready_ms, obstacle = max(reasons, key=lambda reason: reason[0])
    return (ready_ms, obstacle) if ready_ms > now_ms else (now_ms, Obstacle.NONE)


def _steps(model: ModelView, short: Mapping[str, int], what: str) -> tuple[Step, ...]:
    """From what it holds downwards, as far as that gives room where it is short."""
    steps: list[Step] = []
    holds = _holds(model)
    has_ticket = model.ticket is not None and model.state is not ModelState.AWAKE
    for klass, tier in _DESCENTS[what, model.has_copy]:
        needs = model.needs.get(tier)
        if needs is None and tier is not Tier.COLD:
            continue
        freed = {name: _freed(model, holds, needs or {}, name, tier) for name in short}
        before = steps[-1].freed if steps else {}
        if any(size_bytes > before.get(name, 0) for name, size_bytes in freed.items()):
            steps.append(Step(_rank(klass, model, len(steps), is_last=has_ticket), tier, freed))
    return tuple(steps)


def _freed(
    model: ModelView, holds: Mapping[str, int], needs: Mapping[str, int], device: str, tier: Tier
) -> int:
    """A cold model has no shadow; one that does not keep its shadow was asked for that before."""
    freed = max(0, holds.get(device, 0) - needs.get(device, 0))
    takes_shadow = tier is Tier.COLD and model.rules.shadow_keeps and has_shadow(model)
    return freed + model.shadow_bytes.get(device, 0) if takes_shadow else freed


def has_shadow(model: ModelView) -> bool:
    """Whether its shadow holds memory."""
    return model.shadow is not None and model.shadow is not Tier.COLD


def _holds(model: ModelView) -> Mapping[str, int]:
    """What it will hold if it is not asked. At rest that is its tier's, so that nobody counts on
    memory of a dead engine twice: it is booked, and leaves already."""
    if model.state in _KEEPS_ITS_TIER:
        return model.needs.get(model.tier, model.booked)
    return model.booked


def _rank(
    klass: int, model: ModelView, depth: int = 0, *, is_last: bool = False
) -> tuple[int, bool, float, float, str, int]:
    awake_since_ms = model.awake_since_ms or 0.0
    return (klass, is_last, model.last_request_ms, awake_since_ms, model.name, depth)


# ------------------------------------------------------------------------------------ choosing


def ready_ms(found: Iterable[Candidate], short: Mapping[str, int]) -> float | None:
    """From when those that may be asked then have enough room. None: never, as things stand."""
    missing = dict(short)
    for each in sorted(found, key=lambda candidate: candidate.ready_ms):
        deepest = each.steps[-1].freed
        for name in missing:
            missing[name] -= deepest[name]
        if all(size_bytes <= 0 for size_bytes in missing.values()):
            return each.ready_ms
    return None


def choose(found: Iterable[Candidate], short: Mapping[str, int]) -> dict[Victim, Mapping[str, int]]:
    """Whom to ask, with what each gives. They do have enough (`ready_ms`)."""
    order = sorted(
        ((step, each) for each in found for step in each.steps), key=lambda pair: pair[0].rank
    )
    missing = dict(short)
    taken: list[tuple[Step, Candidate]] = []
    deepest: dict[tuple[str, bool], list[Step]] = {}
    for step, each in order:
        if all(size_bytes <= 0 for size_bytes in missing.values()):
            break
        steps = deepest.setdefault((each.model.name, each.is_shadow), [])
        more = _more(step, steps[-1] if steps else None)
        if any(more[name] > 0 for name, size_bytes in missing.items() if size_bytes > 0):
            steps.append(step)
            taken.append((step, each))
            for name in missing:
                missing[name] -= more[name]
    for step, each in reversed(taken):
        steps = deepest[each.model.name, each.is_shadow]
        if steps[-1] is not step:
            continue  # deeper than this, and that is needed
        more = _more(step, steps[-2] if len(steps) > 1 else None)
        if all(size_bytes + more[name] <= 0 for name, size_bytes in missing.items()):
            steps.pop()
            for name in missing:
                missing[name] += more[name]
    return {
        Victim(name, steps[-1].tier, is_shadow): steps[-1].freed
        for (name, is_shadow), steps in deepest.items()
        if steps
    }


def _more(step: Step, before: Step | None) -> Mapping[str, int]:
    if before is None:
        return step.freed
    return {name: size_bytes - before.freed[name] for name, size_bytes in step.freed.items()}
