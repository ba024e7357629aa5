"""What the pool must not forget, as one small value for its state file, and the start of a pool:
from that file, or from what its neighbours are.

Everything that a neighbour was told is in it, with what is booked for it. What neighbours have said
is not: they say it again. It is written before anything is told, so values are arrays, and what
belongs to a model's devices and engines stands in their order, without their names: 100 models with
two engines each on two devices are 100 KiB at most. A model whose devices or engines have changed
since is a new one.

With a file, every model goes on in the state that was saved: whatever a neighbour was told is in
there, and all that it may have taken is booked. A model is `recovering` until each of its engines
that may live has been heard. Until then it is neither raised nor asked to yield, however long that
lasts; a deadline would free memory on a guess.

Without a file, what lives is unknown. Nothing is told to the engines of a model before all of them
have been heard and none is on its way; then the model *is* what they are. Until then nothing is
raised on its devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from operator import attrgetter
from zlib import crc32

from msgspec import Struct

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.admission import door_key
from pool.core.events import LeaseAsked, OpenDoor, Running
from pool.core.facts import Facts, PoolSetup
from pool.core.ledger import PoolLedger
from pool.core.model import (
    SETTLED,
    KeptEngine,
    KeptModel,
    Model,
    ModelEngine,
    a_lease,
    grant,
    lower,
    phase_of,
)
from pool.core.states import FAULT_CHARS_MAX, EngineSizes, ModelState

_kept_of = attrgetter(*KeptModel.__struct_fields__)
_kept_of_engine = attrgetter(*KeptEngine.__struct_fields__)


class SavedModel(Struct, frozen=True, array_like=True):
    """`shape`: its devices and engines. `sizes`: base, weights and KV, each by device, and whether
    they are estimated. `booked`: in the order of `Model.keys`. `door`: any other one is made anew.
    """

    shape: int
    kept: KeptModel
    engines: tuple[KeptEngine, ...]
    booked: tuple[int | None, ...]
    sizes: tuple[tuple[tuple[int, ...], ...], bool] | None = None
    door: OpenDoor | None = None


class PoolSnapshot(Struct, frozen=True):
    """All of it."""

    era: str
    start: int
    number: int
    door_number: int
    models: Mapping[str, SavedModel]
    gateways: tuple[str, ...] = ()  # that may have requests


def saved(facts: Facts) -> PoolSnapshot:
    return PoolSnapshot(
        era=facts.era,
        start=facts.start,
        number=facts.number,
        door_number=facts.door_number,
        models={
            name: _saved_model(facts, model)
            for name, model in facts.models.items()
            if not model.is_unknown
        },
        gateways=facts.demand.gateways,
    )


def shape_of(model: Model) -> int:
    names = [*model.rules.devices, "", *(engine.name for engine in model.engines)]
    return crc32("\n".join(names).encode())


def _saved_model(facts: Facts, model: Model) -> SavedModel:
    kept = KeptModel(*_kept_of(model))
    kept.costs = copy(kept.costs)
    kept.fault, kept.reason = kept.fault[:FAULT_CHARS_MAX], kept.reason[:FAULT_CHARS_MAX]
    sizes, devices = model.sizes, model.rules.devices
    by_kind = () if sizes is None else (sizes.base, sizes.weights, sizes.kv)
    by_device = tuple(tuple(each.get(name, 0) for name in devices if each) for each in by_kind)
    return SavedModel(
        shape_of(model),
        kept,
        tuple(KeptEngine(*_kept_of_engine(engine)) for engine in model.engines),
        tuple(facts.ledger.entries.get(key) for key in model.keys),
        None if sizes is None else (by_device, sizes.is_estimated),
        model.door if isinstance(model.door, OpenDoor) else None,
    )


def begin(
    setup: PoolSetup,
    now_ms: float,
    era: str,
    snapshot: PoolSnapshot | None,
    granted: Iterable[LeaseAsked],
) -> Facts:
    """What is known before the first event; `granted`: what the leases' own files say."""
    ledger = PoolLedger(setup.rules.margin_bytes, setup.devices)
    facts = Facts(setup.rules, models={}, engines={}, ledger=ledger, era=era, now_ms=now_ms)
    for name, each in setup.models.items():
        engines = tuple(ModelEngine(name=engine, model=name) for engine in each.engines)
        model = Model(name=name, rules=each.rules, engines=engines, sizes=each.sizes)
        facts.models[name] = model
        facts.engines |= {engine.name: engine for engine in engines}
        model.since_ms = model.stage_since_ms = model.last_request_ms = now_ms
    for asked in granted:
        facts.leases[asked.lease] = lease = a_lease(asked)
        ledger.settle(lease.keys[0], asked.bytes)
        grant(lease)
    if snapshot is not None:
        _restore(facts, snapshot)
    return facts


def _restore(facts: Facts, snapshot: PoolSnapshot) -> None:
    facts.era, facts.start = snapshot.era, snapshot.start + 1
    facts.door_number = snapshot.door_number
    facts.demand.restore(snapshot.gateways)
    for name, model in facts.models.items():
        saved = snapshot.models.get(name)
        if saved is not None and saved.shape == shape_of(model):
            _restore_model(facts, model, saved)


def _restore_model(facts: Facts, model: Model, saved: SavedModel) -> None:
    now_ms = facts.now_ms
    for key, size_bytes in zip(model.keys, saved.booked, strict=True):
        if size_bytes is not None:
            facts.ledger.settle(key, size_bytes)
    for engine, told in zip(model.engines, saved.engines, strict=True):
        _take_over(engine, told)
    _take_over(model, saved.kept)
    model.costs, model.state = copy(saved.kept.costs), phase_of(model)
    if saved.sizes is not None:
        by_device, is_estimated = saved.sizes
        base, weights, kv = (
            dict(zip(model.rules.devices, each, strict=False)) for each in by_device
        )
        model.sizes = EngineSizes(base, weights, kv, is_estimated)
    if saved.door is not None:
        model.door, model.door_key = saved.door, door_key(model, saved.door)
    model.is_unknown = False
    # A pool that is restarted again and again must not let one turn, or its drain, last for ever.
    # The clock begins anew with the machine.
    model.faults_ms = tuple(ms for ms in model.faults_ms if ms <= now_ms)
    model.last_request_ms = min(model.last_request_ms, now_ms)
    model.drained_ms = None if model.drained_ms is None else min(model.drained_ms, now_ms)
    if model.state is ModelState.DRAINING and model.running is Running.FINISH:
        model.stage_since_ms = model.drained_ms or now_ms
    if model.state in (ModelState.AWAKE, ModelState.DRAINING):
        model.awake_since_ms = awake_ms = min(model.awake_since_ms or now_ms, now_ms)
        model.turn_since_ms = min(awake_ms + (model.costs.resume_ms or 0.0), now_ms)
    else:
        model.awake_since_ms, model.asleep_since_ms = None, now_ms


def _take_over(to: Struct, kept: Struct) -> None:
    for name in kept.__struct_fields__:
        setattr(to, name, getattr(kept, name))


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
    """The model is what its living engines are. One that is dead, as it may be for a second between
    two launches, has its memory booked as it had before, and starts again. Until all obey a goal of
    this pool, one may still obey what a pool whose file is lost has told it: to be awake."""
    words = [engine.said for engine in model.engines if engine.said is not None]
    living = [engine.said for engine in model.living() if engine.said is not None]
    tier = max((said.tier for said in living), key=list(Tier).index, default=Tier.COLD)
    most = Tier.AWAKE if any(said.generation for said in words) else tier
    model.is_unknown = model.is_recovering = False
    model.goal, model.floor = tier, lower(tier, Tier.WARM)
    model.is_serving = tier is Tier.AWAKE
    for key, size_bytes in facts.ledger.entries_at(model, most).items():
        facts.ledger.settle(key, max(size_bytes, facts.ledger.entries.get(key, 0)))
    facts.settle(model, "found so at the start of the pool")
    facts.touch_all()
