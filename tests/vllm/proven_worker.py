"""A worker for `proven_engine.py`, in the engine core's process, in which faults can be planted."""

from __future__ import annotations

from typing import Any

from tests.vllm.parked_worker import PrivateWorker  # isort: skip - vLLM's CPU worker comes first
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from tests.vllm.proven_faults import FAULTS, Site


class InCore(UniProcExecutor):
    """vLLM's executor without processes, which its CPU platform would replace by name."""


class FaultyWorker(PrivateWorker):
    last_block = 0

    def init_device(self) -> None:
        super().init_device()
        self.site = Site(self)

        def noting(old: Any, pool: Any, *asked: Any) -> Any:
            blocks = old(pool, *asked)
            self.last_block = max(self.last_block, *(each.block_id for each in blocks), 0)
            return blocks

        Site(self).put(BlockPool, "get_new_blocks", noting)

    def find_last_block(self) -> int:
        """The highest block that was ever handed out."""
        return self.last_block

    def plant(self, name: str) -> None:
        FAULTS[name](self.site)

    def heal(self) -> None:
        self.site.heal()
