"""The start of a pool: from its state file, or from what its neighbours are.

With a file, every model goes on in the state that was saved: whatever a neighbour was told is in
there, and all that it may have taken is booked. A model is `recovering` until each of its engines
that may live has been heard. Until then it is neither raised nor asked to yield, however long that
lasts; a deadline would free memory on a guess.

Without a file nobody knows what lives. Nothing is told to the engines of a model before all of them
have been heard and none is on its way; then the model *is* what they are. Until then nothing is
raised on its devices.
"""

from __future__ import annotations

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.books import Books
from pool.core.doors import door_key
from pool.core.events import Running
from pool.core.known import SETTLED, Costs, KnownEngine, KnownModel
from pool.core.model import Model
from pool.core.model_table import ModelSignal
from pool.core.signals import DueSignal
from pool.core.situation import ModelSetup, PoolLease, PoolSetup, PoolSituation
from pool.core.snapshot import MORE_COSTS, PoolSnapshot, SavedEngine, SavedModel, shape_of, sizes_on
from pool.core.states import EntryKey, EntryKind, GoalGeneration, ModelState
from pool.core.view import Leaving


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
