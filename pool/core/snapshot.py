"""What the pool must not forget, as one small value for its state file.

Everything that a neighbour was told is in it, with what is booked for it. What neighbours have said
is not: they say it again. One slot of the file has 64 KiB, so values are arrays, not maps: 100
models with two engines each on two devices are some 40 KiB.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from plumbing.part.tier import Tier
from pool.core.events import Door, LeaseAsked, Running
from pool.core.situation import PoolSituation
from pool.core.states import EngineSizes, EntryKind, GoalGeneration, ModelState

SavedEntries = Mapping[str, Mapping[EntryKind, Mapping[str, int]]]  # by device, kind and owner


class SavedModel(Struct, frozen=True, array_like=True):
    state: ModelState
    floor: Tier
    aim: Tier
    running: Running
    is_again: bool
    is_wanted: bool
    faults_ms: tuple[float, ...]
    fault: str
    is_permanent: bool
    reason: str
    pinned: bool | None
    load_ordered_ms: float | None
    is_unload_ordered: bool
    leaving: str | None
    load_ms: float | None
    wake_ms: float | None
    release_ms: float | None
    last_request_ms: float
    sizes: EngineSizes | None
    door: Door | None
    door_number: int


class SavedEngine(Struct, frozen=True, array_like=True):
    goal: Tier | None
    start: int  # of its generation, whose era is the snapshot's
    number: int
    cap: Tier
    is_gone: bool


class PoolSnapshot(Struct, frozen=True):
    """All of it. `version` changes when an older pool could not read it."""

    era: str
    start: int
    number: int
    door_number: int
    question: int
    models: Mapping[str, SavedModel]
    engines: Mapping[str, SavedEngine]
    entries: SavedEntries
    leases: tuple[LeaseAsked, ...]  # that were granted
    version: int = 1


def saved(pool: PoolSituation) -> PoolSnapshot:
    entries: dict[str, dict[EntryKind, dict[str, int]]] = {}
    for key, size_bytes in pool.books.ledger.entries.items():
        kinds = entries.setdefault(key.device, {})
        kinds.setdefault(key.kind, {})[key.owner] = size_bytes
    return PoolSnapshot(
        era=pool.era,
        start=pool.start,
        number=pool.number,
        door_number=pool.door_number,
        question=pool.books.number,
        models={
            name: _saved_model(pool, name)
            for name, known in pool.models.items()
            if not known.is_unknown
        },
        engines={
            name: _saved_engine(pool, name)
            for name, engine in pool.engines.items()
            if not pool.models[engine.model].is_unknown
        },
        entries=entries,
        leases=tuple(lease.asked for lease in pool.leases.values() if lease.is_granted),
    )


def _saved_model(pool: PoolSituation, name: str) -> SavedModel:
    known = pool.models[name]
    model, costs = known.model, known.costs
    return SavedModel(
        state=model.state,
        floor=model.floor,
        aim=model.aim,
        running=model.running,
        is_again=model.is_again,
        is_wanted=model.is_wanted,
        faults_ms=model.faults_ms,
        fault=model.fault,
        is_permanent=model.is_permanent,
        reason=model.reason,
        pinned=known.pinned,
        load_ordered_ms=known.load_ordered_ms,
        is_unload_ordered=known.is_unload_ordered,
        leaving=known.leaving,
        load_ms=costs.load_ms,
        wake_ms=costs.wake_ms,
        release_ms=costs.release_ms,
        last_request_ms=known.last_request_ms,
        sizes=known.sizes,
        door=known.door,
        door_number=known.door_number,
    )


def _saved_engine(pool: PoolSituation, name: str) -> SavedEngine:
    engine = pool.engines[name]
    generation = engine.generation or GoalGeneration(pool.era, 0, 0)
    return SavedEngine(engine.goal, generation.start, generation.number, engine.cap, engine.is_gone)
