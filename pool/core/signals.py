"""Which signal the facts about a model give next: the words of its engines, its tickets, its books.

Level-triggered like the messages: what is so now decides, not what has come last. So a message that
was lost, repeated or late costs nothing. Must not know of the policy.
"""

from __future__ import annotations

from msgspec import Struct

from plumbing.pod.messages import Tier
from pool.core.books import Books
from pool.core.budgets import HEADLESS_MS, deadline_ms
from pool.core.demand import Demand
from pool.core.events import OpenDoor, ShutDoor
from pool.core.known import PARKED, KnownEngine, KnownModel
from pool.core.model_table import REST, ModelSignal
from pool.core.states import ModelState

HAS_ENGINES = frozenset(
    {
        ModelState.LOADING,
        *REST,
        ModelState.PENDING,
        ModelState.WAKING,
        ModelState.AWAKE,
        ModelState.DRAINING,
        ModelState.RELEASING,
    }
)


class DueSignal(Struct, frozen=True):
    signal: ModelSignal
    reason: str
    tier: Tier | None = None
    is_permanent: bool = False


def next_signal(
    known: KnownModel, demand: Demand, books: Books, now_ms: float, *, is_wanted: bool
) -> DueSignal | None:
    """The next one; None: its state agrees with the facts. `is_wanted`: somebody waits for it."""
    return (
        _standing(known, now_ms)
        or _wanted(known, demand, is_wanted=is_wanted)
        or _too_large(known, books)
        or _word(known)
        or _quiet(known, demand)
        or _freed(known, books)
        or _spent(known, now_ms)
    )


# ------------------------------------------------------------------ who stands for it


def _standing(known: KnownModel, now_ms: float) -> DueSignal | None:
    """OVER, DIED or LEFT, if who stood for it does no more."""
    model, holder = known.model, known.holder
    stander = known.stander()
    if known.stood is None:
        if stander is not None:
            known.stood = stander.name, stander.incarnation
        return _died_loading(known)
    known.lost = None
    name, incarnation = known.stood
    if holder is not None and holder.engine != name:
        known.stood, known.headless_ms = (holder.engine, ""), None
        if model.may(ModelSignal.OVER):
            return DueSignal(ModelSignal.OVER, f"{holder.engine} took over from {name}")
        return None
    if not incarnation and stander is not None:
        known.stood = name, incarnation = stander.name, stander.incarnation
    if not _is_gone(known, name, incarnation):
        known.headless_ms = None
        return None
    if any(engine.name != name for engine in known.living()):
        known.headless_ms = now_ms if known.headless_ms is None else known.headless_ms
        if now_ms < known.headless_ms + HEADLESS_MS:
            return None  # the lock server will name it
    known.stood = known.headless_ms = None
    return _died(known, name, incarnation)


def _is_gone(known: KnownModel, name: str, incarnation: str) -> bool:
    engine = known.engine(name)
    if engine is None or engine.said is None:
        return False  # nobody has said anything
    if not incarnation:
        return known.holder is None  # granted, and gone before it was heard
    return engine.incarnation != incarnation


def _died_loading(known: KnownModel) -> DueSignal | None:
    """One of its engines has died, and none had stood for it. While it is recovering, one that has
    not been heard may live, and serve."""
    if known.lost is None or known.model.is_recovering:
        return None
    (name, incarnation), known.lost = known.lost, None
    if any(engine.name != name for engine in known.living()):
        return None
    return _died(known, name, incarnation)


def _died(known: KnownModel, name: str, incarnation: str) -> DueSignal | None:
    if known.model.state not in HAS_ENGINES or known.model.state is ModelState.PENDING:
        return None
    if known.model.goal is Tier.COLD:
        return DueSignal(ModelSignal.LEFT, known.model.reason)  # it obeys
    engine = known.engine(name)
    if engine is not None and incarnation and engine.leaving == incarnation:
        return DueSignal(ModelSignal.LEFT, f"{name} was told to stop")
    said = engine.said if engine is not None else None
    fault = f": {said.fault}" if said is not None and said.fault else ""
    if said is not None and said.is_machine:
        return DueSignal(ModelSignal.LEFT, f"{name} has died{fault}")
    known.blamed = name
    return DueSignal(
        ModelSignal.DIED,
        f"{name} has died{fault}",
        is_permanent=said is not None and said.is_permanent and bool(said.fault),
    )


# ------------------------------------------------------------------ who wants it


def _wanted(known: KnownModel, demand: Demand, *, is_wanted: bool) -> DueSignal | None:
    model = known.model
    if is_wanted and (not model.is_wanted or model.state in (ModelState.COLD, *REST)):
        who = "a request waits" if demand.tickets(known.name) else "an operator has asked"
        return DueSignal(ModelSignal.WANT, f"{who} for it")
    if not is_wanted and model.is_wanted and demand.is_heard:
        return DueSignal(ModelSignal.UNWANT, "nobody waits for it any more")
    return None


# ------------------------------------------------------------------ what was measured


def _too_large(known: KnownModel, books: Books) -> DueSignal | None:
    """What was measured while it loads is above the estimate and does not fit: it must not wake
    into memory that others have.

    A device or an engine that has not been heard since the pool started proves nothing. Behind an
    open door the engine may serve already, so it keeps its goal.
    """
    model, devices = known.model, known.rules.devices
    if not model.may(ModelSignal.TOO_LARGE):
        return None
    if model.is_recovering or isinstance(known.door, OpenDoor):
        return None
    if not all(books.is_known(device) for device in devices):
        return None
    over = [device for device in devices if books.ledger.free_bytes(device) < 0]
    if not over:
        return None
    why = f"it is larger than was booked for it on {over[0]}, and is raised once there is room"
    return DueSignal(ModelSignal.TOO_LARGE, why)


# ------------------------------------------------------------------ what its engine says


def _word(known: KnownModel) -> DueSignal | None:
    """What the engine that stands for it says of its tier, if it obeys our last goal."""
    model, engine = known.model, known.stander()
    if engine is None or engine.said is None or not engine.has_obeyed:
        return _fault(known)
    said = engine.said
    match model.state:
        case ModelState.LOADING if model.aim is Tier.AWAKE and said.tier is not Tier.COLD:
            tier = Tier.OFFLOADED if said.tier is Tier.OFFLOADED else Tier.WARM
            return DueSignal(ModelSignal.IS_REST, f"{engine.name} is ready", tier)
        case ModelState.LOADING if said.tier is model.aim and said.state in PARKED:
            return DueSignal(ModelSignal.IS_REST, f"{engine.name} is ready", said.tier)
        case ModelState.WAKING if said.state == "active":
            return DueSignal(ModelSignal.IS_AWAKE, f"{engine.name} serves")
    return _fault(known)


def _fault(known: KnownModel) -> DueSignal | None:
    """A fault that no further try would cure."""
    if known.model.state not in (ModelState.LOADING, ModelState.WAKING):
        return None
    engine = known.main()
    said = engine.said
    is_final = said is not None and bool(said.fault) and said.is_permanent and engine.has_obeyed
    if said is None or not is_final or any(True for _ in known.living()):
        return None
    return DueSignal(ModelSignal.SPENT, f"{engine.name}: {said.fault}", is_permanent=True)


# ------------------------------------------------------------------ drains, memory, time


def _quiet(known: KnownModel, demand: Demand) -> DueSignal | None:
    """Nothing is in flight, by both counts, behind a door that every gateway obeys."""
    if known.model.state is not ModelState.DRAINING or not isinstance(known.door, ShutDoor):
        return None
    if not demand.is_quiet(known.name, known.door_number) or not _is_idle(known.stander()):
        return None
    return DueSignal(ModelSignal.QUIET, known.model.reason)


def _is_idle(engine: KnownEngine | None) -> bool:
    if engine is None or engine.said is None or not engine.is_connected:
        return False
    return engine.said.in_flight == 0


def _freed(known: KnownModel, books: Books) -> DueSignal | None:
    model = known.model
    if model.state not in (ModelState.RELEASING, ModelState.UNLOADING):
        return None
    wanted = books.entries_at(known, model.goal)
    if any(key not in wanted for key in books.booked(known)):
        return None
    return DueSignal(ModelSignal.FREED, model.reason)


def _spent(known: KnownModel, now_ms: float) -> DueSignal | None:
    model = known.model
    if model.state in (ModelState.LOADING, ModelState.WAKING) and model.is_exhausted(now_ms):
        return DueSignal(ModelSignal.SPENT, model.fault, is_permanent=model.is_permanent)
    due_ms = deadline_ms(known)
    if due_ms is None or now_ms < due_ms:
        return None
    spent_s = (now_ms - model.since_ms) / 1000
    return DueSignal(ModelSignal.SPENT, f"{model.state} for {spent_s:.0f} s: {model.reason}")
