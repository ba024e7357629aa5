"""Our core: `pool.core.policy.plan` on views of the simulated world, obeyed as the pool does."""

from __future__ import annotations

from hack.policies.world import Phase, SimModel, World
from plumbing.part.tier import Tier
from pool.core.bound import WaitBound, bound
from pool.core.policy import plan
from pool.core.states import ModelState
from pool.core.view import (
    DeviceView,
    Leaving,
    ModelRules,
    ModelView,
    PoolRules,
    Raise,
    TicketView,
    Yield,
)

DEVICE = "0"
RULES = PoolRules(margin_bytes=0)
NEEDS = {Tier.COLD: {}, Tier.OFFLOADED: {}, Tier.WARM: {DEVICE: 0}, Tier.AWAKE: {DEVICE: 1}}
STATES = {
    Phase.RESTING: ModelState.WARM,
    Phase.WAKING: ModelState.WAKING,
    Phase.AWAKE: ModelState.AWAKE,
    Phase.DRAINING: ModelState.DRAINING,
    Phase.RELEASING: ModelState.RELEASING,
}


class OurRules:
    """The policy, and of the machine only what its decisions need: plans that stand, drains."""

    name = "understudy"
    source = "pool/core/policy.py of this tree"

    def __init__(self, rules: ModelRules | None = None) -> None:
        self.rules = rules or ModelRules(devices=(DEVICE,))
        self.planned: set[str] = set()

    def admits(self, world: World, model: SimModel) -> bool:
        return True

    def decide(self, world: World) -> float | None:
        due = [self._drain(world, model) for model in world.models.values()]
        views = [self.view(world, model) for model in world.models.values()]
        used = world.used()
        leaving = sum(
            model.phase in (Phase.DRAINING, Phase.RELEASING) for model in world.models.values()
        )
        devices = {DEVICE: DeviceView(DEVICE, world.slots, world.slots - used, leaving)}
        found = plan(world.now_ms, views, devices, RULES)
        due.append(found.due_ms)
        self.planned &= {name for name in self.planned if name in found.decisions}
        for name, decision in found.decisions.items():
            match decision:
                case Raise():
                    self.planned.discard(name)
                    world.wake(world.models[name])
                case Yield(victims):
                    self.planned.add(name)
                    for victim in victims:
                        world.drain(world.models[victim.model])
        for name in found.unyields:
            world.reopen(world.models[name])
        for victim in found.rests:
            world.drain(world.models[victim.model])
        return min((each for each in due if each is not None), default=None)

    def _drain(self, world: World, model: SimModel) -> float | None:
        if model.phase is not Phase.DRAINING:
            return None
        park_ms = model.since_ms + self.rules.park_ms
        if world.now_ms >= park_ms:
            world.park(model)
        cut_ms = None if self.rules.cut_ms is None else model.since_ms + self.rules.cut_ms
        if cut_ms is not None and world.now_ms >= cut_ms and model.phase is Phase.DRAINING:
            world.cut(model)
        if model.phase is not Phase.DRAINING:
            return None
        return park_ms if world.now_ms < park_ms else cut_ms

    def view(self, world: World, model: SimModel) -> ModelView:
        oldest = model.oldest()
        ticket = None
        if oldest is not None:
            since_ms = max(oldest.counts_ms, model.drained_ms or 0.0)
            ticket = TicketView(oldest.client.priority, since_ms, oldest in model.parked)
        is_up = model.phase is not Phase.RESTING
        is_down = model.phase in (Phase.DRAINING, Phase.RELEASING)
        return ModelView(
            model.name,
            self.rules,
            STATES[model.phase],
            Tier.AWAKE if model.phase is Phase.AWAKE else Tier.WARM,
            NEEDS,
            booked=NEEDS[Tier.AWAKE if is_up else Tier.WARM],
            ticket=ticket,
            awake_since_ms=model.since_ms if model.phase is Phase.AWAKE else None,
            last_request_ms=model.last_asked_ms,
            in_flight=len(model.running),
            cannot_park=sum(not each.client.can_park for each in model.running),
            is_raised_for_ticket=model.phase is Phase.WAKING,
            has_plan=model.name in self.planned,
            leaving=Leaving.HEAD if is_down else None,
            switch_ms=model.costs.wake_ms,
            load_ms=model.costs.wake_ms,
            release_ms=model.costs.release_ms,
        )

    def bound(self, world: World, *, can_park: bool) -> WaitBound:
        """Of a request of the worst-placed model; a raise takes in this world what it takes."""
        views = [self.view(world, model) for model in world.models.values()]
        if not can_park:
            views = [_without_parking(view) for view in views]
        bounds = [bound(view.name, 0, views, RULES) for view in views]
        return max(bounds, key=lambda each: each.total_ms)


def _without_parking(view: ModelView) -> ModelView:
    fields = {name: getattr(view, name) for name in view.__struct_fields__}
    return ModelView(**{**fields, "cannot_park": 1})
