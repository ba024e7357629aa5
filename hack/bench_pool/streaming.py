"""S5: many switches through streams that last far longer than a turn.

Each model has streams all the time, so each switch parks them: whoever is resumed wrongly, refused,
cut or forgotten shows. With the reference backend a stream is long because its tokens are slow, as
those of a large model are; what was made before is computed again at full speed.
"""

from __future__ import annotations

import asyncio
import itertools

from hack.bench_pool.plan import Plan
from hack.bench_pool.pods import BenchedPool
from hack.bench_pool.programs import Figures, Program, longest_pause_s, prompts_of, without_pause
from hack.bench_pool.switching import phases
from hack.bench_pool.watching import serving_share
from understudy.drill.clients import clock
from understudy.drill.records import Exchange, Prompt

SWITCH_S_MAX = 10.0  # on average; then the scenario is given up


def stream_prompts(pool: BenchedPool, tokens: int) -> dict[str, Prompt]:
    return prompts_of(pool.models, tokens, "stream")


async def through_streams(pool: BenchedPool, plan: Plan) -> Figures:
    streams = plan.streams
    prompts = stream_prompts(pool, streams.tokens)
    await pool.learn([*prompts.values()])
    alone_s = [_lasted_s(pool.expected[each.key]) for each in prompts.values()]
    asked = [[prompt] for prompt in prompts.values() for _ in range(streams.clients)]
    began_ms = clock.now_ms()
    async with without_pause(pool, asked) as exchanges:
        deadline_s = plan.s5_switches * SWITCH_S_MAX
        await pool.watch.until_switches(plan.s5_switches, began_ms, deadline_s)
        ended_ms = clock.now_ms()
        share = serving_share(pool.watch.events, began_ms, ended_ms)
    switches = pool.watch.switches(began_ms)
    bounds = [found for name in pool.models if (found := await pool.bound_s(name)) is not None]
    pause_s = longest_pause_s(exchanges)
    return {
        "switches": len(switches),
        **pool.counts(exchanges),
        "stream_alone_s": round(max(alone_s), 1),
        "stream_s": round(max((_lasted_s(each) for each in exchanges), default=0.0), 1),
        "longest_pause_s": pause_s,
        "bound_s": min(bounds, default=None),
        "measured_bound_s": await pool.bound_s(pool.models[0], "measured_bound_ms"),
        "longest_of_bound": round(pause_s / min(bounds), 4) if bounds else None,
        "serving_share": round(share, 4),
        "switches_per_s": round(1000 * plan.s5_switches / (ended_ms - began_ms), 2),
        "phases_ms": phases(switches),
        "faults": pool.faults(exchanges),
    }


async def contending(program: Program, plan: Plan) -> Figures:
    """The same for a program that does not say when it switches: so many streams of two models for
    `contend_s`. A switch is an answer of another model than the one before."""
    models = program.models[:2]
    await program.learn([program.long[name] for name in models])
    asked = [[program.long[name]] for name in models for _ in range(plan.streams.clients)]
    async with without_pause(program, asked) as exchanges:
        await asyncio.sleep(plan.contend_s)
    answered = [each for each in exchanges if each.first_token_ms is not None]
    answered.sort(key=lambda each: each.first_token_ms or 0.0)
    names = [each.prompt for each in answered]
    return {
        "switches": sum(one != other for one, other in itertools.pairwise(names)),
        **program.counts(exchanges),
        "answers": {name: names.count(f"long-{name}") for name in models},
        "longest_wait_s": round(max(map(waited_s, exchanges), default=0.0), 3),
        "longest_pause_s": longest_pause_s(exchanges),
        "seconds": plan.contend_s,
        "faults": program.faults(exchanges),
    }


def waited_s(exchange: Exchange) -> float:
    """Until its first token, or its end without any."""
    first_ms = exchange.first_token_ms
    return ((exchange.ended_ms if first_ms is None else first_ms) - exchange.sent_ms) / 1000


def _lasted_s(exchange: Exchange) -> float:
    return (exchange.ended_ms - exchange.sent_ms) / 1000
