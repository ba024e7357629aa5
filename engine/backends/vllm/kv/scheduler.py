"""In the engine core: vLLM's schedulers, which keep the index of the KV pool.

vLLM finds these classes by name (`scheduler_cls`), and the backend calls the core's methods by name
(`call_utility_async`), so that four are added to it here. They never raise: the answer says what
went wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from engine.backends.vllm.kv import audit
from engine.backends.vllm.kv.block_pool import KeptBlockPool
from engine.backends.vllm.kv.eligible import problem_with_groups
from engine.backends.vllm.kv.kept_index import KeptIndex
from engine.backends.vllm.kv.lending import Beginning, PoolIndex

logger = logging.getLogger(__name__)

Answer = dict[str, Any]


class Keeping:
    """What both schedulers do differently."""

    kv_cache_config: Any
    kv_cache_manager: Any
    cache_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept = KeptIndex()
        self.pool_index: PoolIndex | None = None
        pool = self.kv_cache_manager.block_pool
        self.kv_problem = problem_with_groups(
            self.kv_cache_config.kv_cache_groups, pool.hash_block_size
        )
        looks_ahead = bool(getattr(pool, "num_hash_lookahead_tokens", 0))
        if type(pool) is not BlockPool or looks_ahead:
            self.kv_problem = "vLLM manages this model's blocks in another way"
        if not self.kv_problem:
            ours = KeptBlockPool.of(pool, self.kept)
            self.pool_index = PoolIndex(ours, self._hash_algorithm)

    def _hash_algorithm(self) -> str:
        """The algorithm, and the hash that every chain of hashes begins with: it is random in some
        versions. The core sets it after it has made its scheduler."""
        seed = kv_cache_utils.NONE_HASH.hex()
        return f"{self.cache_config.prefix_caching_hash_algo} from {seed[:16]}"

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        step = super().schedule(*args, **kwargs)  # type: ignore[misc]  # a mixin: vLLM has the method
        self.kept.sent(step, step.num_scheduled_tokens)
        return step

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]  # a mixin: vLLM has the method
        self.kept.processed(scheduler_output)
        return outputs


class KeepingScheduler(Keeping, Scheduler):
    pass


class KeepingAsyncScheduler(Keeping, AsyncScheduler):
    pass


# ---------------------------------------------------------------------- called by the backend


def _answering(method: Callable[[PoolIndex, Any, Any], Answer]) -> Callable[[Any, Any], Answer]:
    """`method` of the scheduler's index as a method of the core, which is its last argument."""

    def answer(core: Any, asked: Any) -> Answer:
        scheduler = core.scheduler
        if scheduler.pool_index is None:
            return {"problem": scheduler.kv_problem}
        try:
            return {"problem": "", **method(scheduler.pool_index, asked, core)}
        except Exception as error:  # whatever it is, the engine can serve without an index
            logger.exception("the index of the KV pool cannot be kept")
            return {"problem": f"{type(error).__name__}: {error}"}

    return answer


def _begin(index: PoolIndex, asked: Any, core: Any) -> Answer:
    checksums = audit.asking(core.model_executor)
    return msgspec.structs.asdict(index.begin(msgspec.convert(asked, Beginning), checksums))


def _judge(index: PoolIndex, why: str, core: Any) -> Answer:
    """`why` the content is not to be trusted; empty: the canary has passed."""
    if why:
        index.distrust(why)
    else:
        index.trust()
    return {}


def _report(index: PoolIndex, _: Any, core: Any) -> Answer:
    kept = index.kept
    return {"problem": kept.problem, "published": kept.published, "kept": kept.kept}


def _close(index: PoolIndex, _: Any, core: Any) -> Answer:
    if core.scheduler.has_unfinished_requests():  # more than the API process knows of
        return {"problem": "requests are in progress"}
    index.close()
    return {}


EngineCore.understudy_close_kv = _answering(_close)
EngineCore.understudy_begin_kv = _answering(_begin)
EngineCore.understudy_report_kv = _answering(_report)
EngineCore.understudy_judge_kv = _answering(_judge)
