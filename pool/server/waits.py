"""What a model waits for now, as a sentence: whom, and for what word or proof of theirs.

It only reads. Why a model waits for room is the policy's own sentence (`pool.core.reasons`).
"""

from __future__ import annotations

from collections.abc import Iterable

from plumbing.pod.messages import Tier
from pool.core import reasons
from pool.core.doors import reason_of
from pool.core.known import KnownEngine, KnownModel
from pool.core.planning import is_blind
from pool.core.situation import PoolSituation
from pool.core.states import EntryKind, ModelState

# What an engine in each state does next, on its way up.
_STEPS = {"dead": "start", "init": "start", "standby": "wake", "waking": "wake", "resting": "wake"}


def wait_of(pool: PoolSituation, known: KnownModel) -> str | None:
    """None: nothing is awaited."""
    if known.is_unknown or known.model.is_recovering:
        missing = [each.name for each in known.engines if each.said is None and not each.is_gone]
        if missing:
            have = "has" if len(missing) == 1 else "have"
            return f"{', '.join(missing)} {have} not been heard since the pool started"
        return "an engine is changing its state, and has not said yet what it will be"
    match known.model.state:
        case ModelState.PENDING:
            if is_blind(pool, known):
                return reasons.unheard(known.rules.devices[0])
            return known.never or known.wait or None
        case ModelState.LOADING | ModelState.WAKING:
            return _raised(known)
        case ModelState.DRAINING:
            return _also(known, _drained(pool, known))
        case ModelState.RELEASING | ModelState.UNLOADING:
            return _also(known, _freed(pool, known))
    return known.never


def next_of(pool: PoolSituation, known: KnownModel) -> str:
    """Why a model that somebody waits for does not serve yet."""
    if known.model.state is ModelState.FAILED:
        return known.model.fault
    return wait_of(pool, known) or reason_of(known)


def _also(known: KnownModel, why: str | None) -> str | None:
    """A model that makes room, and is wanted again already."""
    after = known.never or (known.wait if known.model.is_wanted else "")
    return "; ".join(each for each in (why, after) if each) or None


def _raised(known: KnownModel) -> str:
    if known.is_unload_ordered:
        return "waiting for all gateways to confirm that they stopped sending; then it is unloaded"
    engine = known.main()
    said = engine.said
    if said is None or not engine.is_connected:
        return f"{engine.name} is not connected to the pool"
    if not engine.has_obeyed:
        return f"{engine.name} has not answered its newest goal, {engine.goal}"
    fault = f" after a fault: {said.fault}" if said.fault else ""
    return f"waiting for {engine.name} to {_STEPS.get(said.state, 'be active')}{fault}"


def _drained(pool: PoolSituation, known: KnownModel) -> str:
    in_flight = pool.demand.in_flight(known.name)
    if in_flight:
        are = "request is" if in_flight == 1 else "requests are"
        return f"{in_flight} {are} still running"
    if not pool.demand.is_quiet(known.name, known.door_number):
        return "waiting for all gateways to confirm that they stopped sending"
    engine = known.stander()
    if engine is None:
        return "no engine holds its lock, so idleness cannot be confirmed"
    busy = engine.said.in_flight if engine.said is not None else 0
    return f"{engine.name} has {busy} requests" if busy else f"{engine.name} is not connected"


def _freed(pool: PoolSituation, known: KnownModel) -> str | None:
    """The three proofs of `pool.core.books`, in their order."""
    deaf = [each for each in known.engines if not (each.has_obeyed or each.is_gone)]
    if deaf:
        return f"{_names(deaf)} has not answered its newest goal, {deaf[0].goal}"
    busy = [each for each in known.engines if not each.is_without_kv]
    if busy:
        return f"{_names(busy)} has not let go of its KV memory"
    wanted = pool.books.entries_at(known, known.model.goal)
    left = [key for key in pool.books.booked(known) if key not in wanted]
    owners = {key.owner for key in left if key.kind is EntryKind.BASE}
    alive = [each for each in known.engines if each.name in owners and each.goal is Tier.COLD]
    if alive:
        return f"processes of {_names(alive)} are still alive"
    parts = sorted({f"{key.kind} on {key.device}" for key in left})
    return f"the memory service has not freed {', '.join(parts)}" if parts else None


def _names(engines: Iterable[KnownEngine]) -> str:
    return ", ".join(each.name for each in engines)
