"""The tests run on the model runner that vLLM chooses on a GPU, and without its variable nothing of
vLLM or Triton is touched."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from vllm.config import VllmConfig
from vllm.triton_utils import HAS_TRITON

from engine.backends.vllm import versions
from hack import v2_on_cpu
from tests.vllm.conftest import RUNNER

BACKENDS = "from triton.backends import backends; print(*sorted(backends))"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch
def test_the_tests_run_on_the_runner_that_they_are_for():
    assert versions.in_use(VllmConfig()) == RUNNER
    assert (RUNNER == versions.V2) == HAS_TRITON


@pytest.mark.parametrize("runner", v2_on_cpu.RUNNERS)
def test_a_process_finds_the_backend_for_v2_only(runner: str):
    """Start Python in an environment as the tests' engines have."""
    env = {**os.environ, **v2_on_cpu.RUNNERS[runner], "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", BACKENDS],
        env=env,
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert ("cpu" in done.stdout.split()) == (runner == "v2")
