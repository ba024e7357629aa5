"""The pod whose engines are killed, and the questions that its clients ask all the while.

Owns the questions, whose answers were given by an engine that was never killed, and the look at
what a successor has adopted. Many prompts begin alike and the cache holds few of them, so blocks
are found, handed out again and published all the time.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hack.kv_kills.seams import Control
from hack.processes import ProcessError
from hack.vllm.pod import environment, temporary
from hack.vllm.stock import ANSWER_S, GAP_MIN, smallest_gap
from understudy.drill.clients import Target
from understudy.drill.prompts import learn_answers
from understudy.drill.records import Exchange, Prompt
from understudy.kubelet.http_get import get
from understudy.kubelet.runner import PodRunner
from understudy.status.gather import gather
from understudy.status.view import PARKED
from understudy.up.local_pod import LocalPod
from understudy.up.ports import Ports, free_pod_ports
from understudy.up.random_model import ONE_THREAD, VLLM_RANDOM_MODEL

WHOLE_S = 300.0  # an engine of vLLM starts for a minute on a busy machine
POLL_S = 0.05
QUESTIONS, ASKED_MAX = 16, 60
BEGINNINGS, BEGINNING_CHARS, REST_CHARS_MAX = 4, 70, 70
ANSWER_TOKENS = 72
LETTERS = "abcdefghijklmnopqrstuvwxyz ,."
NO_CRASH_LOOP = {"UNDERSTUDY_DEATHS_MAX": "100000"}

# By backend: a cache of about 40 blocks.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "reference": ("--cache-tokens=1280", "--max-context=512"),
    "vllm": (
        *VLLM_RANDOM_MODEL.arguments,
        "--kv-memory=gms",
        "--block-size=32",
        "--max-model-len=256",
        f"--kv-cache-memory-bytes={3 << 20}",
    ),
}


@dataclass(frozen=True, slots=True)
class Standing:
    """A whole pod: who is active under which token, and what it says of its KV memory."""

    active: str
    token: int
    kv: Mapping[str, Any]


class SeamPod:
    """Two engines of `backend` behind a gateway, every process with the points in it."""

    def __init__(
        self, base: Path, model: Path, backend: str, ranks: int, flags: tuple[str, ...]
    ) -> None:
        self._backend = backend
        self.directory = base / "pod"
        self.directory.mkdir(mode=0o700)
        temporary(base).mkdir()
        self.control = Control(base)
        ports: Ports = free_pod_ports()
        env = environment(base) if backend == "vllm" else ONE_THREAD
        local = LocalPod(
            self.directory,
            model,
            ports,
            backend=backend,
            backend_args=(*ARGUMENTS[backend], *flags),
            tensor_parallel=ranks,
            env={**env, **NO_CRASH_LOOP, **self.control.environment},
        )
        self.runner = PodRunner(local.containers(), base / "log")
        self.target = Target("127.0.0.1", ports.service)

    async def start(self) -> Standing:
        await self.runner.start()
        return await self.whole(-1)

    async def stop(self) -> None:
        """End all of it, without the patience of an operator."""
        self.control.rest()
        self.runner.kill()
        await self.runner.stop()

    async def whole(self, old_token: int) -> Standing:
        """Wait until an engine serves under a newer token than `old_token`, and another is ready.

        Raises:
            ProcessError: with what is missing.
        """
        loop = asyncio.get_running_loop()
        end_s, missing = loop.time() + WHOLE_S, ""
        while loop.time() < end_s:
            view = await gather(self.directory)
            found = {
                str(part["engine"]["id"]): part for part in view["engines"] if part.get("engine")
            }
            states = {name: part["engine"]["state"] for name, part in found.items()}
            is_ready = view["failover_ready"] and PARKED in states.values()
            if is_ready and view["active"] in found and view["token"] > old_token:
                kv = found[view["active"]]["backend"]["kv"] or {}
                return Standing(view["active"], view["token"], kv)
            missing = f"{states}, token {view['token']}; {'; '.join(view['problems'])}"
            await asyncio.sleep(POLL_S)
        raise ProcessError(f"the pod was not whole within {WHOLE_S:g} s: {missing}")

    async def learn(self, rng: Random) -> tuple[list[Prompt], dict[str, Exchange]]:
        """Questions, and the answers of the engine that serves now.

        Raises:
            UnderstudyError: `drill.no_answers`.
        """
        url = f"http://{self.target.host}:{self.target.port}/v1/models"
        model = (await get(url)).json()["data"][0]["id"]
        prompts: list[Prompt] = []
        beginnings = [_letters(rng, BEGINNING_CHARS) for _ in range(BEGINNINGS)]
        for number in range(ASKED_MAX):
            text = rng.choice(beginnings) + _letters(rng, rng.randrange(REST_CHARS_MAX))
            body = {"model": model, "prompt": text, "max_tokens": ANSWER_TOKENS, "temperature": 0}
            body |= {"stream": True, "ignore_eos": True}
            prompt = Prompt(f"question-{number}", "/v1/completions", body)
            if await asyncio.to_thread(self._is_clear, prompt):
                prompts.append(prompt)
            if len(prompts) == QUESTIONS:
                break
        return await learn_answers(self.target, prompts, QUESTIONS)

    def _is_clear(self, prompt: Prompt) -> bool:
        """Whether rounding cannot change the answer. The reference backend computes a request alike
        whatever runs beside it, and reports no candidates."""
        if self._backend == "reference":
            return True
        body = {**prompt.body, "stream": False, "logprobs": 2}
        request = urllib.request.Request(
            f"http://{self.target.host}:{self.target.port}{prompt.path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            choice = json.load(reply)["choices"][0]
        return smallest_gap(choice) >= GAP_MIN


def _letters(rng: Random, count: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(count))
