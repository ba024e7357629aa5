"""What the pool must not forget, as one small value for its state file.

Everything that a neighbour was told is in it, with what is booked for it. What neighbours have said
is not: they say it again. One slot of the file has 64 KiB, so values are arrays, and what belongs
to a model's devices and engines stands in their order, without their names: 100 models with two
engines each on two devices are 40 KiB. A model whose devices or engines have changed since is a new
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from plumbing.pod.messages import Tier
from pool.core.events import LeaseAsked, OpenDoor, Running
from pool.core.known import KnownEngine, KnownModel
from pool.core.situation import PoolSituation
from pool.core.states import EngineSizes, GoalGeneration, ModelState

TEXT_MAX = 100  # characters of a reason or a fault on file

MORE_COSTS = ("restage_ms", "resume_ms", "turn_ms", "drain_ms")

Sizes = tuple[tuple[int, ...], ...]  # base, weights and KV, each by device


class SavedEngine(Struct, frozen=True, array_like=True):
    goal: Tier | None
    start: int  # of its generation, whose era is the snapshot's
    number: int
    cap: Tier
    is_gone: bool


class SavedModel(Struct, frozen=True, array_like=True):
    shape: int  # its devices and engines
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
    sizes: Sizes | None
    is_estimated: bool
    booked: tuple[int | None, ...]  # in the order of `KnownModel.keys`
    door: OpenDoor | None  # any other one is made anew
    door_number: int
    engines: tuple[SavedEngine, ...]
    more_costs: tuple[float | None, ...] = ()  # of `MORE_COSTS`, in their order
    awake_since_ms: float | None = None
    drained_ms: float | None = None


class PoolSnapshot(Struct, frozen=True):
    """All of it. `version` changes when an older pool could not read it."""

    era: str
    start: int
    number: int
    door_number: int
    question: int
    models: Mapping[str, SavedModel]
    leases: tuple[LeaseAsked, ...]  # that were granted
    version: int = 1
    gateways: tuple[str, ...] = ()  # that may have requests


def saved(pool: PoolSituation) -> PoolSnapshot:
    return PoolSnapshot(
        era=pool.era,
        start=pool.start,
        number=pool.number,
        door_number=pool.door_number,
        question=pool.books.number,
        models={
            name: _saved_model(pool, known)
            for name, known in pool.models.items()
            if not known.is_unknown
        },
        leases=tuple(lease.asked for lease in pool.leases.values() if lease.is_granted),
        gateways=pool.demand.gateways,
    )


def anew(old: PoolSnapshot) -> PoolSnapshot:
    """What a new pod keeps of an old one, whose processes are all gone: sizes and costs, who is
    pinned, and leases, whose processes may live on. Its models are cold, and have no faults."""
    gone = SavedEngine(goal=None, start=0, number=0, cap=Tier.AWAKE, is_gone=True)
    models = {
        name: replace(
            each,
            state=ModelState.COLD,
            floor=Tier.COLD,
            aim=Tier.AWAKE,
            running=Running.FINISH,
            is_again=False,
            is_wanted=False,
            faults_ms=(),
            fault="",
            is_permanent=False,
            reason="",
            load_ordered_ms=None,
            is_unload_ordered=False,
            leaving=None,
            booked=(None,) * len(each.booked),
            door=None,
            engines=(gone,) * len(each.engines),
            awake_since_ms=None,
            drained_ms=None,
        )
        for name, each in old.models.items()
    }
    return replace(old, models=models)


def shape_of(known: KnownModel) -> int:
    names = [*known.rules.devices, "", *(engine.name for engine in known.engines)]
    return crc32("\n".join(names).encode())


def sizes_on(known: KnownModel, saved_sizes: Sizes, *, is_estimated: bool) -> EngineSizes:
    """What was saved, by device again."""
    base, weights, kv = (
        dict(zip(known.rules.devices, each, strict=True)) if each else {} for each in saved_sizes
    )
    return EngineSizes(base, weights, kv, is_estimated)


def _saved_sizes(known: KnownModel) -> Sizes | None:
    if known.sizes is None:
        return None
    parts = (known.sizes.base, known.sizes.weights, known.sizes.kv)
    devices = known.rules.devices
    return tuple(tuple(each.get(name, 0) for name in devices) if each else () for each in parts)


def _saved_model(pool: PoolSituation, known: KnownModel) -> SavedModel:
    model, costs = known.model, known.costs
    entries = pool.books.ledger.entries
    return SavedModel(
        shape=shape_of(known),
        state=model.state,
        floor=model.floor,
        aim=model.aim,
        running=model.running,
        is_again=model.is_again,
        is_wanted=model.is_wanted,
        faults_ms=model.faults_ms,
        fault=model.fault[:TEXT_MAX],
        is_permanent=model.is_permanent,
        reason=model.reason[:TEXT_MAX],
        pinned=known.pinned,
        load_ordered_ms=known.load_ordered_ms,
        is_unload_ordered=known.is_unload_ordered,
        leaving=known.leaving,
        load_ms=_rounded(costs.load_ms),
        wake_ms=_rounded(costs.wake_ms),
        release_ms=_rounded(costs.release_ms),
        last_request_ms=known.last_request_ms,
        sizes=_saved_sizes(known),
        is_estimated=known.sizes is not None and known.sizes.is_estimated,
        booked=tuple(entries.get(key) for key in known.keys),
        door=known.door if isinstance(known.door, OpenDoor) else None,
        door_number=known.door_number,
        engines=tuple(_saved_engines(pool, known)),
        more_costs=tuple(_rounded(getattr(costs, name)) for name in MORE_COSTS),
        awake_since_ms=_rounded(known.awake_since_ms),
        drained_ms=_rounded(known.drained_ms),
    )


def _rounded(spent_ms: float | None) -> float | None:
    return None if spent_ms is None else round(spent_ms, 1)


def _saved_engines(pool: PoolSituation, known: KnownModel) -> Iterator[SavedEngine]:
    engine: KnownEngine
    for engine in known.engines:
        told = engine.generation or GoalGeneration(pool.era, 0, 0)
        yield SavedEngine(engine.goal, told.start, told.number, engine.cap, engine.is_gone)
