"""Stock OpenAI clients of a pod whose processes are killed: do they ever see an error?

    python -m hack.stock_clients [--kills 100] [--clients 4] [--backend vllm] [--json]

The clients are those of the `openai` package, told never to retry. They ask for chats and
completions, streamed and not, with all that must survive a failover; each answer is compared with
the one given before the first kill. Every process of the engines is killed in turn, and then every
other part of the pod. Exits 1 if a client saw an error or another answer. With vLLM, run it with
the Python of .venv-vllm.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai

from hack.kept_logs import run_below
from hack.report import commit, machine
from hack.stock_clients.client import ANSWER_S, WholeAnswer, ask, clock
from hack.stock_clients.kinds import APART_S, BY_BACKEND, VLLM_FLAGS, RequestKind
from hack.stock_clients.seen import FAULTS, Attempt, Clients, Fate
from hack.vllm.pod import make_pod, model_of
from plumbing.errors import UnderstudyError
from plumbing.service.signals import SignalInbox
from understudy.drill.clients import Target
from understudy.drill.records import PARTS
from understudy.drill.run import Drill, DrillPlan
from understudy.drill.verdict import DrillReport, judge
from understudy.kubelet.containers import Container
from understudy.kubelet.runner import PodRunner, run_pod
from understudy.up.local_pod import LocalPod
from understudy.up.random_model import VLLM_RANDOM_MODEL
from understudy.up.sessions import prepare_local

ALIKE_ROUNDS = 2  # of all kinds at once, before the first kill
AFTER_ERROR_S = 0.02  # else a port that refuses would get thousands of requests a second

Say = Callable[[str], None]
Expected = Mapping[str, WholeAnswer]


@dataclass(frozen=True, slots=True)
class Result:
    """What the clients and the drill found."""

    clients: Clients
    drill: Drill
    report: DrillReport
    backend: str

    def to_dict(self) -> dict[str, Any]:
        seen = self.clients.to_dict(self.drill.records)
        return {
            "passed": self.report.passed and not seen[Fate.ERROR] and not seen[Fate.WRONG],
            "backend": self.backend,
            "commit": commit(),
            "openai": openai.__version__,
            **seen,
            "drill": self.report.to_dict(self.backend, machine()),
        }


@dataclass(frozen=True, slots=True)
class Asking:
    """How one model is asked through the package."""

    client: openai.AsyncOpenAI
    model: str
    clients: Clients

    async def expected(self) -> Expected:
        """The answers while nothing is killed.

        Raises:
            UnderstudyError: `clients.unsteady`, a kind has several answers by itself.
        """
        kinds = self.clients.kinds
        first = {kind.name: await ask(self.client, self.model, kind) for kind in kinds}
        for _ in range(ALIKE_ROUNDS):
            again = await asyncio.gather(*(ask(self.client, self.model, kind) for kind in kinds))
            for kind, answer in zip(kinds, again, strict=True):
                if not answer.is_like(first[kind.name]):
                    raise UnderstudyError(
                        "clients.unsteady",
                        f"{kind.name} was answered twice, and differently: {first[kind.name]} and "
                        f"{answer}; nothing had been killed",
                    )
        return first

    async def go_on(self, offset: int, expected: Expected, stopping: asyncio.Event) -> None:
        """Send all kinds in turn, from the `offset`-th, until `stopping` is set."""
        for kind in itertools.islice(itertools.cycle(self.clients.kinds), offset, None):
            if stopping.is_set():
                return
            attempt = await self._attempt(kind, expected[kind.name])
            self.clients.attempts.append(attempt)
            if attempt.error:
                await asyncio.sleep(AFTER_ERROR_S)

    async def _attempt(self, kind: RequestKind, expected: WholeAnswer) -> Attempt:
        began_ms = clock.now_ms()
        try:
            answer = await ask(self.client, self.model, kind)
        except (openai.OpenAIError, ValueError) as error:
            name, cause = type(error).__name__, error.__cause__
            text = f"{name}: {error}" + (f" ({cause!r})" if cause is not None else "")
            is_refused = type(cause).__name__ == "ConnectError"
            return Attempt(kind, began_ms, clock.now_ms(), text, is_refused)
        is_like = answer.is_like(expected)
        return Attempt(
            kind,
            began_ms,
            clock.now_ms(),
            is_like_before=is_like,
            longest_wait_ms=answer.longest_wait_ms,
            detail="" if is_like else f"{answer} instead of {expected}",
        )


async def watch(drill: Drill, target: Target, number: int, clients: Clients) -> None:
    """All kills of `drill` while `number` stock clients send requests."""
    url = f"http://{target.host}:{target.port}/v1"
    model, stopping = drill.prompts[0].body["model"], asyncio.Event()
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=ANSWER_S
    ) as client:
        asking = Asking(client, model, clients)
        expected = await asking.expected()
        apart = max(1, len(clients.kinds) // number)
        tasks = [
            asyncio.create_task(asking.go_on(apart * each, expected, stopping))
            for each in range(number)
        ]
        try:
            await drill.run(target)
            stopping.set()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def containers_of(backend: str, base: Path, model: Path | None, say: Say) -> list[Container]:
    """The pod, in `base`/pod."""
    if backend == "vllm":
        found = await model_of(base, str(model) if model else None)
        flags = (*VLLM_RANDOM_MODEL.arguments, *VLLM_FLAGS)
        return make_pod(base, found, 1, flags).containers()
    directory = base / "pod"
    directory.mkdir(mode=0o700)
    return [*(await prepare_local(LocalPod(directory, model), directory, say, True)).containers]


async def run(
    base: Path, backend: str, plan: DrillPlan, number: int, say: Say, model: Path | None = None
) -> Result | None:
    """Start a pod below `base` and kill its processes under stock clients. None: interrupted."""
    directory = base / "pod"
    containers = await containers_of(backend, base, model, say)
    runner = PodRunner(containers, directory / "log")
    drill, clients = Drill(directory, plan, say, runner), Clients(BY_BACKEND[backend])
    ended_early: list[str] = []

    async def body() -> bool:
        try:
            await watch(drill, await drill.prepare(), number, clients)
        except (UnderstudyError, openai.OpenAIError) as error:
            ended_early.append(f"ended early: {error}")
        return True

    inbox = SignalInbox()
    try:
        if await run_pod(runner, body, inbox.get, say) is None:
            return None
    finally:
        inbox.close()
    report = judge(drill.records, plan.kills_wanted)
    report.problems += ended_early
    return Result(clients, drill, report, backend)


def lines(found: Mapping[str, Any]) -> Sequence[str]:
    """The document as text."""
    drill = found["drill"]
    pause = drill["pause_ms"]
    width = max(map(len, found["kinds"]))
    shown = [f"{'':<{width}} {'requests':>8} " + " ".join(f"{fate:>15}" for fate in FAULTS)]
    for name, counts in {**found["kinds"], "all": found}.items():
        cells = " ".join(f"{counts[fate]:>15}" for fate in FAULTS)
        shown.append(f"{name:<{width}} {counts['requests']:>8} {cells}")
    shown += [f"error: {each}" for each in found["first_error"]]
    shown += [f"wrong: {each}" for each in found["first_wrong"]]
    shown += [
        f"{drill['kills']} kills: {drill['killed']}",
        f"pause of a stream {pause['p50']} ms (p50), {pause['max']} (max)",
    ]
    shown += [f"problem: {each}" for each in drill["problems"]]
    return [*shown, "passed" if found["passed"] else "FAILED"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m hack.stock_clients",
        description="stock OpenAI clients and kills",
    )
    made.add_argument("--kills", type=int, default=100)
    made.add_argument("--clients", type=int, default=4)
    made.add_argument("--apart-s", type=float, default=APART_S, help="from kill to kill")
    made.add_argument("--backend", choices=sorted(BY_BACKEND), default="reference")
    made.add_argument("--model", type=Path, help="a checkpoint [default: a random one]")
    made.add_argument(
        "--target", action="append", default=[], help="as the drill's [default: everything in turn]"
    )
    made.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return made


def main() -> None:
    flags = parser().parse_args()
    say = partial(print, file=sys.stderr, flush=True)
    plan = DrillPlan(
        flags.kills,
        tuple(flags.target),
        clients=1,
        also=PARTS,
        duration_s=flags.kills * flags.apart_s,
    )

    async def body(base: Path) -> dict[str, Any] | None:
        result = await run(base, flags.backend, plan, flags.clients, say, flags.model)
        return None if result is None else result.to_dict()

    found = run_below("understudy-clients-", body)
    print(json.dumps(found, indent=2) if flags.json else "\n".join(lines(found)))
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
