"""Minutes of load that saturates two vLLM engines' cores: no engine may be killed for being busy.

    python -m hack.soak_vllm [--minutes 10] [--clients 16] [--tensor-parallel 1] [--json]

Long prompts and long answers from more clients than the engine serves at once, so that prefills
delay others and health checks are late. What must hold: the same incarnations and the same grant
at the end, no death, a complete answer to every request. Answers that differ from those before the
load are counted only: rounding in a full batch may change them, and the drill judges tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from hack.report import machine
from hack.vllm.pod import make_pod, model_of
from plumbing.service.cli import INTERRUPTED, run_async
from plumbing.service.signals import SignalInbox
from understudy.drill.clients import Target, stream_without_pause
from understudy.drill.part_killer import Standing
from understudy.drill.prompts import learn_answers
from understudy.drill.records import Exchange, Outcome, Prompt
from understudy.drill.run import Drill, DrillPlan
from understudy.drill.verdict import classify, spread
from understudy.kubelet.runner import PodRunner, run_pod
from understudy.status.gather import gather
from understudy.up.random_model import VLLM_RANDOM_MODEL

SAID_EVERY_S = 30.0
LONG_WORDS = 700  # bytes, which are tokens of the random model: most of its context
LONG_ANSWER_TOKENS = 200


@dataclass(slots=True)
class Soaked:
    """The result; it passed if there are no `problems`, which are sentences."""

    seconds: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        waits = [
            each.first_token_ms - each.sent_ms
            for each in self.exchanges
            if each.first_token_ms is not None
        ]
        return {
            "seconds": round(self.seconds, 1),
            "requests": len(self.exchanges),
            "chunks_per_s": round(sum(each.chunks for each in self.exchanges) / self.seconds, 1),
            "first_token_ms": spread(waits).to_dict(),
            "outcomes": {str(outcome): count for outcome, count in self.outcomes.items()},
            "problems": self.problems,
            "machine": machine(),
        }


def heavy(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Every prompt unchanged, with a long answer, and after a long text."""
    found = list(prompts)
    for prompt in prompts:
        answer = {**prompt.body, "max_tokens": LONG_ANSWER_TOKENS}
        found.append(structs.replace(prompt, key=f"{prompt.key}-long-answer", body=answer))
        if "prompt" in prompt.body:
            text = (prompt.body["prompt"] + " and then ") * LONG_WORDS
            body = {**prompt.body, "prompt": text[:LONG_WORDS]}
            found.append(structs.replace(prompt, key=f"{prompt.key}-long", body=body))
    return found


async def soak(base: Path, flags: argparse.Namespace) -> Soaked | None:
    """None: interrupted."""
    model = await model_of(base, flags.model)
    arguments = (*VLLM_RANDOM_MODEL.arguments, *flags.vllm)
    pod = make_pod(base, model, flags.tensor_parallel, arguments)
    drill = Drill(pod.directory, DrillPlan(clients=flags.clients), say)

    async def body() -> Soaked:
        target = await drill.prepare()
        prompts = heavy(drill.prompts)
        answers: dict[str, Exchange] = {}
        for prompt in prompts:  # one after the other: `learn_answers` stops when it has enough
            answers |= (await learn_answers(target, [prompt]))[1]
        return await load(pod.directory, target, prompts, answers, flags)

    runner = PodRunner(pod.containers(), pod.directory / "log")
    inbox = SignalInbox()
    try:
        return await run_pod(runner, body, inbox.get, say)
    finally:
        inbox.close()


async def load(
    directory: Path,
    target: Target,
    prompts: Sequence[Prompt],
    answers: dict[str, Exchange],
    flags: argparse.Namespace,
) -> Soaked:
    """Stream for these minutes, and compare the pod before and after."""
    loop = asyncio.get_running_loop()
    soaked, stopping = Soaked(), asyncio.Event()
    before = Standing.of(await gather(directory))
    began = loop.time()
    clients = [
        asyncio.create_task(
            stream_without_pause(target, prompts, number, soaked.exchanges.append, stopping)
        )
        for number in range(flags.clients)
    ]
    try:
        while loop.time() < began + 60 * flags.minutes:
            await asyncio.sleep(min(SAID_EVERY_S, 60 * flags.minutes))
            say(f"{loop.time() - began:.0f} s: {len(soaked.exchanges)} requests")
        stopping.set()
        await asyncio.gather(*clients)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    soaked.seconds = loop.time() - began
    view = await gather(directory)
    soaked.problems += before.changes(Standing.of(view))
    for part in view["engines"]:
        soaked.problems += [f"{part['engine']['id']}: {each['message']}" for each in part["deaths"]]
    soaked.outcomes.update(classify(each, answers) for each in soaked.exchanges)
    harmless = (Outcome.OK, Outcome.WRONG)
    bad = {str(each): count for each, count in soaked.outcomes.items() if each not in harmless}
    if bad or not soaked.exchanges:
        soaked.problems.append(f"of {len(soaked.exchanges)} requests: {bad}")
    return soaked


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="saturating load, and no false kill")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--model", help="a checkpoint; a random one unless given")
    parser.add_argument("--json", action="store_true", help="one line")
    parser.add_argument("vllm", nargs="*", metavar="-- vLLM's flags")
    flags = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="understudy-soak-"))
    soaked = None
    try:
        soaked = run_async(lambda: soak(base, flags))
    finally:
        if soaked is not None and not soaked.problems:
            shutil.rmtree(base, ignore_errors=True)
        else:
            say(f"what every part wrote is kept in {base}")
    if soaked is None:
        sys.exit(INTERRUPTED)
    print(json.dumps(soaked.to_dict(), indent=None if flags.json else 2))
    sys.exit(1 if soaked.problems else 0)


if __name__ == "__main__":
    main()
