"""What is measured, how often, and with which pods and requests.

Owns the sizes: prompts that end within a block, so that a repeated prompt computes no block anew,
and a KV cache with room for every block of the run, so that none is evicted. Then what a successor
must adopt follows from what was asked.
"""

from __future__ import annotations

import os
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from understudy.drill.records import Prompt
from understudy.up.local_pod import LocalPod
from understudy.up.ports import free_pod_ports
from understudy.up.random_model import RandomModel

MODEL_NAME = "bench"
BLOCK_TOKENS = 32  # of the reference backend; on the CPU vLLM takes multiples of it
MODEL_TOKENS = 2048  # the random model's longest sequence
MADE = 8  # tokens of an answer whose first one is timed
LONGEST = MODEL_TOKENS - MADE
WHOLE_DEVICE = "1TiB"  # more than any GPU has: the memory service takes what there is
HOST_BYTES = "8GiB"
# Every death is the bench's, also where others use the machine: that is not what is measured here.
PATIENT = {"UNDERSTUDY_HANG_MS": "60000", "UNDERSTUDY_HANG_ALONE_MS": "60000"}
TARGET = {"reference": "http", "vllm": "api"}  # killed: nobody accepts until another engine serves


@dataclass(frozen=True, slots=True)
class Shape:
    """A random model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int = 2
    head_dim: int = 0  # 0: hidden / heads

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            f"--hidden={self.hidden}",
            f"--layers={self.layers}",
            f"--heads={self.heads}",
            f"--kv-heads={self.kv_heads}",
            f"--head-dim={self.head_dim or self.hidden // self.heads}",
        )

    def kv_bytes(self, tokens: int) -> int:
        """In float32."""
        per_head = self.head_dim or self.hidden // self.heads
        return tokens * 2 * self.layers * self.kv_heads * per_head * 4


@dataclass(frozen=True, slots=True)
class Plan:
    """`kills` of every kind of first token and length; `audited` kills with checksums, under
    `streams`; `pairs` of throughput, of `requests` each."""

    backend: str = "vllm"
    is_cuda: bool = False
    lengths: tuple[int, ...] = (100, 900, LONGEST)
    kills: int = 5
    audited: int = 10
    streams: int = 4
    stream_tokens: int = 400
    pairs: int = 20
    requests: int = 16
    request_tokens: int = 64
    shape: Shape = Shape(2048, 8, 16)  # so large that a prefill shows
    # So small that what the scheduler does shows: a step takes a few milliseconds.
    quick_shape: Shape = Shape(1024, 5, 8)
    is_judged: bool = True

    @property
    def kept_tokens(self) -> int:
        """Of everything that is asked of one pod, and one block for the end of each."""
        asked = sum(length + MADE + BLOCK_TOKENS for length in self.lengths)
        streamed = self.streams * (100 + self.stream_tokens + BLOCK_TOKENS)
        return 2 * self.kills * asked + self.audited * streamed + 2 * MODEL_TOKENS

    def flags(self, memory: str, shape: Shape, *more: str) -> tuple[str, ...]:
        """For the engines of a pod."""
        ours = (f"--served-model-name={MODEL_NAME}", f"--kv-memory={memory}", *more)
        if self.backend == "reference":
            return (*ours, f"--cache-tokens={self.kept_tokens}")
        # A prompt is computed in steps of a second: one without progress for longer is a hang.
        on_cpu = ("--dtype=float32", "--enforce-eager", "--max-num-batched-tokens=512")
        return (
            *(() if self.is_cuda else on_cpu),
            *ours,
            f"--block-size={BLOCK_TOKENS}",
            f"--max-model-len={MODEL_TOKENS}",
            f"--kv-cache-memory-bytes={shape.kv_bytes(self.kept_tokens)}",
        )

    def pod(self, directory: Path, model: Path, flags: tuple[str, ...]) -> LocalPod:
        directory.mkdir(mode=0o700)
        wanted = {} if self.is_cuda else dict(RandomModel.of(self.backend).env)
        return LocalPod(
            directory,
            model,
            free_pod_ports(),
            backend=self.backend,
            backend_args=flags,
            memory="cuda" if self.is_cuda else "host",
            device_bytes=WHOLE_DEVICE if self.is_cuda else HOST_BYTES,
            env={name: os.environ.get(name, value) for name, value in (wanted | PATIENT).items()},
            is_direct=True,  # clients see what the engines themselves do
        )


QUICK = Plan(
    kills=1,
    audited=1,
    streams=2,
    stream_tokens=100,
    pairs=2,
    requests=4,
    request_tokens=16,
    shape=Shape(256, 2, 4),
    quick_shape=Shape(256, 2, 4),
    is_judged=False,
)
# An engine takes 25 s to come back.
QUICK_VLLM = replace(QUICK, lengths=(900,), pairs=1)


class Prompts:
    """Prompts that nobody has asked before, of a token per character and one for the beginning."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._numbers: Iterator[int] = count()

    def fresh(self, tokens: int, made: int = MADE) -> Prompt:
        letters = self._random.choices(string.ascii_lowercase, k=tokens - 1)
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": "".join(letters),
            "max_tokens": made,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        return Prompt(f"{next(self._numbers)}", "/v1/completions", body)


def full_blocks(prompt_tokens: int, made: int) -> int:
    """Blocks that are complete once `made` tokens have come: the last one is not in the cache."""
    return (prompt_tokens + made - 1) // BLOCK_TOKENS if made else 0
