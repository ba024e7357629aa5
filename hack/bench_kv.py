"""What a KV cache that outlives its engine is worth.

    python -m hack.bench_kv [--backend vllm|reference] [--kills 5] [--json] [--quick]

A pod is killed again and again: how long is the first token of a prompt away once the next engine
serves, if it adopts the prompt's blocks, beside a warm cache and a prompt that nobody has sent.
Exits 1 if a block was not adopted or an answer differs. `make kv-kills` checks the bytes of the
blocks. vLLM needs the Python of .venv-vllm, and twenty minutes of two idle cores, most of it while
engines come back.
"""

from __future__ import annotations

import asyncio
import os
import random
import string
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine.messages import CONTROL
from hack import rig
from plumbing.errors import UnderstudyError
from plumbing.pod.observers import ask
from plumbing.pod.paths import engine_sockets
from understudy.drill.clients import Target, send
from understudy.drill.killer import Whole
from understudy.drill.records import End, Exchange, Prompt
from understudy.drill.targets import kill_request
from understudy.pod.ports import free_pod_ports
from understudy.pod.runner import PodRunner
from understudy.pod.table import LocalPod
from understudy.status.gather import engine_parts, status_of
from understudy.up.models import RandomModel, make_random_model

BLOCK_TOKENS = 32  # of the reference backend; on the CPU vLLM takes multiples of it
MODEL_TOKENS = 2048  # the random model's longest sequence
MADE = 8  # tokens of an answer whose first one is timed
# An engine that dies within 32 steps after it has read an adopted block is held against the blocks,
# and the third one begins empty. No block is completed.
PROOF_PROMPT, PROOF_MADE, PROOFS = 97, 28, 3
KINDS = ("warm", "adopted", "recomputed")
TARGET = {"reference": "model", "vllm": "api"}  # killed: nobody accepts until another engine serves
HOST_BYTES = "8GiB"
SERVED_S = 90.0  # a takeover, and a prefill of the longest prompt


@dataclass(frozen=True, slots=True)
class Plan:
    """Prompts that end within a block, so that a repeated prompt computes no block anew, and a KV
    cache with room for every block of the run. Then what a successor must adopt follows from what
    was sent."""

    backend: str
    kills: int
    lengths: tuple[int, ...] = (100, 900, MODEL_TOKENS - MADE)
    shape: tuple[int, int, int] = (2048, 8, 16)  # hidden, layers, heads: a prefill shows

    @property
    def shape_flags(self) -> tuple[str, ...]:
        hidden, layers, heads = self.shape
        sizes = f"--hidden={hidden} --layers={layers} --heads={heads} --kv-heads=2"
        return (*sizes.split(), f"--head-dim={hidden // heads}")

    def pod(self, directory: Path, model: Path) -> LocalPod:
        asked = sum(length + MADE + BLOCK_TOKENS for length in self.lengths)
        tokens = 2 * self.kills * asked + 2 * MODEL_TOKENS
        ours = ("--served-model-name=bench", "--kv-memory=gms")
        args: tuple[str, ...]
        if self.backend == "reference":
            args = (*ours, f"--cache-tokens={tokens}")
        else:  # a prompt is computed in steps of a second: no progress for longer is a hang
            hidden, layers, heads = self.shape
            kv_bytes = tokens * 2 * layers * 2 * (hidden // heads) * 4
            cpu = "--dtype=float32 --enforce-eager --max-num-batched-tokens=512"
            sizes = f"--block-size={BLOCK_TOKENS} --max-model-len={MODEL_TOKENS}"
            memory = f"--kv-cache-memory-bytes={kv_bytes}"
            args = (*cpu.split(), *ours, *sizes.split(), memory)
        directory.mkdir(mode=0o700)
        env = dict(RandomModel.of(self.backend).env) | rig.PATIENT
        return LocalPod(
            directory,
            model,
            free_pod_ports(),
            backend=self.backend,
            backend_args=args,
            device_bytes=HOST_BYTES,
            env={name: os.environ.get(name, value) for name, value in env.items()},
        )


@dataclass
class Found:
    """Blocks as the next engine counts them, and those that clients know to be complete."""

    ttft_ms: dict[int, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: {kind: [] for kind in KINDS})
    )
    adopted_blocks: int = 0
    published_blocks: int = 0
    problems: list[str] = field(default_factory=list)

    def took_over(self, expected: int, kv: dict[str, Any]) -> None:
        """The blocks beyond `expected` are of tokens that no client has seen."""
        self.published_blocks += expected
        self.adopted_blocks += min(expected, kv["adopted_blocks"])
        if kv["adopted_blocks"] < expected:
            self.problems.append(f"{kv['adopted_blocks']} of {expected} adopted: {kv['note']}")


class KilledPod:
    """A pod in `directory` whose active engine is killed again and again."""

    def __init__(self, directory: Path, plan: Plan, found: Found) -> None:
        self._directory, self._plan, self._found = directory, plan, found
        self._random = random.Random(0)
        self._number = self._token = 0
        self._proof = self._fresh(PROOF_PROMPT, PROOF_MADE)
        self._known_blocks = full_blocks(PROOF_PROMPT, PROOF_MADE)  # of all that was sent so far

    async def first_tokens(self, _: PodRunner) -> None:
        """Every length, adopted and recomputed, `kills` times."""
        for number in range(self._plan.kills):
            for length in self._plan.lengths:
                rig.say(f"kills {number + 1} of {self._plan.kills}: {length} tokens")
                await self._adopted(length)
                await self._recomputed(length)

    async def _adopted(self, length: int) -> None:
        whole, target = await self._whole()
        prompt, times = self._fresh(length), self._found.ttft_ms[length]
        first = await self._answer(target, prompt)
        self._known_blocks += full_blocks(length, MADE)
        again = await self._answer(target, prompt)
        if again.token != whole.token:  # what follows would be counted from another takeover
            raise UnderstudyError("bench.disturbed", f"{whole.engine} died before it was killed")
        answer, served_ms = await self._kill(whole, target, prompt)
        assert again.first_token_ms is not None
        assert answer.first_token_ms is not None
        times["warm"].append(again.first_token_ms - again.sent_ms)
        times["adopted"].append(answer.first_token_ms - served_ms)
        if not first.text == again.text == answer.text:
            self._found.problems.append(f"{length} tokens: the answers differ")

    async def _recomputed(self, length: int) -> None:
        whole, target = await self._whole()
        answer, served_ms = await self._kill(whole, target, self._fresh(length))
        assert answer.first_token_ms is not None
        self._found.ttft_ms[length]["recomputed"].append(answer.first_token_ms - served_ms)
        self._known_blocks += full_blocks(length, MADE)

    async def _whole(self) -> tuple[Whole, Target]:
        """Once the pod is whole under a newer token than at the last kill, and the engine has shown
        that what it adopted works."""
        whole = await rig.whole_after(self._directory, self._token)
        host, _, port = whole.service.rpartition(":")
        target = Target(host, int(port))
        for _ in range(PROOFS):
            await self._answer(target, self._proof)
        return whole, target

    async def _kill(self, whole: Whole, target: Target, prompt: Prompt) -> tuple[Exchange, float]:
        """The answer to `prompt`, which is sent right after the kill, and when the next engine
        began to serve."""
        self._token = whole.token
        path = engine_sockets(self._directory)[whole.engine]
        await ask(path, CONTROL, kill_request(TARGET[self._plan.backend]))
        answer = await self._answer(target, prompt)
        (part,) = (each for each in engine_parts(self._directory) if each.name == answer.engine)
        status = await status_of(part)
        self._found.took_over(self._known_blocks, status["backend"]["kv"])
        if answer.token == whole.token:
            self._found.problems.append(f"{whole.engine} answered after it was killed")
        return answer, float(status["last_failover"]["active_mono_ms"])

    async def _answer(self, target: Target, prompt: Prompt) -> Exchange:
        """Raises UnderstudyError: `bench.no_answer`."""
        async with asyncio.timeout(SERVED_S):
            exchange = await send(target, prompt)
        if exchange.end is not End.DONE or exchange.status != 200:
            why = f"a request failed: {exchange.status} {exchange.end} {exchange.detail}"
            raise UnderstudyError("bench.no_answer", why)
        return exchange

    def _fresh(self, tokens: int, made: int = MADE) -> Prompt:
        """A prompt that nobody has sent, of a token per character and one for the beginning."""
        letters = "".join(self._random.choices(string.ascii_lowercase, k=tokens - 1))
        body: dict[str, Any] = {"model": "bench", "prompt": letters, "max_tokens": made}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        self._number += 1
        return Prompt(f"{self._number}", "/v1/completions", body)


def full_blocks(prompt_tokens: int, made: int) -> int:
    """Blocks that are complete once `made` tokens have come: the last one is not in the cache."""
    return (prompt_tokens + made - 1) // BLOCK_TOKENS if made else 0


async def measure(plan: Plan, base: Path) -> rig.Figures:
    found = Found()
    model = await make_random_model(base / "model", plan.shape_flags)
    pod = plan.pod(base / "pod", model)
    killed = KilledPod(pod.directory, plan, found)
    await rig.with_pod(pod.containers(), base / "log", killed.first_tokens)
    figures = {
        "backend": plan.backend,
        "kills_of_each": plan.kills,
        "ttft_ms": {
            str(length): {kind: rig.spread(times, 1) for kind, times in of_kinds.items()}
            for length, of_kinds in found.ttft_ms.items()
        },
        "adopted_blocks": found.adopted_blocks,
        "published_blocks": found.published_blocks,
    }
    return rig.document(figures, found.problems)


def main() -> None:
    parser = rig.arguments("bench_kv", "what a KV cache that outlives its engine is worth")
    parser.add_argument("--backend", choices=("vllm", "reference"), default="vllm")
    parser.add_argument("--kills", type=int, default=5, help="for each length and kind")
    flags = parser.parse_args()
    plan = Plan(flags.backend, flags.kills)
    if flags.quick:
        plan = Plan(flags.backend, 1, (900,), (256, 2, 4))
    rig.finish(rig.run("bench-kv-", partial(measure, plan)), is_json=flags.json)


if __name__ == "__main__":
    main()
