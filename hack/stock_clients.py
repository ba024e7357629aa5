"""Stock OpenAI clients of a pod whose engines are killed: do they ever see an error?

    python -m hack.stock_clients [--kills 100] [--clients 4] [--json]

The clients are those of the `openai` package, told never to retry. They ask for chats and
completions, streamed and not, plain and in a JSON schema; each answer is compared with the one
given before the first kill. Exits 1 if a client saw an error or another answer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import openai

from hack.report import machine
from plumbing.service.cli import INTERRUPTED, run_async
from plumbing.service.signals import SignalInbox
from understudy.drill.clients import Target
from understudy.drill.prompts import SCHEMA
from understudy.drill.run import Drill, DrillPlan
from understudy.drill.verdict import DrillReport, judge
from understudy.kubelet.runner import PodRunner, run_pod
from understudy.up.local_pod import LocalPod
from understudy.up.sessions import prepare_local

ERRORS_MAX = 20  # are told apart; the rest is counted
IN_SCHEMA = {"type": "json_schema", "json_schema": {"name": "side", "schema": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "Name three colours."}], "temperature": 0}
TEXT = {"prompt": "The understudy steps onto the stage and", "temperature": 0}
SEEDED = {**TEXT, "temperature": 1, "seed": 7}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

Answer = tuple[str, str | None, int | None]  # text, finish reason, tokens


@dataclass(frozen=True, slots=True)
class Asked:
    """One kind of request, as keyword arguments of the package."""

    name: str
    is_chat: bool
    arguments: Mapping[str, Any]


KINDS = (
    Asked("chat, streamed", True, {**CHAT, **USAGE, "max_tokens": 48}),
    Asked("chat", True, {**CHAT, "max_tokens": 24}),
    Asked("completion, streamed", False, {**TEXT, **USAGE, "max_tokens": 64}),
    Asked("completion", False, {**TEXT, "max_tokens": 24}),
    Asked("schema, streamed", True, {**CHAT, **USAGE, "response_format": IN_SCHEMA}),
    Asked("schema", True, {**CHAT, "response_format": IN_SCHEMA}),
    Asked(
        "seed, streamed", False, {**TEXT, **USAGE, "max_tokens": 48, "temperature": 1, "seed": 7}
    ),
)


@dataclass(slots=True)
class Seen:
    """What all clients saw."""

    requests: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)
    report: DrillReport | None = None

    @property
    def passed(self) -> bool:
        found = self.report
        return found is not None and found.passed and not self.errors and not self.wrong

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "requests": dict(self.requests),
            "errors": len(self.errors),
            "first_errors": self.errors[:ERRORS_MAX],
            "wrong": dict(self.wrong),
            "openai": openai.__version__,
            "drill": self.report.to_dict("reference", machine()) if self.report else None,
        }


async def ask(client: openai.AsyncOpenAI, model: str, asked: Asked) -> Answer:
    """Send one request; its answer."""
    api: Any = client.chat.completions if asked.is_chat else client.completions
    answer = await api.create(model=model, **asked.arguments)
    if not asked.arguments.get("stream"):
        (choice,) = answer.choices
        text = choice.message.content if asked.is_chat else choice.text
        return text or "", choice.finish_reason, answer.usage.completion_tokens
    text, reason, tokens = "", None, None
    async for event in answer:
        if event.usage is not None:
            tokens = event.usage.completion_tokens
        for choice in event.choices:
            text += (choice.delta.content if asked.is_chat else choice.text) or ""
            reason = choice.finish_reason or reason
    return text, reason, tokens


async def be_client(
    client: openai.AsyncOpenAI,
    model: str,
    number: int,
    expected: Mapping[str, Answer],
    seen: Seen,
    stopping: asyncio.Event,
) -> None:
    """Send all kinds in turn, from the `number`-th, until `stopping` is set."""
    for asked in itertools.islice(itertools.cycle(KINDS), number, None):
        if stopping.is_set():
            return
        try:
            answer = await ask(client, model, asked)
        except (openai.OpenAIError, ValueError) as error:
            seen.errors.append(f"{asked.name}: {type(error).__name__}: {error}")
        else:
            seen.wrong.update([asked.name] if answer != expected[asked.name] else [])
        seen.requests[asked.name] += 1


async def watch(drill: Drill, target: Target, clients: int, seen: Seen) -> None:
    """All kills of `drill` while stock clients send requests."""
    url = f"http://{target.host}:{target.port}/v1"
    model, stopping = drill.prompts[0].body["model"], asyncio.Event()
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        expected = {asked.name: await ask(client, model, asked) for asked in KINDS}
        tasks = [
            asyncio.create_task(be_client(client, model, number, expected, seen, stopping))
            for number in range(clients)
        ]
        try:
            await drill.run(target)
            stopping.set()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def run(
    directory: Path, kills: int, clients: int, say: Callable[[str], None], model: Path | None = None
) -> Seen | None:
    """Start a pod in `directory` and kill its engines under stock clients. None: interrupted."""
    pod = await prepare_local(LocalPod(directory, model), directory, say, True)
    runner = PodRunner(pod.containers, directory / "log")
    plan, seen = DrillPlan(kills, clients=1), Seen()
    drill = Drill(directory, plan, say, runner)

    async def body() -> Seen:
        await watch(drill, await drill.prepare(), clients, seen)
        return seen

    inbox = SignalInbox()
    try:
        done = await run_pod(runner, body, inbox.get, say)
    finally:
        inbox.close()
    if done is not None:
        done.report = judge(drill.records, kills)
    return done


def lines(seen: Seen) -> Sequence[str]:
    """The result as text."""
    count, report = seen.requests.total(), seen.report
    found = [f"{count} requests of {len(KINDS)} kinds, {len(seen.errors)} errors"]
    found += [f"wrong: {name}: {number}" for name, number in seen.wrong.items()]
    found += [f"error: {each}" for each in seen.errors[:ERRORS_MAX]]
    if report is not None:
        pause = report.pause_ms
        found += [
            f"{report.kills} kills, pause of a stream {pause.p50} ms (p50), {pause.max} (max)"
        ]
        found += [f"problem: {each}" for each in report.problems]
    return [*found, "passed" if seen.passed else "FAILED"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hack.stock_clients",
        description="stock OpenAI clients and kills",
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    flags = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="understudy-clients-"))
    say = partial(print, file=sys.stderr, flush=True)
    seen = None
    try:
        seen = run_async(lambda: run(directory, flags.kills, flags.clients, say))
    finally:
        if seen is not None and seen.passed:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            say(f"the logs of all parts are kept in {directory / 'log'}")
    if seen is None:
        sys.exit(INTERRUPTED)
    print(json.dumps(seen.to_dict(), indent=2) if flags.json else "\n".join(lines(seen)))
    sys.exit(0 if seen.passed else 1)


if __name__ == "__main__":
    main()
