"""What a writer of weights needs: the weights and one slab, on a model that shows it."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.backends.memory_session import SOCKET_DIR_ENV
from engine.backends.reference.random_model import write_random_model
from engine.backends.vllm.api.main import ENVIRONMENT
from tests.gms.bench import MIB, GmsProcess
from tests.helpers import until

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


def own_bytes(pid: int) -> int:
    """Memory that process `pid` holds itself or maps of the service's: the files that it reads
    from are mapped too, and are the page cache's."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


@pytest.mark.slow
def test_writer_needs_its_weights_and_one_slab(gms: GmsProcess, tmp_path: Path):
    """Load 370 MiB of float32 and watch the loader's memory all the while: it peaks at the weights
    and less than one slab more, and comes to rest at the weights, once."""
    model = tmp_path / "model"
    write_random_model(str(model), **SHAPE)
    with Loader(gms.directory, model) as loader:
        assert loader.hear()["is"] == "ready"
        before = peak = own_bytes(loader.pid)
        loader.go_on()

        def is_over() -> bool:
            nonlocal peak
            peak = max(peak, own_bytes(loader.pid))
            return loader.has_spoken()

        until(is_over, "the weights to be there", deadline_s=120)
        settled = loader.hear()
        after = own_bytes(loader.pid)
    weights, slab = settled["tensors"], max(settled["slabs"])
    assert weights >= WEIGHTS_BYTES_MIN
    print(f"{weights=} {slab=} peak={peak - before} after={after - before}")
    assert peak - before <= weights + slab
    assert after - before <= weights + BESIDES_BYTES


class Loader:
    """A `weights_process`, with the allocator set as engines set it."""

    def __init__(self, directory: str, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.weights_process", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **ENVIRONMENT, SOCKET_DIR_ENV: directory, "OMP_NUM_THREADS": "1"},
        )
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self) -> Any:
        """The next thing it says."""
        said = self._said.get(timeout=120)
        assert said, "the loader ended"
        return json.loads(said)

    def has_spoken(self) -> bool:
        return not self._said.empty()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"is"'):  # vLLM logs there too
                self._said.put(line)
        self._said.put("")

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._thread.join()
        self._process.communicate()
