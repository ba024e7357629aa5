"""vLLM's worker on host memory, parked and woken; `worker.py` says how.

Alone in this file because vLLM's own CPU worker puts placeholders into torch when it is imported,
and has to be imported before everything else of vLLM's workers: a GPU's worker must never see it.
"""

from __future__ import annotations

# isort: off
from vllm.v1.worker.cpu_worker import CPUWorker as StockCPUWorker
# isort: on

import ctypes

import torch

from engine.backends.free_memory import Room, read_room
from engine.backends.vllm.worker.kv_arena import Range
from engine.backends.vllm.worker.kv_host import HostRange
from engine.backends.vllm.worker.timer_slack import new_threads_may_wake_late
from engine.backends.vllm.worker.worker import Parking, reporting


class CPUWorker(Parking, StockCPUWorker):
    """On host memory: the ranks share one machine's."""

    def init_device(self) -> None:
        with new_threads_may_wake_late():  # this is where Gloo's groups are made
            super().init_device()

    def room(self) -> Room:
        return read_room()

    def kv_bytes_of_all(self, kv_bytes: int) -> int:
        return kv_bytes * int(self.parallel_config.world_size)

    def reserve(self, kv_bytes: int) -> Range:
        return HostRange(kv_bytes, int(self.parallel_config.world_size))

    def tensor_at(self, address: int, size_bytes: int) -> torch.Tensor:
        buffer = (ctypes.c_int8 * size_bytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.int8)

    def determine_available_memory(self) -> int:
        """vLLM's, less its demand that the memory be free now: the active engine has it."""
        with reporting():
            kv_bytes = self._enough_for_a_sequence(self._kv_bytes_asked())
            if self._should_warm_up_model():
                self.model_runner.warming_up_model()
            return kv_bytes
