"""Our worker on host memory with weights of its own: no supervisor. KV memory is borrowed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

# isort: off
from vllm.v1.worker.cpu_worker import CPUWorker as StockCPUWorker
# isort: on

from engine.backends.vllm import membership
from engine.backends.vllm.worker import weights
from engine.backends.vllm.worker.worker_cpu import CPUWorker


class Worker(CPUWorker):
    def init_device(self) -> None:
        member: Any = SimpleNamespace(
            leftover=lambda path: None, report=lambda error: None, seat=None
        )
        membership._member = member
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        ours: Any = SimpleNamespace(
            is_awake=False, is_away=False, bytes=0, epoch="0" * 32, identity={}
        )
        weights._of_this_process = ours
        StockCPUWorker.load_model(self, **kwargs)
