"""Our worker on host memory with weights of its own, which no supervisor has started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.backends.vllm.worker.worker_cpu import CPUWorker, StockCPUWorker  # isort: skip - comes first
from engine.backends.host_range import HostRange
from engine.backends.process_memory import Room
from engine.backends.vllm import membership
from engine.backends.vllm.worker import weights
from engine.backends.vllm.worker.kv_arena import AddressRange


class UnsupervisedWorker(CPUWorker):
    def init_device(self) -> None:
        member: Any = SimpleNamespace(report=lambda error: None, seat=None)
        membership._member = member
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        ours: Any = SimpleNamespace(is_away=False, bytes=0, identity={})
        ours.cannot_offload, ours.epoch = "", "0" * 32
        weights._of_this_process = ours
        StockCPUWorker.load_model(self, **kwargs)


class PrivateWorker(UnsupervisedWorker):
    """With KV memory of its own, too."""

    def reserve(self, kv_bytes: int) -> AddressRange:
        return HostRange(kv_bytes, read=lambda: Room(1 << 40, 1 << 40, "a test"))
