"""A worker for `proven_engine.py`, in the engine core's process, in which faults can be planted."""

from __future__ import annotations

from tests.vllm.parked_worker import PrivateWorker  # isort: skip - vLLM's CPU worker comes first
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from tests.vllm.proven_faults import FAULTS, Site


class InCore(UniProcExecutor):
    """vLLM's executor without processes, which its CPU platform would replace by name."""


class FaultyWorker(PrivateWorker):
    site: Site | None = None

    def plant(self, name: str) -> None:
        self.site = Site(self)
        FAULTS[name](self.site)

    def heal(self) -> None:
        if self.site is not None:
            self.site.heal()
