"""What goes wrong in a world that is not calm."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from plumbing.pod.messages import Tier
from pool.core.events import DemandCame, EngineSaid, ModelDemand, Order, Ordered, PoolEvent
from pool.core.states import HOST
from tests.sim.pool.lease import Lease

if TYPE_CHECKING:
    from tests.sim.pool.engine import Engine
    from tests.sim.pool.world import World


def some_engine(world: World) -> Engine:
    engines = list(world.engines.values())
    return engines[int(world.rng.random() * len(engines))]


def kill_tree(world: World) -> None:
    some_engine(world).die()


def fail_step(world: World) -> None:
    engine = some_engine(world)
    if engine.tree is not None:
        engine.fail("engine.backend_failed", is_permanent=world.rng.random() < 0.1)


def kill_supervisor(world: World) -> None:
    some_engine(world).die_with_supervisor()


def cut_engine(world: World) -> None:
    world.pool.unlink(some_engine(world))


def cannot_resume(world: World) -> None:
    engine = some_engine(world)
    engine.can_resume = not engine.can_resume
    engine.say()


def cut_gateway(world: World) -> None:
    world.pool.unlink_gateway(world.gateways[0])


def kill_gateway(world: World) -> None:
    world.gateways[-1].die()


def kill_pool(world: World) -> None:
    world.pool.die()
    world.timeline.after(world.span("restart"), world.pool.start)


def lose_file(world: World) -> None:
    """A pool that begins anew: engines, memory service and leases' files say what there is."""
    world.pool.die()
    world.pool.file = None
    world.timeline.after(world.span("restart"), world.pool.start)


def kill_pool_midway(world: World) -> None:
    """Between two effects of one event."""
    world.pool.dies_before = int(world.rng.random() * 6)


def order(world: World) -> None:
    rng = world.rng
    models, orders = list(world.rules), list(Order)
    model = models[int(rng.random() * len(models))]
    what = orders[int(rng.random() * len(orders))]
    world.pool.send("witnesses", Ordered(model, what, is_forced=rng.random() < 0.2))


def lease(world: World) -> None:
    rng = world.rng
    devices = [name for name in world.devices if name != HOST]
    size, device = rng.randint(1, 20), devices[int(rng.random() * len(devices))]
    made = Lease(world, f"lease-{len(world.leases)}", device, size)
    world.leases[made.name] = made
    made.ask_again()
    world.timeline.after(rng.random() * 120_000, made.end)


def outside(world: World) -> None:
    """Somebody whom the pool does not know takes or gives memory, and a sample comes later."""
    rng = world.rng
    if not world.shape.has_outside:
        return
    device = world.devices["gpu0"]
    device.used_bytes -= device.outside_bytes
    device.parts.pop(("outside", ""), None)
    device.outside_bytes = min(rng.randint(0, 10), device.total_bytes - device.used_bytes)
    device.take(("outside", ""), device.outside_bytes)
    world.timeline.after(rng.random() * 3000, world.pool.memory_changed, "gpu0")


def lose_copy(world: World) -> None:
    for memory in world.memory.values():
        if memory.has_weights:
            memory.lose_copy()


def leave(world: World) -> None:
    """All clients that wait for one model leave."""
    models = list(world.rules)
    model = models[int(world.rng.random() * len(models))]
    for gateway in world.gateways:
        for request in list(gateway.lanes[model].tickets.values()):
            gateway.expire(request, "cancelled")


def lie(world: World) -> None:
    """Somebody says what cannot be; it costs its connection."""
    rng, pool = world.rng, world.pool
    if pool.core is None:
        return
    engine, gateway = some_engine(world), world.gateways[0]
    said = engine.am()
    lies: tuple[PoolEvent, ...] = (
        EngineSaid(replace(said, base_bytes={"gpu9": 1})),
        EngineSaid(replace(said, tier=Tier.AWAKE, token=0)),
        DemandCame(gateway.name, {engine.model: ModelDemand(), "nobody": ModelDemand()}),
    )
    pool.lie(lies[int(rng.random() * len(lies))])
    if rng.random() < 0.5:
        pool.unlink(engine)
    else:
        pool.unlink_gateway(gateway)


FAULTS: tuple[Callable[[World], None], ...] = (
    kill_tree,
    kill_tree,
    fail_step,
    kill_supervisor,
    cut_engine,
    cannot_resume,
    cut_gateway,
    kill_gateway,
    kill_pool,
    lose_file,
    kill_pool_midway,
    kill_pool_midway,
    order,
    lease,
    outside,
    lose_copy,
    leave,
    leave,
    lie,
)
