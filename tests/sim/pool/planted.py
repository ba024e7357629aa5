"""The rules of the pool's design, each left out: the simulation must see every one missing.

One function per rule; it patches the real core, or the neighbour that keeps the rule. `caught` is a
regular expression for the law's message, which begins with the invariant's number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from engine.core.events import State
from plumbing.pod.messages import Tier
from pool.core import facts, inputs, reconcile, saved, who_wakes, who_yields
from pool.core.demand import Demand
from pool.core.events import EngineSaid, TicketKind
from pool.core.facts import Facts
from pool.core.ledger import PoolLedger
from pool.core.model import Model, ModelEngine
from pool.core.reconcile import ModelPool
from pool.core.states import EntryKey, EntryKind, ModelState
from tests.sim.pool import scenes
from tests.sim.pool.engine import Engine
from tests.sim.pool.gateway import Gateway, Lane

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Rule:
    """`leave_out` breaks it; then some schedule must fail with `caught`."""

    leave_out: Callable[[Patch], None]
    caught: str
    seed: int = 0  # of a schedule that shows it
    is_saturated: bool = False  # seen in the saturated world
    scene: Callable[[], None] | None = None  # that needs it

    @property
    def name(self) -> str:
        return self.leave_out.__name__


# -------------------------------------------------------------------------------------- P1, P2


def kv_leaves_on_rested(patch: Patch) -> None:
    """The holder rests: its KV memory is free, though the shadow has not acknowledged."""
    real = PoolLedger._may_be_free

    def may_be_free(self: PoolLedger, known: Model, key: EntryKey) -> bool:
        if key.kind is EntryKind.KV:
            return any(engine.is_without_kv for engine in known.engines)
        return real(self, known, key)

    patch.setattr(PoolLedger, "_may_be_free", may_be_free)


def weights_leave_at_unmap(patch: Patch) -> None:
    """Who has unmapped its weights has given them back."""
    real = PoolLedger._is_free

    def is_free(self: PoolLedger, known: Model, key: EntryKey) -> bool:
        return key.kind is EntryKind.WEIGHTS or real(self, known, key)

    patch.setattr(PoolLedger, "_is_free", is_free)


def a_death_is_an_answer(patch: Patch) -> None:
    """An engine whose processes are dead takes nothing, whatever goal its supervisor remembers."""
    real: Any = vars(ModelEngine)["is_without_kv"]

    def is_without_kv(self: ModelEngine) -> bool:
        said = self.said
        return (said is not None and not self.incarnation) or bool(real.fget(self))

    patch.setattr(ModelEngine, "is_without_kv", property(is_without_kv))


def an_old_picture_is_proof(patch: Patch) -> None:
    """What the memory service said before it was asked proves that memory is free."""

    def is_free(self: PoolLedger, known: Model, key: EntryKey) -> bool:
        return not self._bytes_held(key)

    patch.setattr(PoolLedger, "_is_free", is_free)
    patch.setattr(ModelEngine, "has_obeyed", property(lambda self: self.said is not None))


# -------------------------------------------------------------------------------------- P3 to P5


def requeued_twice(patch: Patch) -> None:
    """Requeued by the drain and by the engine's death."""

    def park(self: Gateway, lane: Lane) -> None:
        for request in list(lane.running.values()):
            if request.can_park:
                self.again(request, TicketKind.AGAIN)

    patch.setattr(Gateway, "park", park)


def awake_without_the_lock(patch: Patch) -> None:
    """A goal of awake is obeyed by whoever is ready."""
    patch.setattr(Engine, "may_wake", lambda self: self.state in (State.STANDBY, State.RESTING))


def the_engines_count_alone(patch: Patch) -> None:
    """Nothing is in flight, says the engine; nobody asks the gateway."""
    patch.setattr(Demand, "is_quiet", lambda self, model, door: True)


# -------------------------------------------------------------------------------------- P6 to P9


def protection_from_the_first_request(patch: Patch) -> None:
    """Protection counts from when somebody wanted the model, not from when it is awake."""
    real: Any = vars(Model)["turn_from_ms"]

    def turn_from_ms(self: Model) -> float | None:
        turn_ms, since_ms = real.fget(self), self.wanted_since_ms
        return turn_ms if turn_ms is None or since_ms is None else min(turn_ms, since_ms)

    patch.setattr(Model, "turn_from_ms", property(turn_from_ms))


def pinned_yields(patch: Patch) -> None:
    """A pinned model is a victim like any other."""
    patch.setattr(Model, "is_pinned", property(lambda self: self.is_lease and self.pinned))


def yield_only_when_idle(patch: Patch) -> None:
    """Who has work is no victim, however long that takes."""
    real = who_yields._ready

    def ready(head: Any, model: Any, now_ms: float, rules: Any) -> Any:
        if model.in_flight:
            return float("inf"), who_yields.Obstacle.PROTECTED
        return real(head, model, now_ms, rules)

    patch.setattr(who_yields, "_ready", ready)


def requeued_at_old_age(patch: Patch) -> None:
    """What a turn has not served keeps its age between models."""
    real = facts.first_ticket

    def first_ticket(tickets: Any, drained_ms: Any, now_ms: float, rules: Any) -> Any:
        old = [t if t.kind is TicketKind.NEW else replace(t, since_ms=0.0) for t in tickets]
        return real(old, None, now_ms, rules)

    patch.setattr(facts, "first_ticket", first_ticket)


def no_protection(patch: Patch) -> None:
    """Strict first come, first served: an older ticket takes the device at once."""
    patch.setattr(who_yields, "protection_ms", lambda model, rules: 0.0)
    real = who_yields._ready

    def ready(head: Any, model: Any, now_ms: float, rules: Any) -> Any:
        young = replace(head.model.rules, max_wait_ms=0.0)
        head.model.rules, before = young, head.model.rules
        try:
            return real(head, model, now_ms, rules)
        finally:
            head.model.rules = before

    patch.setattr(who_yields, "_ready", ready)


def plan_kept_for_a_gone_head(patch: Patch) -> None:
    """Who has once had a ticket is made room for, though its client has left."""
    real = Facts.derive

    def derive(self: Facts, model: Model) -> None:
        real(self, model)
        kept = vars(self.demand).setdefault("kept", {})
        if model.state is ModelState.AWAKE or model.is_blind:
            kept.pop(model.name, None)
        elif model.ticket is not None:
            kept[model.name] = model.ticket
        model.ticket = model.ticket or kept.get(model.name)

    patch.setattr(Facts, "derive", derive)


# -------------------------------------------------------------------------------------- P10 to P13


def a_raise_per_request(patch: Patch) -> None:
    """Whoever asks for a model that is on its way raises it again."""
    real = ModelPool._planned

    def planned(self: ModelPool) -> Any:
        for model in self.facts.models.values():
            tickets = len(self.facts.demand.tickets(model.name))
            if model.state is ModelState.LOADING and tickets > 1 and model.door_number % 2:
                self.facts.tell(model.main(), Tier.AWAKE)
                model.door_number += 1
        return real(self)

    patch.setattr(ModelPool, "_planned", planned)


def the_shadow_asks_the_pool(patch: Patch) -> None:
    """Who is granted the lock wakes once the pool has said that there is KV memory."""
    patch.setattr(
        Engine,
        "may_wake",
        lambda self: self.state is State.RESTING and self.is_linked,
    )


def a_shadow_is_told_warm(patch: Patch) -> None:
    """A shadow's goal is the tier that it reaches."""
    real = Model.goal_of

    def goal_of(self: Model, engine: ModelEngine) -> Tier:
        goal = real(self, engine)
        is_shadow = engine is not self.main() and goal is Tier.AWAKE
        return Tier.WARM if is_shadow else goal

    patch.setattr(Model, "goal_of", goal_of)


def floors_are_not_to_be_taken(patch: Patch) -> None:
    """A model that waits keeps what it holds: two that hold weights wait for each other's."""
    real = who_yields._candidate

    def candidate(head: Any, names: Any, model: Any, *args: Any) -> Any:
        is_floor = model.state is ModelState.PENDING
        return None if is_floor else real(head, names, model, *args)

    patch.setattr(who_yields, "_candidate", candidate)


def recovery_by_deadline(patch: Patch) -> None:
    """A restarted pool takes what it has not heard of for gone."""
    real = saved.recover

    def recover(pool: Facts, known: Model) -> None:
        if not known.is_unknown:
            known.is_recovering = False
        real(pool, known)

    patch.setattr(reconcile, "recover", recover)


def saved_behind_what_is_told(patch: Patch) -> None:
    """The file is written after its effects."""
    real = ModelPool.handle

    def handle(self: ModelPool, event: Any, now_ms: float) -> Any:
        effects = real(self, event, now_ms)
        return [*effects[1:], *effects[:1]]

    patch.setattr(ModelPool, "handle", handle)


# -------------------------------------------------------------------------------------- P14 to P17


def starts_are_not_counted(patch: Patch) -> None:
    """The counter of goals begins anew with every pool, and nothing tells them apart."""
    real = saved._restore

    def restore(pool: Facts, snapshot: Any) -> None:
        real(pool, snapshot)
        pool.start = snapshot.start

    patch.setattr(saved, "_restore", restore)


def parked_streams_are_no_ticket(patch: Patch) -> None:
    """Nobody waits for a model that has only parked streams."""
    real = Demand.tickets
    patch.setattr(
        Demand,
        "tickets",
        lambda self, model: [t for t in real(self, model) if t.kind is not TicketKind.PARKED],
    )


def first_fit(patch: Patch) -> None:
    """Whoever fits is raised, into room that a head waits for as well."""
    real = who_wakes._Planner._raises
    patch.setattr(
        who_wakes._Planner, "_raises", lambda self, claim, room: real(self, claim, self.free)
    )


def applied_in_part_then_refused(patch: Patch) -> None:
    """A wrong word of an engine is taken in before it is judged."""
    real = inputs._engine

    def engine(pool: Facts, said: EngineSaid) -> None:
        known = pool.engines.get(said.engine)
        if known is not None:
            known.said = said
        real(pool, said)

    patch.setattr(inputs, "_engine", engine)


def a_fault_of_the_machine_counts(patch: Patch) -> None:
    """A death is the model's fault, whoever says what."""
    real = inputs._engine

    def engine(pool: Facts, said: EngineSaid) -> None:
        real(pool, replace(said, is_machine=False))

    patch.setattr(inputs, "_engine", engine)


RULES = [
    Rule(kv_leaves_on_rested, "P1:|P2:", 1074),
    Rule(weights_leave_at_unmap, "P1:|P2:", 700),
    Rule(a_death_is_an_answer, "P1:|P2:", 3645),
    Rule(an_old_picture_is_proof, "P1:|P2:", 693),
    Rule(requeued_twice, "P3|two tickets|ends twice|waits and runs", 100),
    Rule(awake_without_the_lock, "P4:|awake without the lock"),
    Rule(the_engines_count_alone, "P5:", 100),
    Rule(protection_from_the_first_request, "P6:", 21),
    Rule(pinned_yields, "P6: pinned", 800),
    Rule(yield_only_when_idle, "P7:|P11:", 2733),
    Rule(requeued_at_old_age, "P7:|P15:", 1, is_saturated=True),
    Rule(no_protection, "P8:", is_saturated=True),
    Rule(plan_kept_for_a_gone_head, "P9:", scene=scenes.a_client_leaves_while_its_model_waits),
    Rule(a_raise_per_request, "P10:"),
    Rule(
        floors_are_not_to_be_taken,
        "P11:",
        scene=scenes.two_models_hold_weights_and_wait_for_each_other,
    ),
    Rule(the_shadow_asks_the_pool, "P12:", 138),
    Rule(a_shadow_is_told_warm, "P12:"),
    Rule(recovery_by_deadline, "P13:", scene=scenes.the_pool_dies_while_a_model_rests),
    Rule(saved_behind_what_is_told, "P14:", 140),
    Rule(starts_are_not_counted, "P14:", 140),
    Rule(parked_streams_are_no_ticket, "P11:|P15:|P7:", 532),
    Rule(applied_in_part_then_refused, "P16:", 861),
    Rule(first_fit, "P17: .* and shadows", 2313),
    Rule(first_fit, "P17:", scene=scenes.a_small_model_comes_while_another_makes_room),
    Rule(
        a_fault_of_the_machine_counts,
        "the machine's fault",
        scene=scenes.the_disk_is_full_while_a_model_loads,
    ),
]
