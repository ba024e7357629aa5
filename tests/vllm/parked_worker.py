"""Our worker on host memory with weights of its own, which no supervisor has started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.backends.vllm.worker.worker_cpu import CPUWorker, StockCPUWorker  # isort: skip - comes first
from engine.backends.process_memory import Room
from engine.backends.vllm import membership
from engine.backends.vllm.worker import weights


class UnsupervisedWorker(CPUWorker):
    def init_device(self) -> None:
        member: Any = SimpleNamespace(report=lambda error: None, seat=None)
        membership._member = member
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        ours: Any = SimpleNamespace(bytes=0, identity={}, cannot_offload="")
        ours.kept = SimpleNamespace(is_away=False, bring_back=lambda budget_s: None)
        ours.kept.reader = SimpleNamespace(epoch="0" * 32)
        weights._of_this_process = ours
        StockCPUWorker.load_model(self, **kwargs)


class PrivateWorker(UnsupervisedWorker):
    """With KV memory of its own, too."""

    def room(self) -> Room:
        return Room(1 << 40, 1 << 40, "a test")
