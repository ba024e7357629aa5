"""What every test here needs: vLLM, which the environment of `make test` does not have.

The tests run on the model runner that vLLM chooses on a GPU, V2, and those that name another one on
that: `MODEL_RUNNER=v1` in the environment runs all of them on V1.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from hack import v2_on_cpu
from tests.e2e.pods import PodHome, make_model
from understudy.up.models import VLLM_RANDOM_MODEL

RUNNER = os.environ.get("MODEL_RUNNER", v2_on_cpu.DEFAULT)
IS_INTERPRETED = RUNNER == "v2"  # a token takes ten times as long

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    v2_on_cpu.use(RUNNER)

# Two cores import vLLM four times for an engine of two ranks, beside one that serves.
WHOLE_DEADLINE_S = 240.0
LONGEST = ("test_pod_deaths.py", "test_pod_resume.py", "test_pool.py", "test_resume.py")


def pytest_collect_file() -> None:
    """All of vLLM is imported before the first module here is, and only by a process that runs
    tests: the one that distributes them to others collects none."""
    if find_spec("vllm") is None:
        return
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and vLLM speak as they are imported: once, here
        for name in ("worker.worker_cpu", "api.http", "api.self_test", "api.arguments"):
            import_module(f"engine.backends.vllm.{name}")  # vLLM's worker for the CPU comes first
        for name in ("ranks", "kept_world"):
            import_module(f"tests.vllm.{name}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: at the end no test process waits for another one."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """All of vLLM is imported now; the weights' loader collects garbage with every model."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint that vLLM can serve."""
    return make_model(tmp_path_factory.mktemp("vllm") / "model", VLLM_RANDOM_MODEL.shape)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[PodHome]:
    """A pod of two vLLM engines of two ranks, which every test of a module leaves whole."""
    base = tmp_path_factory.mktemp("p")
    found = PodHome(
        base,
        model,
        WHOLE_DEADLINE_S,
        starts_in_order=False,  # an engine alone imports vLLM on one core for most of its start
        backend="vllm",
        backend_args=VLLM_RANDOM_MODEL.arguments,
        tensor_parallel=2,
        env=VLLM_RANDOM_MODEL.env,
    )
    try:
        yield found
    finally:
        found.close()
