"""vLLM's own worker for the CPU, which takes up requests."""

from __future__ import annotations

# isort: off
from vllm.v1.worker.cpu_worker import CPUWorker
# isort: on

from engine.backends.vllm.resume import hook
from tests.vllm.resume_matrix.standing import Standing


class Worker(Standing, CPUWorker):  # type: ignore[misc]  # unknown where types are checked
    def init_device(self) -> None:
        super().init_device()
        self.problem = hook.install(self.vllm_config, self.model_runner)
