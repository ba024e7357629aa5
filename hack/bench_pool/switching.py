"""S1 and S2: models that are asked in turn, each of which needs the room of another one.

A switch is timed by the client, from its request to the first token. What a first token takes when
nothing is switched is measured beside it: the same model is asked again at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hack.bench_pool.pods import BenchedPool
from hack.bench_pool.programs import Figures, Program, first_ms
from hack.report import spread
from understudy.drill.clients import clock
from understudy.drill.records import Exchange

IDLE_KEPT = "100ms"
STARTS_ONLY_S = 600.0  # a program that restarts takes its time


async def in_turn(
    program: Program, models: Sequence[str], switches: int, pause_s: float
) -> Figures:
    """Ask `models` one after the other, until there were so many switches."""
    took, direct, exchanges = list[float](), list[float](), list[Exchange]()
    await asyncio.sleep(pause_s)  # else others at rest are unloaded for the first one
    await program.ask(program.short[models[-1]])  # where the first one switches from
    for number in range(switches):
        prompt = program.short[models[number % len(models)]]
        await asyncio.sleep(pause_s)
        for into in (took, direct):
            exchange = await program.ask(prompt, STARTS_ONLY_S)
            exchanges.append(exchange)
            into += [found for found in (first_ms(exchange),) if found is not None]
    return {"switches": len(took), **times(took, direct), **program.counts(exchanges)}


def times(took: Sequence[float], direct: Sequence[float]) -> Figures:
    """`less_direct_ms` is what programs are compared by: what the switch adds to a first token."""
    if not took or not direct:
        return {"switch_ms": None, "direct_first_token_ms": None, "less_direct_ms": None}
    alone = spread(direct)
    less = [each - alone["p50"] for each in took]
    return {
        "switch_ms": spread(took),
        "direct_first_token_ms": alone,
        "less_direct_ms": spread(less),
    }


async def of_pool(
    pool: BenchedPool, models: Sequence[str], switches: int, pause_s: float
) -> Figures:
    """The same of a pool, with the phases that it has recorded itself."""
    began_ms = clock.now_ms()
    found = await in_turn(pool, models, switches, pause_s)
    return {**found, "phases_ms": phases(pool.watch.switches(began_ms))}


def phases(switches: Sequence[dict[str, Any]]) -> Figures:
    """`release`: from the last answer to the proof that the memory is free."""
    names = ("drain", "release", "raise")
    return {
        name: spread([each[f"{name}_ms"] for each in switches]) if switches else None
        for name in names
    }


async def from_offloaded(pool: BenchedPool, model: str, rounds: int) -> Figures:
    """One model that goes to host memory whenever nobody asks."""
    took, direct, exchanges = list[float](), list[float](), list[Exchange]()
    for setting, value in (
        ("rest", "offloaded"),
        ("min_runtime", "0s"),
        ("keep_alive", IDLE_KEPT),
    ):
        await pool.change(setting, value, model)
    began_ms = clock.now_ms()
    exchanges.append(await pool.ask(pool.short[model]))
    for _ in range(rounds):
        await pool.watch.until_state(model, "offloaded", began_ms)
        began_ms = clock.now_ms()
        for into in (took, direct):
            exchange = await pool.ask(pool.short[model])
            exchanges.append(exchange)
            into += [found for found in (first_ms(exchange),) if found is not None]
    for setting in ("rest", "min_runtime", "keep_alive"):
        await pool.change(setting, None, model)
    return {"rounds": len(took), **times(took, direct), **pool.counts(exchanges)}
