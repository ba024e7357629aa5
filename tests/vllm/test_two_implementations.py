"""The reference backend and stock vLLM give the same greedy tokens on one checkpoint: two
implementations, written apart, that check each other. float32 on both sides, 24 tokens a prompt.

Which prompts: of 48 of 1 to 200 random printable tokens, the first 20 for which the reference's
decoder has a best candidate that leads the second by GAP_MIN logits at every step. The two sum in
different orders and differ by up to some 1e-4 in a logit, so on those no rounding can decide.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from engine.backends.reference.random_model import PRINTABLE, write_random_model
from engine.supervisor import leftovers
from engine.supervisor.leftovers import Name
from tests.engine.reference.support import cache_for, decoder_of

TOKENS = 24
CANDIDATES = 48
WANTED = 20
GAP_MIN = 0.02
CONTEXT = 256
ROOT = str(Path(__file__).parents[2])
PROGRAM = str(Path(__file__).with_name("answer_tokens.py"))


@dataclass(frozen=True)
class Answered:
    prompt: list[int]
    tokens: list[int]
    gap: float  # the smallest lead of the chosen token over the next, over all steps


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Heads of 32, the least that vLLM's attention on the CPU takes."""
    directory = str(tmp_path_factory.mktemp("model") / "checkpoint")
    write_random_model(directory, seed=4, hidden=128, layers=3, intermediate=384)
    return directory


@pytest.fixture(scope="module")
def answered(model: str) -> list[Answered]:
    """What the reference's decoder says, where nothing is close."""
    source = random.Random(4)
    prompts = [
        [source.choice(PRINTABLE) for _ in range(source.randint(1, 200))] for _ in range(CANDIDATES)
    ]
    usable = (each for each in answers_of(model, prompts) if each.gap >= GAP_MIN)
    return list(itertools.islice(usable, WANTED))


def answers_of(model: str, prompts: list[list[int]]) -> Iterator[Answered]:
    decoder = decoder_of(model)
    cache = cache_for(decoder, slots=1, max_context=CONTEXT)
    for prompt in prompts:
        logits = decoder.forward(cache, 0, prompt, 0)
        tokens: list[int] = []
        gaps: list[float] = []
        while len(tokens) < TOKENS:
            second, best = np.partition(logits, -2)[-2:]
            gaps.append(float(best - second))
            tokens.append(int(np.argmax(logits)))
            logits = decoder.forward(cache, 0, tokens[-1:], len(prompt) + len(tokens) - 1)
        yield Answered(prompt, tokens, min(gaps))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_both_implementations_give_the_same_greedy_tokens(
    ranks: int, model: str, answered: list[Answered], tmp_path: Path
):
    """Ask stock vLLM, on one rank and on two: every token of every prompt is the reference's."""
    assert len(answered) == WANTED
    assert len({tuple(each.tokens) for each in answered}) > WANTED / 2  # they do differ
    job, found = tmp_path / "job.json", tmp_path / "answer.json"
    prompts = [each.prompt for each in answered]
    job.write_text(
        json.dumps({"model": model, "prompts": prompts, "tokens": TOKENS, "ranks": ranks})
    )
    with tempfile.TemporaryDirectory(prefix="us") as temporary:
        done = subprocess.run(
            [sys.executable, PROGRAM, str(job), str(found)],
            env={**environment(), "TMPDIR": temporary},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(found.read_text())
    for name in answer["left"]:
        leftovers.remove(Name(*name))
    assert answer["tokens"] == [each.tokens for each in answered]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UNDERSTUDY_")}
    alone = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    fast = {"TORCH_COMPILE_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return {**kept, **alone, **fast, **bound, "PYTHONPATH": ROOT}
