"""The tests run on the model runner that vLLM chooses on a GPU, and without its variable nothing of
vLLM or Triton is touched."""

from __future__ import annotations

import pytest
from vllm.config import VllmConfig
from vllm.triton_utils import HAS_TRITON

from engine.backends.vllm import versions
from tests.vllm.conftest import RUNNER


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch
def test_the_tests_run_on_the_runner_that_they_are_for():
    assert versions.in_use(VllmConfig()) == RUNNER
    assert (RUNNER == versions.V2) == HAS_TRITON
