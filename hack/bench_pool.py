"""What switching between models costs, and who waits how long for it.

    python -m hack.bench_pool [--only S1,S2,S5] [--backend reference|vllm] [--json] [--quick]

| scenario | what happens |
|---|---|
| S1 | two models in turn; each answer needs the room of the other one; then one from `offloaded` |
| S2 | ten models in turn, of which one fits |
| S5 | switches through streams that last far longer than a turn |

Each runs on a pod of `understudy up --pool` that is started for it. Every answer is compared with
the one that was given alone. Exits 1 if one was lost, refused, cut or wrong. With vLLM, run it
with the Python of .venv-vllm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hack import rig
from hack.pool_pod import MODELS, BenchedPool, longest_pause_s, prompts_of, with_pool
from understudy.drill.clients import clock
from understudy.drill.records import Exchange, Prompt

SHORT_TOKENS = 16
TEN = len(MODELS)  # of S2; the others have two
NEVER = ("lost", "refused", "cut", "wrong_tokens")  # whatever is measured
SWITCH_S_MAX = 10.0  # of S5, on average; then the scenario is given up
# As short as the drain and the protection of S5 are to be.
THROUGH_STREAMS: Mapping[str, Any] = {
    "min_runtime": "500ms",
    "max_wait": "200ms",
    "drain_timeout": {"park": "200ms", "cut": "60s"},
}
HURRIED: Mapping[str, Any] = {**THROUGH_STREAMS, "min_runtime": "1s", "max_wait": "500ms"}


@dataclass(frozen=True, slots=True)
class Plan:
    """How often. Before each request of S1 is a pause: a model that got a request a moment ago is
    not idle for as long as a switch takes, and does not yield."""

    backend: str
    switches: int = 300
    pause_s: float = 0.3
    offloads: int = 50
    rounds: int = 20  # of S2, through all models
    streamed_switches: int = 1000
    stream_tokens: int = 300
    token_ms: int = 200  # of the reference backend's streams: as slow as a large model's
    clients: int = 2  # of each model in S5
    is_quick: bool = False


def quick(backend: str) -> Plan:
    return Plan(backend, 10, offloads=2, rounds=1, streamed_switches=8,
                stream_tokens=60, token_ms=50, is_quick=True)  # fmt: skip


async def s1(plan: Plan, pool: BenchedPool) -> rig.Figures:
    """A switch is timed by the client, from its request to the first token. What a first token
    takes without a switch is measured beside it: the same model gets another request at once."""
    prompts, exchanges = prompts_of(SHORT_TOKENS), list[Exchange]()
    found = await _in_turn(pool, plan, [*prompts.values()], plan.switches, exchanges)
    offloaded = await _from_offloaded(pool, plan, prompts[MODELS[0]], exchanges)
    return {**found, "from_offloaded": offloaded, **pool.counts(exchanges)}


async def s2(plan: Plan, pool: BenchedPool) -> rig.Figures:
    """Round robin: each request is for the model that has slept longest."""
    prompts, exchanges = [*prompts_of(SHORT_TOKENS, TEN).values()], list[Exchange]()
    found = await _in_turn(pool, plan, prompts, TEN * plan.rounds, exchanges)
    return {"models": TEN, **found, **pool.counts(exchanges)}


async def _in_turn(
    pool: BenchedPool,
    plan: Plan,
    prompts: Sequence[Prompt],
    switches: int,
    exchanges: list[Exchange],
) -> rig.Figures:
    """Time `switches` switches, each to the model of the next prompt."""
    await _ready(pool, prompts)
    took, direct = list[float](), list[float]()
    await pool.send(prompts[-1])  # where the first one switches from
    began_ms = clock.now_ms()
    for number in range(switches):
        await asyncio.sleep(plan.pause_s)
        for into in (took, direct):
            exchanges.append(await pool.send(prompts[number % len(prompts)]))
            into += _first_ms(exchanges[-1])
    return {**_times(took, direct), "phases_ms": _phases(pool.switches(began_ms))}


async def _from_offloaded(
    pool: BenchedPool, plan: Plan, prompt: Prompt, exchanges: list[Exchange]
) -> rig.Figures:
    """One model that goes to host memory whenever it gets no request."""
    model, took, direct = MODELS[0], list[float](), list[float]()
    for setting, value in (("rest", "offloaded"), ("min_runtime", "0s"), ("keep_alive", "100ms")):
        await pool.change(setting, value, model)
    began_ms = clock.now_ms()
    exchanges.append(await pool.send(prompt))
    for _ in range(plan.offloads):
        await pool.until_state(model, "offloaded", began_ms)
        began_ms = clock.now_ms()
        for into in (took, direct):
            exchanges.append(await pool.send(prompt))
            into += _first_ms(exchanges[-1])
    return _times(took, direct)


async def s5(plan: Plan, pool: BenchedPool) -> rig.Figures:
    """Each model has streams all the time, so each switch parks them: a stream that is resumed
    wrongly, refused, cut or forgotten shows."""
    await _ready(pool, [*prompts_of(SHORT_TOKENS).values()])
    prompts = prompts_of(plan.stream_tokens)
    await pool.learn(prompts.values())
    began_ms = clock.now_ms()
    asked = [[prompt] for prompt in prompts.values() for _ in range(plan.clients)]
    async with pool.without_pause(asked) as exchanges:
        await pool.until(
            lambda: len(pool.switches(began_ms)) >= plan.streamed_switches,
            f"{plan.streamed_switches} switches",
            plan.streamed_switches * SWITCH_S_MAX,
        )
        ended_ms = clock.now_ms()
    bounds = [(await pool.of(name))["bound_ms"] / 1000 for name in prompts]
    pause_s = longest_pause_s(exchanges)
    return {
        "switches": plan.streamed_switches,
        "switches_per_s": round(1000 * plan.streamed_switches / (ended_ms - began_ms), 2),
        "longest_pause_s": pause_s,
        "bound_s": min(bounds),
        "longest_of_bound": round(pause_s / min(bounds), 4),
        "phases_ms": _phases(pool.switches(began_ms)),
        **pool.counts(exchanges),
    }


async def _ready(pool: BenchedPool, prompts: Sequence[Prompt]) -> None:
    """Every model has answered, and from now on one of them fits."""
    await pool.learn(prompts)
    await pool.tighten(prompts[0])


def _first_ms(exchange: Exchange) -> list[float]:
    """From the request to its first token, if it got one."""
    first = exchange.first_token_ms
    return [] if first is None else [first - exchange.sent_ms]


def _times(took: Sequence[float], direct: Sequence[float]) -> rig.Figures:
    """`less_direct_ms`: what the switch adds to a first token."""
    alone = rig.spread(direct)
    less = rig.spread([each - alone["p50"] for each in took])
    return {"switch_ms": rig.spread(took), "direct_first_token_ms": alone, "less_direct_ms": less}


def _phases(switches: Sequence[Mapping[str, Any]]) -> rig.Figures:
    """`release`: from the last answer to the proof that the memory is free."""
    names = ("drain", "release", "raise")
    return {name: rig.spread([each[f"{name}_ms"] for each in switches]) for name in names}


Scenario = Callable[[Plan, BenchedPool], Awaitable[rig.Figures]]
SCENARIOS: Mapping[str, Scenario] = {"S1": s1, "S2": s2, "S5": s5}


def problems_of(name: str, figures: Mapping[str, Any]) -> list[str]:
    """What must hold on any machine."""
    return [f"{name}: {figures[each]} {each}" for each in NEVER if figures.get(each)]


async def measure(plan: Plan, only: Sequence[str], base: Path) -> rig.Figures:
    found, problems = dict[str, rig.Figures](), list[str]()
    for name in only:
        rig.say(f"{name} …")
        is_slowed = name == "S5" and plan.backend == "reference"
        arguments = ("--token-interval-ms", str(plan.token_ms)) if is_slowed else ()
        defaults = THROUGH_STREAMS if name == "S5" else HURRIED if plan.is_quick else {}
        body, count = partial(SCENARIOS[name], plan), TEN if name == "S2" else 2
        found[name] = await with_pool(base / name, plan.backend, body, defaults, arguments, count)
        problems += problems_of(name, found[name])
    return rig.document({"backend": plan.backend, "scenarios": found}, problems)


def main() -> None:
    parser = rig.arguments("bench_pool", "what switching between models costs")
    parser.add_argument("--backend", choices=("reference", "vllm"), default="reference")
    parser.add_argument("--only", default=",".join(SCENARIOS), help="[default: %(default)s]")
    flags = parser.parse_args()
    only = flags.only.split(",")
    if unknown := {*only} - {*SCENARIOS}:
        parser.error(f"unknown scenarios: {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    plan = quick(flags.backend) if flags.quick else Plan(flags.backend)
    rig.finish(rig.run("bench-pool-", partial(measure, plan, only)), is_json=flags.json)


if __name__ == "__main__":
    main()
