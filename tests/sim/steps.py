"""Telling a simulated pod what to do, step by step, where a test is about one trace."""

from __future__ import annotations

from collections.abc import Callable

from tests.sim.gms_device import Move
from tests.sim.tp_world import World


def run_until(world: World, what: str, reached: Callable[[], object], *, only: str = "") -> None:
    """Take the first move there is (of those whose name has `only`) until `reached()`."""
    for _ in range(2000):
        if reached():
            return
        moves = [(name, move) for name, move in world.moves() if only in name]
        assert moves, f"{what}: nothing can happen any more"
        run_one(world, moves[0])
    raise AssertionError(f"{what}: did not happen; {world.trace[-20:]}")


def run_one(world: World, move: Move) -> None:
    """Take this move."""
    world.trace.append(move[0])
    move[1]()
    world.check()


def committed(world: World) -> list[str | None]:
    states = [device.machine for device in world.devices]
    return [state.committed.id if state.committed else None for state in states]
