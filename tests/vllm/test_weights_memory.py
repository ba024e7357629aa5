"""What a writer of weights needs: the weights and one slab, on a model that shows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.backends.memory_session import SOCKET_DIR_ENV
from engine.backends.reference.random_model import write_random_model
from engine.backends.vllm.api.main import ENVIRONMENT
from tests.gms.bench import MIB, GmsProcess
from tests.helpers import until
from tests.vllm.weights_process import own_bytes

SHAPE = {"hidden": 1024, "heads": 16, "kv_heads": 8, "intermediate": 2816, "layers": 8}
WEIGHTS_BYTES_MIN = 300 * MIB
# What a load leaves besides: rotary tables, scratch of the reading thread, pages of the heap.
BESIDES_BYTES = 24 * MIB


@pytest.fixture
def gms() -> Iterator[GmsProcess]:
    directory = tempfile.mkdtemp(prefix="gms-")
    server = GmsProcess(directory, device_bytes=1024 * MIB).start()
    yield server
    server.stop()
    shutil.rmtree(directory)


@pytest.mark.slow
def test_writer_needs_its_weights_and_one_slab(gms: GmsProcess, tmp_path: Path):
    """Load 370 MiB of float32, with the allocator set as engines set it, and watch the loader's
    memory all the while: it peaks at the weights and less than one slab more, and comes to rest at
    the weights, once."""
    model, answer = tmp_path / "model", tmp_path / "answer"
    write_random_model(str(model), **SHAPE)
    env = {**os.environ, **ENVIRONMENT, SOCKET_DIR_ENV: gms.directory, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.vllm.weights_process", str(model), str(answer)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    peak = 0

    def is_over() -> bool:
        nonlocal peak
        assert loader.poll() is None, "the loader ended"
        peak = max(peak, own_bytes(loader.pid))
        return answer.exists()

    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, **quiet) as loader:
        until(is_over, "the weights to be there", deadline_s=240)
        after = own_bytes(loader.pid)
        loader.kill()
    found = json.loads(answer.read_text())
    weights, before = found["tensors"], found["before"]
    assert weights >= WEIGHTS_BYTES_MIN
    assert peak - before <= weights + found["slab"]
    assert after - before <= weights + BESIDES_BYTES
