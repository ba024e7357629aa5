"""S3, S4 and S6: who waits, and for how long.

S3: one model is asked without pause, and then another one once. S4: clients who ask some models far
more often than others. S6: clients who leave while they wait.
"""

from __future__ import annotations

import asyncio
import random

from hack.bench_pool.plan import Plan
from hack.bench_pool.pods import BenchedPool
from hack.bench_pool.polling import until
from hack.bench_pool.programs import (
    Figures,
    Program,
    answered,
    first_ms,
    longest_pause_s,
    saturated,
    without_pause,
)
from hack.bench_pool.watching import serving_share
from hack.report import spread
from understudy.drill.clients import clock
from understudy.drill.records import Exchange, Prompt

LEAVE_S_MAX = 1.0  # after the request, at random
GONE_S = 30.0  # until tickets of clients that have left are gone
ZIPF_LENGTH = 2000  # of each client's list of prompts


async def beside_saturated(program: Program, plan: Plan) -> Figures:
    """S3: how long the only request for `b` waits while `a` is asked without pause. Who waits for
    `starved_s` is starved, and is asked no more."""
    a, b = program.models[:2]
    waits, starved, mine = list[float](), 0, list[Exchange]()
    async with saturated(program, a, plan.saturating) as others:
        while len(mine) < plan.s3_rounds and not starved:
            exchange = await program.ask(program.short[b], plan.starved_s)
            mine.append(exchange)
            wait_ms = first_ms(exchange)
            starved += wait_ms is None
            waits += [] if wait_ms is None else [wait_ms / 1000]
            await answered(others, 1)  # it is awake again
    return {
        "wait_s": round(max(waits), 3) if waits else None,
        "waits_s": [round(each, 3) for each in waits],
        "bound_s": None,
        "starved": starved,
        "starved_after_s": plan.starved_s,
        "longest_pause_s": longest_pause_s(others),
        "asked": program.counts(mine),
        "saturating": program.counts(others),
        "faults": program.faults([*mine, *others]),
    }


async def saturated_pool(pool: BenchedPool, plan: Plan) -> Figures:
    """S3 of a pool, beside what it promises."""
    _, b = pool.models[:2]
    found = await beside_saturated(pool, plan)
    bound_s = await pool.bound_s(b)
    longest_s = max(found["wait_s"] or 0.0, found["longest_pause_s"])
    return {
        **found,
        "bound_s": bound_s,
        "measured_bound_s": await pool.bound_s(b, "measured_bound_ms"),
        "longest_of_bound": round(longest_s / bound_s, 4) if bound_s else None,
    }


async def zipf(pool: BenchedPool, plan: Plan) -> Figures:
    """S4: the second most popular model is asked half as often as the first one, and so on."""
    chance = random.Random(4)
    weights = [1 / (number + 1) for number in range(len(pool.models))]
    prompts = [
        [pool.short[name] for name in chance.choices(pool.models, weights, k=ZIPF_LENGTH)]
        for _ in range(plan.s4_clients)
    ]
    began_ms = clock.now_ms()
    async with without_pause(pool, prompts) as exchanges:
        await asyncio.sleep(plan.s4_s)
        ended_ms = clock.now_ms()
        in_time = len(exchanges)
        share = serving_share(pool.watch.events, began_ms, ended_ms)
    bounds = {name: await pool.bound_s(name) for name in pool.models}
    waits = [(found, each) for each in exchanges if (found := first_ms(each)) is not None]
    of_bound = [found / 1000 / (bounds[_model(each, pool)] or 1) for found, each in waits]
    return {
        "answers_per_s": round(in_time / plan.s4_s, 1),
        "switches": len(pool.watch.switches(began_ms)),
        "first_token_ms": spread([found for found, _ in waits]) if waits else None,
        "wait_s": round(max((found for found, _ in waits), default=0.0) / 1000, 3),
        "longest_of_bound": round(max(of_bound, default=0.0), 4),
        "serving_share": round(share, 4),
        **pool.counts(exchanges),
        "faults": pool.faults(exchanges),
    }


def _model(exchange: Exchange, pool: BenchedPool) -> str:
    return next(each for each in pool.models if exchange.prompt.endswith(f"-{each}"))


async def leavers(program: Program, plan: Plan) -> Figures:
    """S6: many ask for `b` while `a` is saturated, and leave before they have an answer."""
    a, b = program.models[:2]
    chance = random.Random(6)
    async with saturated(program, a, plan.saturating) as others:
        began_ms = clock.now_ms()
        crowd = [
            asyncio.create_task(_leave(program, program.short[b], chance.random() * LEAVE_S_MAX))
            for _ in range(plan.s6_leavers)
        ]
        early = sum(await asyncio.gather(*crowd))
        left_ms = clock.now_ms()
        found = await _tickets_gone(program, b, began_ms) if _is_pool(program) else {}
        last = await program.ask(program.short[b], plan.starved_s)
    return {
        "left": plan.s6_leavers - early,
        "answered_before_they_left": early,
        "crowd_s": round((left_ms - began_ms) / 1000, 3),
        **found,
        "next_first_token_ms": first_ms(last),
        "asked": program.counts([last]),
        "saturating": program.counts(others),
        "faults": program.faults([last, *others]),
    }


def _is_pool(program: Program) -> bool:
    return isinstance(program, BenchedPool)


async def _leave(program: Program, prompt: Prompt, after_s: float) -> bool:
    """Whether there was an answer before."""
    try:
        async with asyncio.timeout(after_s):
            await program.ask(prompt)
    except TimeoutError:
        return False
    return True


async def _tickets_gone(program: Program, model: str, began_ms: float) -> Figures:
    """How long the tickets of those who have left stay, and the switches made for them."""
    assert isinstance(program, BenchedPool)

    async def tickets() -> str:
        found = (await program.of(model))["tickets"]
        return f"{found} are left" if found else ""

    gone_ms = await until(tickets, "end of the tickets", GONE_S)
    return {
        "tickets_gone_ms": round(gone_ms, 1),
        "switches_for_nobody": len(program.watch.switches(began_ms)),
    }
