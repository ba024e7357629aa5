"""Goal: the self-test passes a sound engine and finds each of sixteen planted faults.
Method: a real engine in a separate process (`proven_engine.py`), in which one fault after the other
is planted (`proven_faults.py`); and the plan, without an engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.backends.vllm.api import self_test
from engine.backends.vllm.api.self_test import (
    MADE,
    NUMBERS,
    ONE_LEFT,
    TOKENS,
    Trial,
    TrialAnswer,
)
from engine.backends.vllm.worker.kv_arena import BLOCKS
from hack import v2_on_cpu
from tests.engine.pod import ROOT
from tests.vllm.proven_faults import OF_BOTH

PROGRAM = str(Path(__file__).with_name("proven_engine.py"))
# In CI on V2, because each test takes it ten seconds by Triton's interpreter.
FEW = (
    "a block that is reused was altered",
    "the seed is not carried",
    "penalties count the prompt alone",
)
LOGITS = 30.0  # by which a model's own preferences may differ


def report_of(base: Path, model: Path, runner: str, faults: Iterable[str]) -> Any:
    answer = base / "report.json"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    env = {**kept, "PYTHONPATH": ROOT, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    # A short name: vLLM's sockets are below it, and a socket's path has 107 bytes.
    with tempfile.TemporaryDirectory(prefix="us-st-") as temporary:
        done = subprocess.run(
            [sys.executable, PROGRAM, str(model), str(answer), *faults],
            env={**env, **v2_on_cpu.RUNNERS[runner], "TMPDIR": temporary},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    assert answer.exists(), done.stdout
    return json.loads(answer.read_text())


@pytest.fixture(scope="module", params=["v1", "v2"])
def report(request: pytest.FixtureRequest, model: Path, tmp_path_factory: Any) -> Any:
    faults = (*OF_BOTH, "healthy") if request.param == "v1" else FEW
    return report_of(tmp_path_factory.mktemp("proof"), model, request.param, faults)


def test_a_sound_engine_passes_and_each_planted_fault_is_found(report: Any):
    """Before all faults, and with V1 also behind them."""
    assert {each["problem"] for each in report["healthy"]} == {""}
    faults = OF_BOTH if report["runner"] == "v1" else FEW
    assert [fault for fault in faults if not report[fault][0]["problem"]] == []


def test_it_stays_within_the_blocks_that_scratch_memory_keeps_apart(report: Any):
    length = self_test.prompt_tokens(32, 512)
    most = self_test.most_blocks(32, length)
    assert 0 < report["last_block"] <= most < BLOCKS
    assert len(self_test.rows(length, 264, (55, 51))) == self_test.ROWS


# ---------------------------------------------------------------------- the plan


@pytest.mark.parametrize("block_tokens", [16, 32, 64, 128, 1056])
def test_a_cut_leaves_one_token_beside_whole_blocks(block_tokens: int):
    """In more than one block where the model has room, otherwise in one; or a reason."""
    length = self_test.prompt_tokens(block_tokens, 1 << 20)
    assert (length + ONE_LEFT) % block_tokens == 1
    assert (length + ONE_LEFT) // block_tokens == 2
    assert length >= self_test.PROMPT_MIN
    with pytest.raises(ValueError, match="max-model-len"):
        self_test.prompt_tokens(block_tokens, self_test.PROMPT_MIN)


def test_blocks_that_are_too_small_for_scratch_memory_are_refused():
    with pytest.raises(ValueError, match="too small"):
        self_test.prompt_tokens(4, 1 << 20)


def test_penalties_decide_by_more_than_any_rounding():
    """Whatever the model prefers, by up to `LOGITS`, at no step are two tokens nearly equal."""
    (row,) = [each for each in self_test.rows(58, 264, None) if each.name == "penalties"]
    counts = dict.fromkeys(row.sampling["logit_bias"], 0)
    for _ in range(MADE):
        values = sorted(_bounds(token, row, counts) for token in counts)
        (low, _, best), (_, high, _) = values[-1], max(values[:-1], key=lambda each: each[1])
        assert low > high
        counts[best] += 1


def _bounds(token: int, row: Trial, counts: dict[int, int]) -> tuple[float, float, int]:
    """The least and the most that vLLM makes of the logit of `token`."""
    asked, count = row.sampling, counts[token]
    is_known = count or token in row.prompt
    shrink = asked["repetition_penalty"] if is_known else 1.0
    penalty = asked["frequency_penalty"] * count + asked["presence_penalty"] * bool(count)
    low, high = (
        (asked["logit_bias"][token] + sign * LOGITS / 2) / shrink - penalty for sign in (-1, 1)
    )
    return low, high, token


def test_rows_choose_among_tokens_of_every_vocabulary():
    for vocabulary in (96, 264, 152064):
        for row in self_test.rows(26, vocabulary, (55, 51)):
            named = {*row.sampling.get("allowed_token_ids", ()), *row.prompt}
            assert len(row.prompt) == 26
            assert max(named) < vocabulary // 2


WHOLE = TrialAnswer([1, 2, 3], [0, 0, -1.0], [9, 9, 0.1], "length")


@pytest.mark.parametrize(
    ("tokens", "numbers", "finish", "is_equal"),
    [
        ([1, 2, 3], [0, 0, -1.1], "length", True),
        ([1, 2, 3], [5, 0, -1.1], "length", True),  # replayed: not known
        ([1, 2, 3], [0, -0.3, -1.1], "length", False),
        ([1, 2, 3], [0, float("nan"), -1.1], "length", False),
        ([1, 4, 3], [0, 0, -1.1], "length", False),
        ([1, 2, 4], [0, 0, -1.1], "length", True),  # nearly equal
        ([1, 2], [0, 0], "length", False),
        ([1, 2, 3], [0, 0, -1.1], "stop", False),
    ],
)
def test_numbers_are_compared_behind_the_cut_and_tokens_where_one_is_clearly_best(
    tokens: list[int], numbers: list[float], finish: str, is_equal: bool
):
    """Tokens alone are compared whatever the numbers say."""
    other = TrialAnswer(tokens, numbers, [9] * len(tokens), finish)
    for by in (NUMBERS, TOKENS):
        found = self_test.difference(Trial("a row", [], {}, by), WHOLE, other, 0.2, 1)
        equal = is_equal if by == NUMBERS else (tokens, finish) == (WHOLE.tokens, "length")
        assert (found == "") == equal
