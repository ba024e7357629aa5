"""What must always hold in a simulated pool (P1 to P17), as the world sees it.

The law keeps its own books of what the pool has heard and has told; it reads no field of the core
but its file. Each message of an assertion begins with the invariant's number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.core.events import State
from plumbing.pod.messages import Tier
from pool.core.events import (
    GrantLease,
    ModelChanged,
    OpenDoor,
    PoolEffect,
    RefusedDoor,
    SetModelDoor,
    TellEngine,
    TicketKind,
    binds_alike,
)
from pool.core.states import HOST, GoalGeneration, ModelState
from pool.core.who_yields import bound_ms as product_bound_ms
from tests.sim.pool.engine import RANK
from tests.sim.pool.law_books import Books
from tests.sim.pool.law_bound import bound_ms

if TYPE_CHECKING:
    from tests.sim.pool.engine import Engine
    from tests.sim.pool.gateway import Request

RAISED = (ModelState.LOADING, ModelState.WAKING)
AT_REST = (ModelState.OFFLOADED, ModelState.WARM, ModelState.PENDING)


class Law(Books):
    # ------------------------------------------------------------------ what the pool tells

    def told(self, effect: PoolEffect) -> None:
        match effect:
            case TellEngine():
                self.told_goal(effect)
            case SetModelDoor():
                self.told_door(effect)
            case ModelChanged():
                self.told_state(effect)
            case GrantLease():
                lease = self.asked.get(effect.lease) or self.leases.get(effect.lease)
                assert lease is not None, f"P16: a lease nobody asked for: {effect.lease}"
                if effect.lease not in self.leases:
                    self.leases[effect.lease] = lease
                    self.fits((lease.device,), f"lease {effect.lease} is granted", self.outside)

    def told_goal(self, effect: TellEngine) -> None:
        last, now = self.last.get(effect.engine), effect.generation
        if last is not None:
            assert not now.is_older(last.generation), (
                f"P14: {effect.engine} is told {number(now)} after {number(last.generation)}"
            )
            if now == last.generation:
                assert effect.goal is last.goal, f"P14: {number(now)} means two goals"
                return
            is_again = effect.goal is last.goal and not effect.kill
            is_again &= (last.generation.era, last.generation.start) == (now.era, now.start)
            assert not is_again, f"P10: {effect.engine} is told {effect.goal} again and again"
            if last.generation.era != now.era:
                self.crossed.add(effect.engine)
        self.last[effect.engine] = effect
        self.goals.setdefault(effect.engine, []).append(effect)
        engine = self.world.engines[effect.engine]
        before = RANK[last.goal] if last is not None else 0
        if RANK[effect.goal] > before:
            rules = self.world.rules[engine.model]
            heard = self.predecessor_heard if self.is_inherited(now) else self.outside
            self.fits(rules.devices, f"{effect.engine} is told {effect.goal}", heard)
        if effect.kill:  # what a spent cut had left running ends with it
            self.faulted.add(engine.model)
        elif effect.goal is not Tier.AWAKE and engine.state is State.ACTIVE:
            self.rests(engine)

    def knows_enough(self, model: str, old: ModelState, new: ModelState) -> None:
        """P13: a pool that has just started asks no model at rest to yield before it has heard each
        of its engines that lives, unless somebody orders it to."""
        is_asked = old in AT_REST and new in (ModelState.RELEASING, ModelState.UNLOADING)
        alive = [e.name for e in self.world.engines.values() if e.model == model and e.tree]
        if is_asked and model not in self.orders:
            missing = self.unheard & set(alive)
            assert not missing, f"P13: {model} is {new} before {missing} has been heard"

    def rests(self, engine: Engine) -> None:
        """P5: an engine that serves is told to rest, and rests, only when nobody can send it
        anything. Its own count it knows best. A pool whose file is lost may not know yet that an
        engine is about to serve, as it was told before."""
        if engine.name in self.crossed:
            return
        for gateway in self.world.gateways:
            lane = gateway.lanes[engine.model]
            is_shut = not lane.is_told or not isinstance(lane.door, OpenDoor)
            assert is_shut, f"P5: {engine.name} rests behind an open door"
            is_quiet = not lane.is_told or not lane.running
            assert is_quiet, f"P5: {engine.name} rests while a gateway counts requests"

    def told_door(self, effect: SetModelDoor) -> None:
        model, now = effect.model, self.world.timeline.now_ms
        is_new = effect.number > self.numbers.get(model, 0)
        assert effect.number >= self.numbers.get(model, 0), f"P14: the door of {model} goes back"
        assert is_new or binds_alike(effect.door, self.doors.get(model)), (
            f"P14: {model}: one number, two doors"
        )
        self.numbers[model], self.doors[model] = effect.number, effect.door
        if isinstance(effect.door, OpenDoor):
            self.opened_ms.setdefault(model, now)

    def yields(self, model: str, now: float) -> None:
        """Who serves is asked to yield: for whom, and may it be?"""
        if model in self.faulted or model in self.orders:
            return
        assert model not in self.pinned, f"P6: pinned {model} yields"
        rules = self.world.rules[model]
        demands = self.of(model)
        has_work = any(each.in_flight or each.tickets for each in demands)
        if has_work:
            age = now - self.opened_ms[model]
            assert age >= rules.min_runtime_ms - 1, f"P6: {model} yields after {age:.0f} ms of work"
        others = any(self.is_wanted(other) for other in self.world.rules if other != model)
        last = max((each.last_request_ms or 0.0 for each in demands), default=0.0)
        is_idle = not has_work and now - last >= rules.keep_alive_ms - 1
        waits = self.asked.keys() - self.leases.keys()
        assert others or is_idle or waits, f"P9: {model} yields to nobody"

    def told_state(self, effect: ModelChanged) -> None:
        model, old, new = effect.model, effect.old, effect.new
        self.states[model] = new
        self.seen.add((old, new))
        self.knows_enough(model, old, new)
        if new is ModelState.AWAKE:
            self.opened_ms[model] = self.world.timeline.now_ms
        if old is ModelState.AWAKE and new is ModelState.DRAINING:
            self.yields(model, self.world.timeline.now_ms)
        if old is ModelState.PENDING and new in RAISED:
            self.switches += 1
            is_asked = self.is_wanted(model) or model in self.faulted or model in self.orders
            assert is_asked, f"P9: {model} is raised for nobody"

    def fits(self, devices: tuple[str, ...], why: str, heard: Mapping[str, int]) -> None:
        """P1: what is used or may be, by the goals that engines have or may still obey, beside the
        memory outside that was `heard` of."""
        world = self.world
        for name in (*devices, HOST):
            device = world.devices.get(name)
            if device is None:
                continue
            parts = self.may_use(name)
            outside = heard.get(name, device.outside_bytes)
            margin = 0 if name == HOST else world.pool_rules.margin_bytes
            total = sum(parts.values()) + outside + margin
            assert total <= device.total_bytes, (
                f"P1: {why}, and {name} has {device.total_bytes}: {parts}, outside {outside}"
            )

    # ------------------------------------------------------------------ what really happens

    def short(self, device: str, what: str) -> None:
        """P2: somebody finds no room. A device that others use, or wrong estimates, excuse it."""
        if not self.world.is_excused(device):
            parts = self.world.devices[device].parts
            raise AssertionError(f"P2: no room on {device} for {what}: {parts}")

    def active(self, engine: Engine) -> None:
        others = [
            other.name
            for other in self.world.engines.values()
            if other is not engine and other.model == engine.model
            if other.state in (State.ACTIVE, State.RELEASING, State.WAKING)
        ]
        assert not others, f"P4: {engine.name} and {others} are awake"
        assert engine.lock.incarnation == engine.incarnation, f"P4: {engine.name} has no lock"
        for gateway in self.world.gateways:
            self.world.timeline.soon(gateway.accepting, engine.model)

    def sent(self, request: Request) -> None:
        lane = request.gateway.lanes[request.model]
        assert not lane.is_told or isinstance(lane.door, OpenDoor), "P5: sent past a shut door"
        if request.ticket is not TicketKind.PARKED:
            parked = [r for r in lane.tickets.values() if r.ticket is TicketKind.PARKED]
            assert not parked, f"P15: request {request.id} is sent before a parked stream"
        self.waited(request)

    def ended(self, request: Request) -> None:
        self.outcomes[request.outcome] = self.outcomes.get(request.outcome, 0) + 1
        if request.outcome == "refused":
            door = request.gateway.lanes[request.model].door
            assert isinstance(door, RefusedDoor), "P3: refused by nobody"
        if request.outcome in ("expired", "cancelled"):
            self.waited(request)

    def waited(self, request: Request) -> None:
        """P7, P15: where nothing fails, every wait is below the bound."""
        if not self.world.is_calm:
            return
        wait = self.world.timeline.now_ms - request.since_ms
        bound = bound_ms(self.world, request)
        name = "P15" if request.ticket is TicketKind.PARKED else "P7"
        assert wait <= bound, f"{name}: {request.model} waits {wait:.0f} ms, bound {bound:.0f}"
        core = self.world.pool.core
        models = core.facts.models.values() if core is not None else ()
        seen = [model for model in models if not model.is_unknown]
        if len(seen) == len(self.world.rules):  # what users are shown, once all is known
            rules = self.world.pool_rules
            shown = product_bound_ms(request.model, request.priority, seen, rules) or 0.0
            assert wait <= shown, f"{name}: {request.model} waits {wait:.0f} ms, shown {shown:.0f}"

    def granted(self, engine: Engine) -> None:
        """P12: who is granted the lock and shall be awake wakes, whoever is dead."""
        if engine.goal is Tier.AWAKE and not engine.is_busy:
            assert engine.state is not State.RESTING, f"P12: {engine.name} waits for the pool"

    def settled(self) -> None:
        """P12: whoever stands by for an open door would serve without asking."""
        for engine in self.world.engines.values():
            door, last = self.doors.get(engine.model), self.last.get(engine.name)
            if isinstance(door, OpenDoor) and engine.state is State.STANDBY and engine.is_linked:
                is_ready = last is not None and last.goal is Tier.AWAKE
                assert is_ready, f"P12: {engine.name} stands by, and would not serve"

    def check(self) -> None:
        """After every step of the pool."""
        for name, device in self.world.devices.items():
            assert device.used_bytes <= device.total_bytes, f"P2: {name} holds too much"


def number(generation: GoalGeneration) -> str:
    return f"{generation.era}/{generation.start}/{generation.number}"
