"""vLLM's own worker, which takes up requests: without a memory service, and never parked. It keeps
its memory when it is told to sleep."""

from __future__ import annotations

from typing import Any

# isort: off
from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as StockWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as StockWorker
# isort: on

from engine.backends.vllm import resume


class Worker(StockWorker):  # type: ignore[misc]  # unknown where types are checked
    """Answers what the backend asks of every worker."""

    problem = ""  # what is in the way of resuming

    def init_device(self) -> None:
        super().init_device()
        self.problem = resume.install(self.vllm_config, self.model_runner)

    def sleep(self, level: int = 1) -> None:
        pass

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass

    def understudy_status(self) -> dict[str, Any]:
        return self._answer(
            weights_bytes=0,
            kv_bytes=0,
            epoch="",
            identity={"models": {}},
            cannot_resume=self.problem,
            cannot_offload="it has no memory service",
        )

    def understudy_join(self, token: int) -> dict[str, Any]:
        return self._answer()

    def understudy_take_kv(self, deadline_s: float) -> dict[str, Any]:
        return self._answer()

    def _answer(self, **more: Any) -> dict[str, Any]:
        return {"rank": self.rank, "code": "", "problem": "", **more}
