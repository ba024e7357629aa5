"""vLLM's worker with its own GPU, parked and woken as in `worker.py`."""

from __future__ import annotations

import torch

from engine.backends.process_memory import Room
from engine.backends.vllm.worker import weights
from engine.backends.vllm.worker.worker import ParkingWorker


class GPUWorker(ParkingWorker):
    """A worker with its own GPU."""

    ranks_together = 1
    _are_comms_suspended = False

    def room(self) -> Room:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        return Room(free_bytes, total_bytes, f"the memory of {weights.device_of(self.rank)}")

    def _park(self) -> None:
        from vllm.distributed.parallel_state import suspend_device_comms

        self.finish_work()
        super()._park()
        torch.cuda.empty_cache()  # the engine that wakes needs what torch has cached
        if self.model_config.enable_nccl_comm_suspend and not self._are_comms_suspended:
            suspend_device_comms()
            self._are_comms_suspended = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        from vllm.distributed.parallel_state import resume_device_comms

        super().wake_up(tags)
        if self._are_comms_suspended:
            resume_device_comms()
            self._are_comms_suspended = False

    def finish_work(self) -> None:
        torch.cuda.synchronize()  # no kernel or copy may touch what is unmapped
