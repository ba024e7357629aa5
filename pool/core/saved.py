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

from collections.abc import Mapping
from typing import Any
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.admission import door_key
from pool.core.events import LeaseAsked, OpenDoor, Running
from pool.core.facts import Facts, PoolSetup
from pool.core.ledger import PoolLedger
from pool.core.model import SETTLED, Leaving, Model, ModelEngine, a_lease, grant, lower
from pool.core.states import EngineSizes, GoalGeneration, ModelState

TEXT_MAX = 100  # characters of a reason or a fault on file

COSTS = ("load_ms", "wake_ms", "release_ms")
MORE_COSTS = ("restage_ms", "resume_ms", "turn_ms", "drain_ms")

Sizes = tuple[tuple[int, ...], ...]  # base, weights and KV, each by device


# Of a model: what is on file just as it is in memory, and what a new pod keeps of an old one.
SAVED_AS_IT_IS = (
    *("state", "floor", "goal", "running", "is_again", "is_wanted", "faults_ms", "is_permanent"),
    *("pinned", "load_ordered_ms", "is_unload_ordered", "leaving", "last_request_ms"),
    "door_number",
)
SAVED_TIMES = ("awake_since_ms", "drained_ms")
KEPT_ANEW = (
    *("pinned", *COSTS, "more_costs", "sizes", "is_estimated", "last_request_ms", "door_number"),
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
    booked: tuple[int | None, ...] = ()  # in the order of `Model.keys`
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


def saved(facts: Facts) -> PoolSnapshot:
    return PoolSnapshot(
        era=facts.era,
        start=facts.start,
        number=facts.number,
        door_number=facts.door_number,
        question=facts.ledger.number,
        models={
            name: _saved_model(facts, model)
            for name, model in facts.models.items()
            if not model.is_unknown
        },
        leases=tuple(
            lease.lease
            for lease in facts.leases.values()
            if lease.lease is not None and lease.goal is Tier.AWAKE
        ),
        gateways=facts.demand.gateways,
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


def shape_of(model: Model) -> int:
    names = [*model.rules.devices, "", *(engine.name for engine in model.engines)]
    return crc32("\n".join(names).encode())


def _saved_model(facts: Facts, model: Model) -> SavedModel:
    entries, sizes, devices = facts.ledger.entries, model.sizes, model.rules.devices
    kept: dict[str, Any] = {name: getattr(model, name) for name in SAVED_AS_IT_IS}
    kept |= {name: _rounded(getattr(model, name)) for name in SAVED_TIMES}
    kept |= {name: _rounded(getattr(model.costs, name)) for name in COSTS}
    if sizes is not None:
        kept["sizes"] = tuple(
            tuple(each.get(name, 0) for name in devices) if each else ()
            for each in (sizes.base, sizes.weights, sizes.kv)
        )
    return SavedModel(
        shape_of(model),
        **{**kept, "floor": model.held},
        more_costs=tuple(_rounded(getattr(model.costs, name)) for name in MORE_COSTS),
        fault=model.fault[:TEXT_MAX],
        reason=model.reason[:TEXT_MAX],
        is_estimated=sizes is not None and sizes.is_estimated,
        booked=tuple(entries.get(key) for key in model.keys),
        door=model.door if isinstance(model.door, OpenDoor) else None,
        engines=tuple(_saved_engine(facts, each) for each in model.engines),
    )


def _rounded(spent_ms: float | None) -> float | None:
    return None if spent_ms is None else round(spent_ms, 1)


def _saved_engine(facts: Facts, engine: ModelEngine) -> SavedEngine:
    told = engine.generation or GoalGeneration(facts.era, 0, 0)
    return SavedEngine(engine.goal, told.start, told.number, engine.cap, engine.is_gone)


def begin(setup: PoolSetup, now_ms: float, era: str, snapshot: PoolSnapshot | None) -> Facts:
    """What is known before the first event."""
    ledger = PoolLedger(setup.rules.margin_bytes, setup.devices)
    facts = Facts(setup.rules, models={}, engines={}, ledger=ledger, era=era, now_ms=now_ms)
    for name, each in setup.models.items():
        engines = tuple(ModelEngine(engine, name) for engine in each.engines)
        facts.models[name] = model = Model(name, each.rules, engines, each.sizes)
        facts.engines |= {engine.name: engine for engine in engines}
        model.since_ms = model.stage_since_ms = model.last_request_ms = now_ms
    if snapshot is not None:
        _restore(facts, snapshot)
    return facts


def _restore(facts: Facts, snapshot: PoolSnapshot) -> None:
    facts.era, facts.start = snapshot.era, snapshot.start + 1
    facts.door_number, facts.ledger.number = snapshot.door_number, snapshot.question
    facts.demand.restore(snapshot.gateways)
    for asked in snapshot.leases:
        facts.leases[asked.lease] = lease = a_lease(asked)
        facts.ledger.settle(lease.keys[0], asked.bytes)
        grant(lease)
    for name, model in facts.models.items():
        saved = snapshot.models.get(name)
        if saved is not None and saved.shape == shape_of(model):
            _restore_model(facts, model, saved)


def _restore_model(facts: Facts, model: Model, saved: SavedModel) -> None:
    now_ms, devices = facts.now_ms, model.rules.devices
    for key, size_bytes in zip(model.keys, saved.booked, strict=True):
        if size_bytes is not None:
            facts.ledger.settle(key, size_bytes)
    for engine, told in zip(model.engines, saved.engines, strict=True):
        engine.goal, engine.cap, engine.is_gone = told.goal, told.cap, told.is_gone
        if told.goal is not None:
            engine.generation = GoalGeneration(facts.era, told.start, told.number)
    for name in (*SAVED_AS_IT_IS, "fault", "reason"):
        setattr(model, name, getattr(saved, name))
    model.faults_ms = tuple(ms for ms in saved.faults_ms if ms <= now_ms)
    model.last_request_ms = min(saved.last_request_ms, now_ms)
    model.is_unknown = False
    _restore_goal(model, saved.goal)
    for cost in COSTS:
        setattr(model.costs, cost, getattr(saved, cost))
    for cost, spent_ms in zip(MORE_COSTS, saved.more_costs, strict=False):
        setattr(model.costs, cost, spent_ms)
    if saved.sizes is not None:
        base, weights, kv = (dict(zip(devices, each, strict=False)) for each in saved.sizes)
        model.sizes = EngineSizes(base, weights, kv, saved.is_estimated)
    if saved.door is not None:
        model.door, model.door_key = saved.door, door_key(model, saved.door)
    # A pool that is restarted again and again must not let one turn, or its drain, last for ever.
    # The clock begins anew with the machine.
    model.drained_ms = None if saved.drained_ms is None else min(saved.drained_ms, now_ms)
    if model.state is ModelState.DRAINING and model.running is Running.FINISH:
        model.stage_since_ms = model.drained_ms or now_ms
    if model.state in (ModelState.AWAKE, ModelState.DRAINING):
        model.awake_since_ms = awake_ms = min(saved.awake_since_ms or now_ms, now_ms)
        model.turn_since_ms = min(awake_ms + (model.costs.resume_ms or 0.0), now_ms)
    else:
        model.asleep_since_ms = now_ms


def _restore_goal(model: Model, goal: Tier) -> None:
    """What leads to the phase that is on file."""
    match model.state:
        case ModelState.LOADING:
            model.goal, model.floor = goal, Tier.COLD
        case ModelState.WAKING:
            model.goal = Tier.AWAKE
        case ModelState.AWAKE:
            model.goal, model.is_serving = Tier.AWAKE, True
        case ModelState.DRAINING:
            model.goal, model.falls_to, model.is_serving = Tier.AWAKE, model.floor, True
        case ModelState.RELEASING | ModelState.UNLOADING:
            model.goal, model.frees = model.floor, model.state
        case _:
            model.goal, model.has_failed = model.floor, model.state is ModelState.FAILED


def say_again(facts: Facts) -> None:
    """The goals that were told before this start, for the shell to tell on its new connections.
    Doors follow, each once: as it was, or as it is now."""
    for engine in facts.engines.values():
        if engine.goal is not None and engine.generation is not None:
            facts.say(ev.TellEngine(engine.name, engine.goal, engine.generation))


def recover(facts: Facts, model: Model) -> None:
    """End its recovery, if enough has been heard."""
    if not model.is_recovering:
        return
    if model.is_unknown:
        if all(_is_settled(engine) for engine in model.engines):
            _adopt(facts, model)
    elif all(engine.is_gone or engine.said is not None for engine in model.engines):
        model.is_recovering = False
        facts.touch(model.name)


def _is_settled(engine: ModelEngine) -> bool:
    """Heard, and not on its way: its own budgets end what it does."""
    said = engine.said
    return (
        said is not None
        and said.state in SETTLED
        and bool(said.incarnation) is (said.state != "dead")
    )


def _adopt(facts: Facts, model: Model) -> None:
    """The model is what its engines are."""
    living = [engine for engine in model.engines if engine.incarnation]
    for engine in model.engines:
        engine.cap = Tier.AWAKE if engine in living else Tier.COLD
    words = [engine.said for engine in living if engine.said is not None]
    tier = max((said.tier for said in words), key=list(Tier).index, default=Tier.COLD)
    model.is_unknown = model.is_recovering = False
    model.goal, model.floor = tier, lower(tier, Tier.WARM)
    model.is_serving = tier is Tier.AWAKE
    for key, size_bytes in facts.ledger.entries_at(model, model.goal).items():
        facts.ledger.settle(key, max(size_bytes, facts.ledger.entries.get(key, 0)))
    facts.settle(model, "found so at the start of the pool")
    facts.touch_all()
