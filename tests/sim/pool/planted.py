"""The rules of the pool's design, each left out: the simulation must see every one missing.

Each patches the real core, or the neighbour that keeps the rule. `caught` is a regular expression
for the law's message, which begins with the invariant's number; `SHOWN_BY` has the scene, or the
world, that shows a rule which random schedules seldom need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from engine.core.events import State
from plumbing.pod.messages import Tier
from pool.core import facts, reconcile, saved, who_wakes, who_yields
from pool.core.demand import Demand
from pool.core.events import TicketKind
from pool.core.facts import Facts
from pool.core.ledger import PoolLedger
from pool.core.model import Model, ModelEngine
from pool.core.reconcile import ModelPool
from pool.core.states import EntryKind, ModelState
from tests.sim.kit import Patch, PlantedRules
from tests.sim.pool import scenes
from tests.sim.pool.engine import Engine
from tests.sim.pool.gateway import Gateway
from tests.sim.pool.saturated import SaturatedWorld

RULES = PlantedRules()


def saturated(seed: int) -> Callable[[], None]:
    def run() -> None:
        share = SaturatedWorld(seed).run()
        assert share >= 0.5, f"P8: it serves {share:.0%} of the time"

    return run


SHOWN_BY: dict[str, Callable[[], None]] = {
    "what is left of a turn counts from its drain": saturated(0),
    "a turn is protected": saturated(1),
    "no plan for a gone head": scenes.a_client_leaves_while_its_model_waits,
    "floors may be taken": scenes.two_models_hold_weights_and_wait_for_each_other,
    "a drain outlives its engine": scenes.an_engine_dies_unheard_while_it_drains,
    "no deadline ends a recovery": scenes.the_pool_dies_while_a_model_rests,
    "backfill delays no head": scenes.a_small_model_comes_while_another_makes_room,
    "a fault of the machine is no model's": scenes.the_disk_is_full_while_a_model_loads,
    "a grant is in the lease's own file": scenes.the_file_is_lost_while_a_lease_is_granted,
}


def wrapped(patch: Patch, owner: Any, name: str, get: Callable[[Any, Any], Any]) -> None:
    """The property `name` of `owner` is what `get` makes of the object and the real value."""
    real: Any = vars(owner)[name]
    patch.setattr(owner, name, property(lambda self: get(self, real.fget(self))))


# -------------------------------------------------------------------------------------- P1, P2


@RULES.instead(
    "KV memory leaves once all have acknowledged", "P1:|P2:", PoolLedger, "_may_be_free", 84
)
def kv_leaves_on_rested(real: Any, self: Any, known: Model, key: Any) -> Any:
    """The holder rests, though the shadow has not acknowledged."""
    if key.kind is EntryKind.KV:
        return any(engine.is_without_kv for engine in known.engines)
    return real(self, known, key)


@RULES.instead("weights leave once the service frees them", "P1:|P2:", PoolLedger, "_is_free", 20)
def weights_leave_at_unmap(real: Any, self: Any, known: Model, key: Any) -> Any:
    return key.kind is EntryKind.WEIGHTS or real(self, known, key)


@RULES.rule("a death is no acknowledgement", "P1:|P2:", 2299)
def a_death_is_an_answer(patch: Patch) -> None:
    """An engine whose processes are dead takes nothing, whatever goal its supervisor remembers."""
    wrapped(
        patch,
        ModelEngine,
        "is_without_kv",
        lambda self, real: (self.said is not None and not self.incarnation) or real,
    )


@RULES.rule("only an answer is a proof", "P1:|P2:", 22)
def an_old_picture_is_proof(patch: Patch) -> None:
    """What the memory service said before it was asked proves that memory is free."""
    patch.setattr(PoolLedger, "_is_free", lambda self, known, key: not self._bytes_held(key))
    patch.setattr(ModelEngine, "has_obeyed", property(lambda self: self.said is not None))


# -------------------------------------------------------------------------------------- P3 to P5


@RULES.instead("requeued once", "P3|two tickets|ends twice|waits and runs", Gateway, "park", 30)
def requeued_twice(real: Any, self: Any, lane: Any) -> None:
    """By the drain and by the engine's death."""
    for request in list(lane.running.values()):
        if request.can_park:
            self.again(request, TicketKind.AGAIN)


@RULES.instead("who wakes holds the lock", "P4:|awake without the lock", Engine, "may_wake")
def awake_without_the_lock(real: Any, self: Engine) -> bool:
    return self.state in (State.STANDBY, State.RESTING)


@RULES.instead("the gateway counts, too", "P5:", Demand, "is_quiet", 24)
def the_engines_count_alone(real: Any, *asked: Any) -> bool:
    return True


@RULES.instead("a drain outlives its engine", "P5:", facts, "_died")
def a_death_ends_a_drain(real: Any, pool: Facts, known: Model, *of: Any) -> Any:
    """Its goal is lowered before every gateway obeys the shut door."""
    if known.state is ModelState.DRAINING:
        pool.fall(known, Tier.COLD, "its engine has died", ModelState.UNLOADING)
        return True
    return real(pool, known, *of)


# -------------------------------------------------------------------------------------- P6 to P9


@RULES.rule("protection counts from awake", "P6:", 21)
def protection_from_the_first_request(patch: Patch) -> None:
    def turn_from_ms(self: Model, turn_ms: float | None) -> float | None:
        since_ms = self.wanted_since_ms
        return turn_ms if turn_ms is None or since_ms is None else min(turn_ms, since_ms)

    wrapped(patch, Model, "turn_from_ms", turn_from_ms)


@RULES.rule("pinned is no victim", "P6: pinned", 800)
def pinned_yields(patch: Patch) -> None:
    wrapped(patch, Model, "is_pinned", lambda self, real: self.is_lease and self.pinned)


@RULES.instead("work is interrupted", "P7:|P11:", who_yields, "_ready", 30)
def yield_only_when_idle(real: Any, head: Any, model: Any, *asked: Any) -> Any:
    """Who has work is no victim, however long that takes."""
    if model.in_flight:
        return float("inf"), who_yields.Obstacle.PROTECTED
    return real(head, model, *asked)


@RULES.instead("what is left of a turn counts from its drain", "P7:|P15:", facts, "first_ticket")
def requeued_at_old_age(real: Any, tickets: Any, drained_ms: Any, *asked: Any) -> Any:
    old = [t if t.kind is TicketKind.NEW else replace(t, since_ms=0.0) for t in tickets]
    return real(old, None, *asked)


@RULES.rule("a turn is protected", "P8:")
def no_protection(patch: Patch) -> None:
    """Strict first come, first served: an older ticket takes the device at once."""
    real = who_yields._ready

    def ready(head: Any, *asked: Any) -> Any:
        head.model.rules, before = replace(head.model.rules, max_wait_ms=0.0), head.model.rules
        try:
            return real(head, *asked)
        finally:
            head.model.rules = before

    patch.setattr(who_yields, "protection_ms", lambda model, rules: 0.0)
    patch.setattr(who_yields, "_ready", ready)


@RULES.instead("no plan for a gone head", "P9:", Facts, "derive")
def plan_kept_for_a_gone_head(real: Any, self: Facts, model: Model) -> None:
    """Who has once had a ticket is made room for, though its client has left."""
    real(self, model)
    kept = vars(self.demand).setdefault("kept", {})
    if model.state is ModelState.AWAKE or model.is_blind:
        kept.pop(model.name, None)
    elif model.ticket is not None:
        kept[model.name] = model.ticket
    model.ticket = model.ticket or kept.get(model.name)


# -------------------------------------------------------------------------------------- P10 to P13


@RULES.instead("one raise for all requests", "P10:", ModelPool, "_planned", 10)
def a_raise_per_request(real: Any, self: ModelPool) -> Any:
    """Whoever asks for a model that is on its way raises it again."""
    for model in self.facts.models.values():
        tickets = len(self.facts.demand.tickets(model.name))
        if model.state is ModelState.LOADING and tickets > 1 and model.door_number % 2:
            self.facts.tell(model.main(), Tier.AWAKE)
            model.door_number += 1
    return real(self)


@RULES.instead("floors may be taken", "P11:", who_yields, "_candidate")
def floors_are_not_to_be_taken(real: Any, head: Any, names: Any, model: Any, *asked: Any) -> Any:
    """A model that waits keeps what it holds: two that hold weights wait for each other's."""
    return None if model.state is ModelState.PENDING else real(head, names, model, *asked)


@RULES.instead("a failover needs no pool", "P12:", Engine, "may_wake", 355)
def the_shadow_asks_the_pool(real: Any, self: Engine) -> bool:
    """Who is granted the lock wakes once the pool has said that there is KV memory."""
    return self.state is State.RESTING and self.is_linked


@RULES.instead("a shadow's goal is awake", "P12:", Facts, "aim")
def a_shadow_is_told_warm(real: Any, self: Facts, model: Model) -> None:
    for engine in () if model.is_unknown else model.engines:
        is_shadow = engine is not model.main() and model.goal is Tier.AWAKE
        goal = Tier.WARM if is_shadow else model.goal
        if goal is not engine.goal:
            self.tell(engine, goal)


@RULES.instead("no deadline ends a recovery", "P13:", reconcile, "recover")
def recovery_by_deadline(real: Any, pool: Facts, known: Model) -> None:
    """A restarted pool takes what it has not heard of for gone."""
    known.is_recovering &= known.is_unknown
    real(pool, known)


@RULES.instead("on file before it is told", "P14:", ModelPool, "handle", 80)
def saved_behind_what_is_told(real: Any, *asked: Any) -> Any:
    effects = real(*asked)
    return [*effects[1:], *effects[:1]]


# -------------------------------------------------------------------------------------- P14 to P17


@RULES.instead("starts are counted", "P14:", saved, "_restore", 20)
def starts_are_not_counted(real: Any, pool: Facts, snapshot: Any) -> None:
    """The counter of goals begins anew with every pool, and nothing tells them apart."""
    real(pool, snapshot)
    pool.start = snapshot.start


@RULES.instead("a grant is in the lease's own file", "P1:", saved, "begin")
def leases_are_forgotten_with_the_file(
    real: Any, setup: Any, now_ms: float, era: str, snapshot: Any, granted: Any
) -> Facts:
    return real(setup, now_ms, era, snapshot, granted if snapshot is not None else ())


@RULES.instead("parked streams are tickets", "P11:|P15:|P7:", Demand, "tickets", 36)
def parked_streams_are_no_ticket(real: Any, *asked: Any) -> Any:
    return [ticket for ticket in real(*asked) if ticket.kind is not TicketKind.PARKED]


@RULES.instead("a wrong message is judged first", "P16:", reconcile, "_engine", 327)
def applied_in_part_then_refused(real: Any, pool: Facts, said: Any) -> None:
    known = pool.engines.get(said.engine)
    if known is not None:
        known.said = said
    real(pool, said)


@RULES.instead("backfill delays no head", "P17:", who_wakes._Planner, "_raises")
def first_fit(real: Any, self: Any, claim: Any, room: Any) -> Any:
    """Whoever fits is raised, into room that a head waits for as well."""
    return real(self, claim, self.free)


@RULES.instead("a fault of the machine is no model's", "the machine's fault", reconcile, "_engine")
def a_fault_of_the_machine_counts(real: Any, pool: Facts, said: Any) -> None:
    real(pool, replace(said, is_machine=False))
