"""vLLM's own worker for a GPU, which takes up requests. It keeps its memory when it is told to
sleep."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker as StockGPUWorker

from engine.backends.vllm.resume import hook
from tests.vllm.resume_matrix.standing import Standing


class Worker(Standing, StockGPUWorker):  # type: ignore[misc]  # unknown where types are checked
    def init_device(self) -> None:
        super().init_device()
        self.problem = hook.install(self.vllm_config, self.model_runner)

    def sleep(self, level: int = 1) -> None:
        pass

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass
