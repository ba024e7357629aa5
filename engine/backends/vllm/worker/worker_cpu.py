"""vLLM's worker on host memory, parked and woken as in `worker.py`.

In its own file because vLLM's CPU worker installs placeholders in torch when it is imported, and
must be imported before anything else of vLLM's workers; a GPU worker must never import it.
"""

from __future__ import annotations

# isort: off
from vllm.v1.worker.cpu_worker import CPUWorker as StockCPUWorker
# isort: on

from engine.backends.process_memory import Room, read_room
from engine.backends.vllm.process_tuning import new_threads_may_wake_late
from engine.backends.vllm.worker.worker import ParkingWorker


class CPUWorker(ParkingWorker, StockCPUWorker):
    """A worker on host memory, which all ranks share."""

    def init_device(self) -> None:
        with new_threads_may_wake_late():  # creates Gloo's groups
            super().init_device()

    def room(self) -> Room:
        return read_room()

    @property
    def ranks_together(self) -> int:
        return int(self.parallel_config.world_size)

    def determine_available_memory(self) -> int:
        """As vLLM does, but without requiring free memory: the active engine has it."""
        if self._should_warm_up_model():
            self.model_runner.warming_up_model()
        return int(self.cache_config.kv_cache_memory_bytes)
