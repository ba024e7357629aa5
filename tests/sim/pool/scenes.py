"""Scenes for rules that random schedules seldom need: one situation each, in which it counts.

One device of 24, of which 1 is kept free; nothing is late, and nobody fails but by the scene.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pool.core.states import EngineSizes, ModelRules, ModelState
from tests.sim.pool.faults import kill_pool, lose_file
from tests.sim.pool.gateway import Kind, Request
from tests.sim.pool.lease import Lease
from tests.sim.pool.runs import settle
from tests.sim.pool.world import Shape, World

STEPS_MAX = 3_000
SHORT_MS = 10.0
LONG_MS = 100_000.0  # of a stream: longer than any scene
Parts = tuple[int, int, int]  # base, weights, KV


class SceneWorld(World):
    """Models m0, m1, … of these sizes, each with one engine. `estimates`: what the pool is told."""

    def __init__(self, *sizes: Parts, estimates: tuple[Parts, ...] = ()) -> None:
        self.parts, self.believed = sizes, estimates or sizes
        self.spans: dict[str, float] = {}
        shape = Shape(random.Random(1), models=len(sizes), is_calm=True)
        shape.devices = shape.gateways = 1
        shape.has_host = shape.has_outside = shape.has_unparkable = False
        shape.has_wrong_sizes = bool(estimates)
        shape.lateness, shape.faults = 0.0, 0
        super().__init__(0, shape)

    def lay_out(self) -> None:
        super().lay_out()
        names = list(self.rules)
        self.sizes = dict(zip(names, map(on_gpu, self.parts), strict=True))
        self.estimates = dict(zip(names, map(on_gpu, self.believed), strict=True))
        self.rules = dict.fromkeys(names, ModelRules(devices=("gpu0",)))
        self.roles = {f"{name}.a": name for name in names}

    def span(self, step: str) -> float:
        return self.spans.get(step, 10.0)

    def ask(self, model: str, needs_ms: float = 100.0) -> Request:
        self.numbers += 1
        gateway = self.gateways[0]
        request = Request(gateway, self.numbers, model, Kind.STREAM, needs_ms, 0)
        gateway.arrive(request)
        return request

    def pass_time(self, ms: float) -> None:
        """Everything that happens until then."""
        timeline = self.timeline
        timeline.after(ms, timeline.latency)
        end_ms = timeline.now_ms + ms
        for _ in range(STEPS_MAX):
            if timeline.now_ms >= end_ms:
                return
            self.step()
        raise AssertionError("P11: too much happens")


def on_gpu(parts: Parts) -> EngineSizes:
    base, weights, kv = ({"gpu0": size} for size in parts)
    return EngineSizes(base=base, weights=weights, kv=kv)


def a_client_leaves_while_its_model_waits() -> None:
    """m0 has work, and would be asked after `max_wait`."""
    world = SceneWorld((1, 2, 12), (1, 2, 12))
    world.ask("m0", LONG_MS)
    world.pass_time(20_000)
    request = world.ask("m1")
    world.pass_time(2_000)
    request.gateway.expire(request, "cancelled")
    world.pass_time(10_000)


def two_models_hold_weights_and_wait_for_each_other() -> None:
    """Both turn out larger than they were believed to be, when they have loaded."""
    world = SceneWorld((1, 8, 6), (1, 8, 6), estimates=((1, 6, 2), (1, 6, 2)))
    world.ask("m0")
    world.ask("m1")
    settle(world)


def an_engine_dies_unheard_while_it_drains() -> None:
    """m0 drains for m1. The gateway does not hear it, and m0's next incarnation serves behind the
    open door before the pool hears of the death. It has no request any more when it does."""
    world = SceneWorld((1, 2, 12), (1, 2, 12))
    world.ask("m0", 28_000.0)
    world.pass_time(20_000)
    world.ask("m1")
    world.pass_time(4_000)
    world.spans["link"] = 5_000.0
    world.pool.unlink_gateway(world.gateways[0])
    world.pass_time(500)
    world.spans["link"] = 2_000.0
    world.pool.unlink(world.engines["m0.a"])
    world.pass_time(1_000)
    world.engines["m0.a"].die()
    world.pass_time(3_000)


def the_pool_dies_while_a_model_rests() -> None:
    """m1 needs what m0 has, whose engine cannot be heard when the pool is back."""
    world = SceneWorld((1, 9, 8), (1, 9, 8), (1, 1, 8))
    world.ask("m0")
    world.pass_time(20_000)
    world.ask("m2")
    world.pass_time(20_000)
    kill_pool(world)
    world.engines["m0.a"].is_losing = True  # it does not connect
    world.pass_time(1_000)
    world.ask("m1")
    world.pass_time(20_000)


def a_small_model_comes_while_another_makes_room() -> None:
    """m0 drains for m1; m2 would fit at once, and not beside m1."""
    world = SceneWorld((1, 2, 10), (1, 2, 15), (1, 1, 3))
    world.ask("m0", LONG_MS)
    world.pass_time(20_000)
    world.ask("m1")
    world.pass_time(6_000)
    world.ask("m2")
    world.pass_time(1_500)


def the_disk_is_full_while_a_model_loads() -> None:
    """m1 is tried again each second, for longer than three faults would take; m0 serves meanwhile,
    and m1 once there is room on the disk."""
    world = SceneWorld((1, 2, 12), (1, 2, 12))
    world.spans["relaunch"] = 1_000.0
    world.ask("m0")
    world.pass_time(20_000)
    world.has_full_disk = True
    world.ask("m1", SHORT_MS)
    world.pass_time(100_000)
    assert world.pool.core is not None
    model = world.pool.core.facts.models["m1"]
    assert model.state is not ModelState.FAILED, "no model fails by the machine's fault"
    assert not model.faults_ms, "a fault of the machine is a model's"
    served = world.ask("m0", SHORT_MS)
    world.pass_time(30_000)
    assert served.outcome == "answered", "m0 is not served while m1 waits for a disk"
    world.has_full_disk = False
    settle(world)


def the_file_is_lost_while_a_lease_is_granted() -> None:
    """m0 does not fit beside it."""
    world = SceneWorld((1, 9, 8))
    lease = world.leases["l"] = Lease(world, "l", "gpu0", 10)
    lease.ask_again()
    world.pass_time(1_000)
    assert lease.is_granted
    lose_file(world)
    world.pass_time(1_000)
    world.ask("m0")
    world.pass_time(10_000)


SCENES: tuple[Callable[[], None], ...] = (
    a_client_leaves_while_its_model_waits,
    two_models_hold_weights_and_wait_for_each_other,
    an_engine_dies_unheard_while_it_drains,
    the_pool_dies_while_a_model_rests,
    a_small_model_comes_while_another_makes_room,
    the_disk_is_full_while_a_model_loads,
    the_file_is_lost_while_a_lease_is_granted,
)
