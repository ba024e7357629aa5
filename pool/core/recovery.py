"""What the pool must not forget, as one small value for its state file, and the start of a pool:
from that file, or from what its neighbours are.

Everything that a neighbour was told is in it, with what is booked for it. What neighbours have said
is not: they say it again. One slot of the file has 64 KiB, so values are arrays, and what belongs
to a model's devices and engines stands in their order, without their names: 100 models with two
engines each on two devices are 40 KiB. A model whose devices or engines have changed since is a new
one.

With a file, every model goes on in the state that was saved: whatever a neighbour was told is in
there, and all that it may have taken is booked. A model is `recovering` until each of its engines
that may live has been heard. Until then it is neither raised nor asked to yield, however long that
lasts; a deadline would free memory on a guess.

Without a file nobody knows what lives. Nothing is told to the engines of a model before all of them
have been heard and none is on its way; then the model *is* what they are. Until then nothing is
raised on its devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.doors import door_key
from pool.core.events import LeaseAsked, OpenDoor, Running
from pool.core.model import SETTLED, Costs, KnownEngine, KnownModel, Model, ModelSignal
from pool.core.reservations import Books
from pool.core.states import EngineSizes, EntryKey, EntryKind, GoalGeneration, ModelState
from pool.core.view import Leaving
from pool.core.world import DueSignal, ModelSetup, PoolLease, PoolSetup, PoolSituation

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


def begin(
    setup: PoolSetup, now_ms: float, era: str, snapshot: PoolSnapshot | None
) -> PoolSituation:
    """The situation before the first event."""
    books = Books(setup.rules.margin_bytes, setup.devices)
    pool = PoolSituation(
        rules=setup.rules, models={}, engines={}, books=books, era=era, now_ms=now_ms
    )
    for name, each in setup.models.items():
        known = _new_model(name, each, now_ms)
        pool.models[name] = known
        pool.engines |= {engine.name: engine for engine in known.engines}
    if snapshot is not None:
        _restore(pool, snapshot)
    return pool


def _new_model(name: str, setup: ModelSetup, now_ms: float) -> KnownModel:
    return KnownModel(
        model=Model(name, since_ms=now_ms, is_recovering=True),
        rules=setup.rules,
        engines=tuple(KnownEngine(engine, name) for engine in setup.engines),
        sizes=setup.sizes,
        is_unknown=True,
        last_request_ms=now_ms,
    )


def _restore(pool: PoolSituation, snapshot: PoolSnapshot) -> None:
    pool.era, pool.start = snapshot.era, snapshot.start + 1
    pool.door_number, pool.books.number = snapshot.door_number, snapshot.question
    pool.demand.restore(snapshot.gateways)
    for asked in snapshot.leases:
        pool.leases[asked.lease] = PoolLease(asked, is_granted=True)
        key = EntryKey(asked.device, EntryKind.LEASE, asked.lease)
        pool.books.ledger.settle(key, asked.bytes)
    for name, known in pool.models.items():
        saved = snapshot.models.get(name)
        if saved is not None and saved.shape == shape_of(known):
            _restore_model(pool, known, saved)
            for engine, told in zip(known.engines, saved.engines, strict=True):
                _restore_engine(engine, told, snapshot.era)


def _restore_engine(engine: KnownEngine, saved: SavedEngine, era: str) -> None:
    engine.goal, engine.cap, engine.is_gone = saved.goal, saved.cap, saved.is_gone
    if saved.goal is not None:
        engine.generation = GoalGeneration(era, saved.start, saved.number)


def _restore_model(pool: PoolSituation, known: KnownModel, saved: SavedModel) -> None:
    model, now_ms = known.model, pool.now_ms
    for key, size_bytes in zip(known.keys, saved.booked, strict=True):
        if size_bytes is not None:
            pool.books.ledger.settle(key, size_bytes)
    model.state, model.floor, model.aim = saved.state, saved.floor, saved.aim
    model.running, model.is_again, model.reason = saved.running, saved.is_again, saved.reason
    model.is_wanted = saved.is_wanted
    model.faults_ms = tuple(ms for ms in saved.faults_ms if ms <= now_ms)
    model.fault, model.is_permanent = saved.fault, saved.is_permanent
    model.since_ms, known.is_unknown = now_ms, False
    known.pinned, known.load_ordered_ms = saved.pinned, saved.load_ordered_ms
    known.is_unload_ordered = saved.is_unload_ordered
    known.leaving = Leaving(saved.leaving) if saved.leaving else None
    known.costs = Costs(saved.load_ms, saved.wake_ms, release_ms=saved.release_ms)
    for cost, spent_ms in zip(MORE_COSTS, saved.more_costs, strict=False):
        setattr(known.costs, cost, spent_ms)
    known.last_request_ms = min(saved.last_request_ms, now_ms)
    if saved.sizes is not None:
        known.sizes = sizes_on(known, saved.sizes, is_estimated=saved.is_estimated)
    known.door_number = saved.door_number
    if saved.door is not None:
        known.door, known.door_key = saved.door, door_key(known, saved.door)
    # A pool that is restarted again and again must not let one turn, or its drain, last for ever.
    known.drained_ms = _not_after(now_ms, saved.drained_ms)
    if model.state is ModelState.DRAINING and model.running is Running.FINISH:
        model.since_ms = known.drained_ms or now_ms
    if model.state in (ModelState.AWAKE, ModelState.DRAINING):
        known.awake_since_ms = awake_ms = _not_after(now_ms, saved.awake_since_ms) or now_ms
        known.turn_since_ms = min(awake_ms + (known.costs.resume_ms or 0.0), now_ms)
    else:
        known.asleep_since_ms = now_ms


def _not_after(now_ms: float, saved_ms: float | None) -> float | None:
    """The clock begins anew with the machine."""
    return None if saved_ms is None else min(saved_ms, now_ms)


def say_again(pool: PoolSituation) -> None:
    """The goals that were told before this start, for the shell to tell on its new connections.
    Doors follow, each once: as it was, or as it is now."""
    for engine in pool.engines.values():
        if engine.goal is not None and engine.generation is not None:
            pool.say(ev.TellEngine(engine.name, engine.goal, engine.generation))
    for known in pool.models.values():
        pool.aim(known)


def recover(pool: PoolSituation, known: KnownModel) -> None:
    """End its recovery, if enough has been heard."""
    if not known.model.is_recovering:
        return
    if known.is_unknown:
        if all(_is_settled(engine) for engine in known.engines):
            _adopt(pool, known)
    elif all(engine.is_gone or engine.said is not None for engine in known.engines):
        known.model.is_recovering = False
        pool.touch(known.name)


def _is_settled(engine: KnownEngine) -> bool:
    """Heard, and not on its way: its own budgets end what it does."""
    said = engine.said
    return (
        said is not None
        and said.state in SETTLED
        and bool(said.incarnation) is (said.state != "dead")
    )


def _adopt(pool: PoolSituation, known: KnownModel) -> None:
    """The model is what its engines are."""
    living = [engine for engine in known.engines if engine.incarnation]
    for engine in known.engines:
        engine.cap = Tier.AWAKE if engine in living else Tier.COLD
    words = [engine.said for engine in living if engine.said is not None]
    tier = max((said.tier for said in words), key=list(Tier).index, default=Tier.COLD)
    known.is_unknown = False
    why = "found so at the start of the pool"
    if tier is Tier.AWAKE:
        pool.fire(known, DueSignal(ModelSignal.IS_AWAKE, why))
    elif tier is not Tier.COLD:
        pool.fire(known, DueSignal(ModelSignal.IS_REST, why, tier))
    known.model.is_recovering = False
    for key, size_bytes in pool.books.entries_at(known, known.model.goal).items():
        pool.books.ledger.settle(key, max(size_bytes, pool.books.ledger.entries.get(key, 0)))
    pool.aim(known)
    pool.touch_all()
