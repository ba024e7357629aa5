"""vLLM's worker without its weights: released while it is parked, mapped again before it computes.

The tensors of the model stay what they are: addresses where for a while nothing is mapped. On a GPU
captured graphs keep these addresses, too. So a step that comes too early must be refused: it would
end the process (SIGSEGV; on a GPU the context is lost), and nobody would say why.

Surprising: `sleep` and `wake_up` know nothing of this. vLLM sleeps with its weights mapped, and our
backend has them released afterwards, and mapped again before it wakes vLLM.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker as StockGPUWorker

from engine.backends.vllm.membership import Answer, answering, reporting
from engine.backends.vllm.worker import weights
from plumbing.errors import UnderstudyError


class OffloadingWorker(StockGPUWorker):
    """What both our workers do about their weights."""

    def execute_model(self, *asked: Any, **more: Any) -> Any:
        self.check_weights()
        return super().execute_model(*asked, **more)

    def execute_dummy_batch(self) -> None:
        self.check_weights()
        super().execute_dummy_batch()

    def check_weights(self) -> None:
        """Report that something was to be computed without weights, which ends this incarnation.

        Raises:
            UnderstudyError: `vllm.weights_away`.
        """
        if weights.of_this_process().is_away:
            with reporting():
                raise UnderstudyError(
                    "vllm.weights_away",
                    f"rank {self.rank} was asked to compute while its weights are only in host"
                    " memory",
                )

    def finish_work(self) -> None:
        """Nothing that was started may still read weights; on host memory nothing can."""

    @answering
    def understudy_place_weights(self, is_away: bool, budget_s: float) -> Answer:
        """While parked: release the weights and have their memory freed, or map them again where
        they were. `note`: why they are still mapped, or why their memory is not free yet.

        Raises:
            UnderstudyError: `vllm.not_parked`; they cannot be mapped again, so this process must
                end.
        """
        ours = weights.of_this_process()
        if not is_away:
            ours.bring_back(budget_s)
            return {"is_away": False, "freed_bytes": 0, "note": ""}
        if ours.is_awake:
            raise UnderstudyError(
                "vllm.not_parked", "the weights are in use: this rank has KV memory"
            )
        self.finish_work()
        freed_bytes, note = ours.let_go()
        return {"is_away": ours.is_away, "freed_bytes": freed_bytes, "note": note}
