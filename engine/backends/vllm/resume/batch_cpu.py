"""`batch.py` for vLLM's CPU build, which must not be imported by a GPU worker."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from engine.backends.vllm.resume import batch


class ResumingCPURunner(batch._Resuming, CPUModelRunner):
    """Keeps the generators of requests whose prefill is not complete out of the sampling: vLLM
    takes such a draw back by a generator's offset, and one on the CPU has none."""

    _held: dict[int, Any]

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        is_partial = self.discard_request_mask.np[: self.input_batch.num_reqs]
        self._held = {
            index: generators.pop(index)
            for index in is_partial.nonzero()[0].tolist()
            if index in generators
        }
        return super()._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators.update(self._held)


def install(runner: Any) -> str:
    if type(runner) is CPUModelRunner:
        runner.__class__ = ResumingCPURunner
        return ""
    return batch.install(runner)
