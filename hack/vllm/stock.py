"""Stock vLLM beside the pod: the same build, the same flags, one server without our code.

Owns what a drill is compared with: another program's answers. A prompt can be compared if the two
best candidates lie far apart at every step of its answer: otherwise rounding decides, which depends
on what else is in the same batch.

Surprising: `vllm serve` of the CPU build looks for a package called vllm, which that build is not
called, and ends; the module behind it is started instead.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.supervisor.leftovers import SHM
from hack.processes import free_ports
from plumbing.errors import UnderstudyError
from plumbing.service.procfs import descendants
from understudy.drill.clients import Target
from understudy.drill.prompts import KINDS, all_prompts, learn_answers
from understudy.drill.records import Exchange, Prompt
from understudy.pod.runner import PodRunner, run_pod
from understudy.pod.table import Container, HttpProbe

STARTUP_S = 600  # a real model is read from a real disk
ANSWER_S = 120.0  # vLLM compiles code for log probabilities at the first request for them
# Log probabilities differ by 1e-5 between one rank and two, in float32; a thousand times that.
GAP_MIN = 0.01
PROMPTS_MIN = 3

SERVER = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt that can be compared. `gap`: the smallest between two candidates of its answer."""

    prompt: Prompt
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
        container = Container("stock", command, env, startup)
        self.runner = PodRunner([container], base / "log")
        self.target = Target("127.0.0.1", port)
        self.model = str(model)
        self._left: set[str] = set()

    def tree(self) -> list[int]:
        """The server's processes."""
        return [
            pid for first in self.runner.pids().values() for pid in (first, *descendants(first))
        ]

    async def answers(
        self,
        say: Callable[[str], None],
        *,
        gap_min: float = GAP_MIN,
        look: Callable[[], None] = lambda: None,
    ) -> tuple[list[Question], tuple[list[Prompt], dict[str, Exchange]]] | None:
        """Start the server, ask it, and stop it: the questions, and the answers that a pod must
        give. They are long: short answers to short prompts fill no block, so no KV cache would be
        adopted. `look` is called while the server runs. None: interrupted.

        Raises:
            UnderstudyError: `drill.no_answers`, too few can be compared.
        """

        async def body() -> tuple[list[Question], tuple[list[Prompt], dict[str, Exchange]]]:
            questions = await self._questions(gap_min)
            asked = [each.prompt for each in questions]
            prompts, answers = await learn_answers(self.target, asked, needs_token=False)
            look()
            maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in self.tree())
            self._left = set(re.findall(rf" ({SHM}/\S+)$", maps, re.MULTILINE))
            return [e for e in questions if e.prompt.key in answers], (prompts, answers)

        try:
            return await run_pod(self.runner, body, say)
        finally:
            for path in self._left:  # it always leaves some shared memory behind
                Path(path).unlink(missing_ok=True)

    async def _questions(self, gap_min: float) -> list[Question]:
        bank = _long_prompts(self.model)
        asked = [await asyncio.to_thread(self._ask, prompt) for prompt in bank]
        found = [each for each in asked if each.gap >= gap_min]
        if len(found) < PROMPTS_MIN:
            raise UnderstudyError(
                "drill.no_answers",
                f"only {len(found)} prompts have answers by {self.model} that rounding cannot"
                f" change (the two best candidates {gap_min:g} apart at each step); try another"
                " model",
            )
        return found

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
            return Question(prompt, 0.0)  # a model without a chat template takes no chats
        return Question(prompt, smallest_gap(document["choices"][0]))


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


# Some 500 tokens of the random model, of one byte each, and most of a small context.
DOCUMENTS = (
    "The log of the lighthouse. "
    + "Wind from the west, two ships passed, the lamp was trimmed. " * 9,
    "An inventory of the wardrobe. "
    + "One cloak, two masks, a crown of paper, boots in pairs. " * 9,
)
ASKED = ("Summary:", "The last entry again:", "The first entry again:", "Who wrote this:")


def _long_prompts(model: str) -> list[Prompt]:
    """Several about each of two long documents, and short ones."""
    short = all_prompts(model)[:2]
    body = {**short[0].body, **KINDS["long"]}
    texts = [text + asked for text in DOCUMENTS for asked in ASKED]
    long = [Prompt(f"long-{n}", short[0].path, {**body, "prompt": t}) for n, t in enumerate(texts)]
    return [*long[:4], short[0], *long[4:], short[1]]
