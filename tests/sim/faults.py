"""What may befall a simulated pod: one list of things that could go wrong now, by Hazard."""

from __future__ import annotations

from enum import Flag, auto
from typing import TYPE_CHECKING

from gms.core import events as ev
from tests.sim.gms_device import Move

if TYPE_CHECKING:
    from tests.sim.gms_device import SimDevice
    from tests.sim.tp_engine import Engine
    from tests.sim.tp_world import World

VERSIONS_MAX = 4  # of the checkpoint; more changes show nothing that three do not
A_LONG_TIME_MS = 60_000


class Hazard(Flag):
    """What may befall a pod."""

    DEATHS = auto()  # of ranks, trees, containers; stops
    DRIVER = auto()  # calls and journal writes fail
    SERVER = auto()  # servers of devices crash
    SESSIONS = auto()  # connections to a server that lives are cut
    CHECKPOINT = auto()  # the checkpoint on disk changes, and an operator drops what is of another
    BAD_PAGE = auto()  # a committed copy goes bad
    JOURNAL = auto()  # the journal of a server that is down is lost


def of(world: World) -> list[Move]:
    """Everything that may go wrong next."""
    found: list[Move] = [("a long time", lambda: world.pass_time(A_LONG_TIME_MS))]
    if Hazard.DEATHS in world.hazards:
        for engine in world.engines:
            if engine.supervisor is not None:
                found += _deaths(world, engine)
    up = [device for device in world.devices if device.is_up]
    if Hazard.DRIVER in world.hazards:
        found += 4 * [(f"{d.name} driver fails", d.fail_one) for d in up if d.driver]
    if Hazard.SERVER in world.hazards:
        for device in up:
            found += _crashes(world, device)
        found.append(("CRASH all", lambda: [world.crash(device) for device in up] and None))
    if Hazard.SESSIONS in world.hazards:
        ranks = [p for p in world.processes if p.session is not None]
        found += [(f"CUT session of {p.name}", lambda p=p: world.cut_session(p)) for p in ranks]
    if Hazard.JOURNAL in world.hazards:
        down = [device for device in world.devices if not device.is_up]
        found += 5 * [(f"LOSE journal of {d.name}", lambda d=d: _lose_journal(d)) for d in down]
    if Hazard.CHECKPOINT in world.hazards and world.version < VERSIONS_MAX:
        found += 2 * [("CHECKPOINT changes", lambda: _change_checkpoint(world))]
    if Hazard.BAD_PAGE in world.hazards:
        for device in up:
            committed = device.machine.committed
            if committed is not None and not any(c.is_bad for c in world.copies(device)):
                found.append((f"BAD PAGE on {device.name}", lambda d=device: _spoil(d)))
    return found


def _deaths(world: World, engine: Engine) -> list[Move]:
    name = engine.name
    found: list[Move] = [
        (f"KILL container {name}", engine.kill_container),
        (f"STOP/CONT {name}", lambda: _stop(engine)),
    ]
    if engine.ranks and not engine.is_dying:
        rank = world.rng.choice(engine.ranks)
        found.append((f"KILL tree {name}", lambda: engine.fail("killed")))
        found.append((f"KILL rank {rank.name}", rank.kill))
    return found


def _crashes(world: World, device: SimDevice) -> list[Move]:
    found: list[Move] = [(f"CRASH {device.name}", lambda: world.crash(device))]
    if device.driver and isinstance(device.driver[0], ev.WriteJournal):
        how = device.crash_after_journal
        found += 8 * [(f"CRASH {device.name} after its journal", lambda: world.crash(device, how))]
    return found


def _stop(engine: Engine) -> None:
    engine.is_stopped = not engine.is_stopped


def _lose_journal(device: SimDevice) -> None:
    device.is_journal_lost = True


def _change_checkpoint(world: World) -> None:
    world.version += 1


def _spoil(device: SimDevice) -> None:
    committed = device.machine.committed
    device.vault[committed.id].is_bad = True
