"""Our worker on host memory with private weights: no supervisor, no memory service."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.backends.vllm.worker.worker_cpu import CPUWorker, StockCPUWorker  # isort: skip - comes first
from engine.backends.process_memory import Room
from engine.backends.vllm import membership
from engine.backends.vllm.worker import weights
from engine.backends.vllm.worker.kv_arena import AddressRange
from engine.backends.vllm.worker.kv_host import HostRange


class PrivateWorker(CPUWorker):
    free_bytes = 1 << 40

    def init_device(self) -> None:
        member: Any = SimpleNamespace(
            leftover=lambda path: None, report=lambda error: None, seat=None
        )
        membership._member = member
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        ours: Any = SimpleNamespace(is_awake=False, is_away=False, bytes=0, epoch="", identity={})
        ours.cannot_offload = ""
        weights._of_this_process = ours
        StockCPUWorker.load_model(self, **kwargs)

    def reserve(self, kv_bytes: int) -> AddressRange:
        return HostRange(kv_bytes, read=lambda: Room(self.free_bytes, 1 << 40, "a test"))

    def find_free(self, free_bytes: int) -> None:
        """From now on so much memory is free."""
        self.free_bytes = free_bytes
