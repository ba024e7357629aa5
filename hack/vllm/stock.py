"""Stock vLLM beside the pod: the same build, the same flags, one server without our code.

Owns what a drill is compared with: another program's answers, and its speed in the same run. A
prompt can be compared if the two best candidates lie far apart at every step of its answer:
otherwise rounding decides, which depends on what else is in the same batch.

Surprising: `vllm serve` of the CPU build looks for a package called vllm, which that build is not
called, and ends; the module behind it is started instead.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.supervisor import leftovers
from plumbing.errors import UnderstudyError
from plumbing.service.procfs import descendants
from understudy.drill.clients import Target, send, stream_without_pause
from understudy.drill.outcomes import Spread, spread
from understudy.drill.prompts import bank_of, learn_answers
from understudy.drill.records import End, Exchange, Prompt
from understudy.pod.ports import free_ports
from understudy.pod.runner import PodRunner
from understudy.pod.table import Container, HttpProbe

STARTUP_S = 600  # a real model is read from a real disk
ANSWER_S = 120.0  # vLLM compiles code for log probabilities at the first request for them
# Log probabilities differ by 1e-5 between one rank and two, in float32; a thousand times that.
GAP_MIN = 0.01
PROMPTS_MIN = 3

SERVER = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True, slots=True)
class Speed:
    """What clients that stream without pause got: tokens of complete answers."""

    tokens_per_s: float
    first_token_ms: Spread
    requests: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "first_token_ms": self.first_token_ms.to_dict(),
            "requests": self.requests,
        }


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt that can be compared, and how many tokens its answer has."""

    prompt: Prompt
    tokens: int
    gap: float


class Stock:
    """One stock server in the directory `base`; `runner` starts and stops it."""

    def __init__(
        self, model: Path, base: Path, ranks: int, flags: Sequence[str], env: Mapping[str, str]
    ) -> None:
        (port,) = free_ports(1)
        command = (
            *(sys.executable, "-m", SERVER, "--model", str(model), "--host", "127.0.0.1"),
            *("--port", str(port), "--tensor-parallel-size", str(ranks), *flags),
        )
        startup = HttpProbe(f"http://127.0.0.1:{port}/health", 1, STARTUP_S)
        container = Container("stock", command, env, startup, is_restarted=False)
        self.runner = PodRunner([container], base / "log")
        self.target = Target("127.0.0.1", port)
        self.model = str(model)
        self._left: set[leftovers.Name] = set()

    def tree(self) -> list[int]:
        """The server's processes."""
        return [
            pid for first in self.runner.pids().values() for pid in (first, *descendants(first))
        ]

    async def questions(self, *, is_long: bool = False) -> list[Question]:
        """The prompts of the drill's bank that can be compared; `is_long`: of that with long ones.

        Raises:
            UnderstudyError: `drill.no_answers`, too few of them.
        """
        found = []
        for prompt in bank_of("vllm", self.model, is_long=is_long):
            question = await asyncio.to_thread(self._ask, prompt)
            if question.gap >= GAP_MIN:
                found.append(question)
        if len(found) < PROMPTS_MIN:
            raise UnderstudyError(
                "drill.no_answers",
                f"only {len(found)} prompts have answers by {self.model} that rounding cannot"
                f" change (the two best candidates {GAP_MIN:g} apart at each step); try another"
                " model",
            )
        return found

    async def answers(
        self, questions: Sequence[Question]
    ) -> tuple[list[Prompt], dict[str, Exchange]]:
        """The streamed answers to the questions that a drill can use."""
        return await learn_answers(
            self.target, [question.prompt for question in questions], needs_token=False
        )

    async def first_answer(self, prompt: Prompt) -> Exchange:
        """Start it and ask once.

        Raises:
            UnderstudyError: `bench.no_answer`, or it does not start.
        """
        await self.runner.start()
        exchange = await send(self.target, prompt)
        self.note_leftovers()
        if exchange.first_token_ms is None:
            why = f"stock vLLM does not answer: {exchange.detail}"
            raise UnderstudyError("bench.no_answer", why)
        return exchange

    async def stop(self) -> None:
        await self.runner.stop()
        self.remove_leftovers()

    def note_leftovers(self) -> None:
        """Note what the server has in shared memory: it always leaves some of it behind."""
        self._left = leftovers.held_by(self.tree())

    def remove_leftovers(self) -> None:
        """Remove that, once the server is stopped."""
        for name in self._left - leftovers.still_held(self._left):
            leftovers.remove(name)

    def _ask(self, prompt: Prompt) -> Question:
        """Ask once, not streamed, for the two best candidates of each step."""
        wanted = {"logprobs": 2}
        if "messages" in prompt.body:
            wanted = {"logprobs": True, "top_logprobs": 2}
        request = urllib.request.Request(
            f"http://{self.target.host}:{self.target.port}{prompt.path}",
            json.dumps({**prompt.body, "stream": False, **wanted}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
                document = json.load(reply)
        except urllib.error.HTTPError:
            return Question(prompt, 0, 0.0)  # a model without a chat template takes no chats
        tokens = int(document["usage"]["completion_tokens"])
        return Question(prompt, tokens, smallest_gap(document["choices"][0]))


def smallest_gap(choice: Mapping[str, Any]) -> float:
    """The smallest distance of the two best candidates at any step; 0 if it is not reported."""
    said = choice.get("logprobs") or {}
    if "content" in said:  # a chat
        steps = [[each["logprob"] for each in step["top_logprobs"]] for step in said["content"]]
    else:
        steps = [list(step.values()) for step in said.get("top_logprobs") or []]
    gaps = []
    for step in steps:
        best, second = sorted(step, reverse=True)[:2]
        gaps.append(best - second)
    return min(gaps, default=0.0)


async def measure(
    target: Target, questions: Sequence[Question], clients: int, seconds: float
) -> Speed:
    """Stream from `clients` at once for `seconds`."""
    loop = asyncio.get_running_loop()
    prompts = [question.prompt for question in questions]
    tokens = {question.prompt.key: question.tokens for question in questions}
    exchanges: list[Exchange] = []
    stopping = asyncio.Event()
    began = loop.time()
    work = [
        asyncio.create_task(
            stream_without_pause(target, prompts, number, exchanges.append, stopping)
        )
        for number in range(clients)
    ]
    try:
        await asyncio.sleep(seconds)
        stopping.set()
        await asyncio.gather(*work)
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    took_s = loop.time() - began
    whole = [each for each in exchanges if each.end is End.DONE and each.status == 200]
    return Speed(
        sum(tokens[each.prompt] for each in whole) / took_s,
        spread(
            each.first_token_ms - each.sent_ms for each in whole if each.first_token_ms is not None
        ),
        len(whole),
    )
