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
from pool.core.model import SETTLED, Costs, KnownEngine, KnownModel, lower
from pool.core.reservations import Books
from pool.core.states import EngineSizes, EntryKey, EntryKind, GoalGeneration, ModelState
from pool.core.view import Leaving
from pool.core.world import ModelSetup, PoolLease, PoolSetup, PoolSituation

TEXT_MAX = 100  # characters of a reason or a fault on file

MORE_COSTS = ("restage_ms", "resume_ms", "turn_ms", "drain_ms")

Sizes = tuple[tuple[int, ...], ...]  # base, weights and KV, each by device


# Of a model: what is on file just as it is in memory, and what a new pod keeps of an old one.
SAVED_AS_IT_IS = (
    *("state", "floor", "goal", "running", "is_again", "is_wanted", "faults_ms", "is_permanent"),
    *("pinned", "load_ordered_ms", "is_unload_ordered", "leaving", "last_request_ms"),
    "door_number",
)
KEPT_ANEW = (
    *("pinned", "load_ms", "wake_ms", "release_ms", "more_costs", "sizes", "is_estimated"),
    *("last_request_ms", "door_number"),
)


class SavedEngine(Struct, frozen=True, array_like=True):
    goal: Tier | None
    start: int  # of its generation, whose era is the snapshot's
    number: int
    cap: Tier
    is_gone: bool


class SavedModel(Struct, frozen=True, array_like=True):
    """`state` is its phase, which says with `floor` and `goal` what was decided and learned."""

    shape: int  # its devices and engines
    state: ModelState = ModelState.COLD
    floor: Tier = Tier.COLD  # that it holds, or is falling to
    goal: Tier = Tier.COLD
    running: Running = Running.FINISH
    is_again: bool = False
    is_wanted: bool = False
    faults_ms: tuple[float, ...] = ()
    fault: str = ""
    is_permanent: bool = False
    reason: str = ""
    pinned: bool | None = None
    load_ordered_ms: float | None = None
    is_unload_ordered: bool = False
    leaving: Leaving | None = None
    load_ms: float | None = None
    wake_ms: float | None = None
    release_ms: float | None = None
    last_request_ms: float = 0.0
    sizes: Sizes | None = None
    is_estimated: bool = False
    booked: tuple[int | None, ...] = ()  # in the order of `KnownModel.keys`
    door: OpenDoor | None = None  # any other one is made anew
    door_number: int = 0
    engines: tuple[SavedEngine, ...] = ()
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
        name: SavedModel(
            each.shape,
            booked=(None,) * len(each.booked),
            engines=(gone,) * len(each.engines),
            **{kept: getattr(each, kept) for kept in KEPT_ANEW},
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
    costs, entries = known.costs, pool.books.ledger.entries
    found = SavedModel(
        shape_of(known),
        fault=known.fault[:TEXT_MAX],
        reason=known.reason[:TEXT_MAX],
        load_ms=_rounded(costs.load_ms),
        wake_ms=_rounded(costs.wake_ms),
        release_ms=_rounded(costs.release_ms),
        sizes=_saved_sizes(known),
        is_estimated=known.sizes is not None and known.sizes.is_estimated,
        booked=tuple(entries.get(key) for key in known.keys),
        door=known.door if isinstance(known.door, OpenDoor) else None,
        engines=tuple(_saved_engines(pool, known)),
        more_costs=tuple(_rounded(getattr(costs, name)) for name in MORE_COSTS),
        awake_since_ms=_rounded(known.awake_since_ms),
        drained_ms=_rounded(known.drained_ms),
        **{name: getattr(known, name) for name in SAVED_AS_IT_IS},
    )
    return replace(found, floor=known.held)


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
    engines = tuple(KnownEngine(engine, name) for engine in setup.engines)
    known = KnownModel(name, setup.rules, engines, setup.sizes)
    known.since_ms = known.stage_since_ms = known.last_request_ms = now_ms
    return known


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
    now_ms = pool.now_ms
    for key, size_bytes in zip(known.keys, saved.booked, strict=True):
        if size_bytes is not None:
            pool.books.ledger.settle(key, size_bytes)
    for name in (*SAVED_AS_IT_IS, "fault", "reason"):
        setattr(known, name, getattr(saved, name))
    known.faults_ms = tuple(ms for ms in saved.faults_ms if ms <= now_ms)
    known.last_request_ms = min(saved.last_request_ms, now_ms)
    known.since_ms = known.stage_since_ms = now_ms
    known.is_unknown = False
    _restore_goal(known, saved.goal)
    known.costs = Costs(saved.load_ms, saved.wake_ms, release_ms=saved.release_ms)
    for cost, spent_ms in zip(MORE_COSTS, saved.more_costs, strict=False):
        setattr(known.costs, cost, spent_ms)
    if saved.sizes is not None:
        known.sizes = sizes_on(known, saved.sizes, is_estimated=saved.is_estimated)
    if saved.door is not None:
        known.door, known.door_key = saved.door, door_key(known, saved.door)
    # A pool that is restarted again and again must not let one turn, or its drain, last for ever.
    known.drained_ms = _not_after(now_ms, saved.drained_ms)
    if known.state is ModelState.DRAINING and known.running is Running.FINISH:
        known.stage_since_ms = known.drained_ms or now_ms
    if known.state in (ModelState.AWAKE, ModelState.DRAINING):
        known.awake_since_ms = awake_ms = _not_after(now_ms, saved.awake_since_ms) or now_ms
        known.turn_since_ms = min(awake_ms + (known.costs.resume_ms or 0.0), now_ms)
    else:
        known.asleep_since_ms = now_ms


def _restore_goal(known: KnownModel, goal: Tier) -> None:
    """What leads to the phase that is on file."""
    match known.state:
        case ModelState.LOADING:
            known.goal, known.floor = goal, Tier.COLD
        case ModelState.WAKING:
            known.goal = Tier.AWAKE
        case ModelState.AWAKE:
            known.goal, known.is_serving = Tier.AWAKE, True
        case ModelState.DRAINING:
            known.goal, known.falls_to, known.is_serving = Tier.AWAKE, known.floor, True
        case ModelState.RELEASING | ModelState.UNLOADING:
            known.goal, known.frees = known.floor, known.state
        case _:
            known.goal, known.has_failed = known.floor, known.state is ModelState.FAILED


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
    if not known.is_recovering:
        return
    if known.is_unknown:
        if all(_is_settled(engine) for engine in known.engines):
            _adopt(pool, known)
    elif all(engine.is_gone or engine.said is not None for engine in known.engines):
        known.is_recovering = False
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
    known.is_unknown = known.is_recovering = False
    known.goal, known.floor = tier, lower(tier, Tier.WARM)
    known.is_serving = tier is Tier.AWAKE
    for key, size_bytes in pool.books.entries_at(known, known.goal).items():
        pool.books.ledger.settle(key, max(size_bytes, pool.books.ledger.entries.get(key, 0)))
    pool.settle(known, "found so at the start of the pool")
    pool.touch_all()
