"""A real engine parks and wakes: what its KV cache holds when, and that its answers stay the same.

One engine with our worker and private weights, in a separate process; every test reads its report,
which takes as long as vLLM takes to start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.pod import ROOT

PROGRAM = str(Path(__file__).with_name("parked_engine.py"))


@pytest.fixture(scope="module")
def report(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    answer = tmp_path_factory.mktemp("answer") / "report.json"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    env = {**kept, "PYTHONPATH": ROOT, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # The engine core in the program's process, so that vLLM is imported once less, and no compiler.
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, PROGRAM, str(model), str(answer)],
        env={**env, "TMPDIR": str(answer.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert answer.exists(), done.stdout
    return json.loads(answer.read_text())


def test_proposed_size_holds_the_proposed_sequences(report: Any):
    """The engine was started with the proposal: room for its four sequences of full length."""
    assert report["blocks"] * report["block_tokens"] >= 4 * 512


def test_standby_holds_nothing_of_its_cache(report: Any):
    """Resident: something after a warm-up on scratch, nothing when parked, something when used."""
    states = [
        (report[name]["kv_hold"], report[name]["kv_resident_bytes"] > 0)
        for name in ("scratch", "parked", "still_parked", "used")
    ]
    assert states == [("scratch", True), ("parked", False), ("parked", False), ("taken", True)]
    assert all(report[name]["ok"] for name in ("scratch", "parked", "taken", "used"))
    kv_bytes = report["parked"]["kv_bytes"]
    assert 0 <= report["proposed_bytes"] - kv_bytes < 1 << 20  # rounded down to whole blocks
    assert report["taken"]["kv_bytes"] == kv_bytes


def test_answers_are_the_same_before_and_after(report: Any):
    """The same greedy tokens on scratch, after each of two wakes, and after a refused reload."""
    first, *others = report["tokens"]
    assert others == [first] * 3


def test_machine_without_room_is_reported_in_the_answer(report: Any):
    """The deadline passes on a real rank: a code and both numbers; the engine lives."""
    refused = report["refused"]
    assert (refused["ok"], refused["code"]) == (False, "engine.kv_memory_busy")
    assert "MiB and 0 B are free" in refused["error"]


def test_a_warm_up_is_not_repeated(report: Any):
    """It would write to blocks 1, 2 and so on, whoever's they are."""
    assert "warm up while its KV memory is taken" in report["warm_up"]


def test_weights_are_not_reloaded(report: Any):
    """vLLM's own call for it, through its own RPC."""
    assert "start engines with the new weights" in report["reload"]
