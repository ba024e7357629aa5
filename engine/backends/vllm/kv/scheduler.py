"""In the engine core: vLLM's schedulers, which keep the index of the KV pools, and how an engine
begins with that index.

vLLM finds these classes by name (`scheduler_cls`), and the backend calls the core's methods by name
(`call_utility_async`), so three are added to it here.

`PoolIndex` owns the order in which an engine begins: borrow, compare, adopt into the block pool or
begin empty, and only then may a step be sent. What fails here costs the adoption and the
publication, not the wake; but then the index that is there must go (`understudy_forget_kv` of the
workers), because this engine is about to write over the blocks that it describes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from engine.backends.memory_session import KeptPools, borrow
from engine.backends.vllm import membership
from engine.backends.vllm.kv.block_pool import KeptBlockPool, problem_with_groups
from engine.backends.vllm.membership import Answer, answering
from engine.kv.layout import IndexHeader
from engine.kv.writer import KeptIndex
from gms.client import KvClaim, KvLease
from plumbing.errors import UnderstudyError

logger = logging.getLogger(__name__)


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
        before = self.kept.problem
        self.kept.processed(scheduler_output)
        if self.kept.problem != before:
            logger.warning("no KV block is published any more: %s", self.kept.problem)
        return outputs


class KeepingScheduler(Keeping, Scheduler):
    pass


class KeepingAsyncScheduler(Keeping, AsyncScheduler):
    pass


# ---------------------------------------------------------------------- called by the backend


def _index(core: Any) -> PoolIndex:
    index: PoolIndex | None = core.scheduler.pool_index
    if index is None:
        raise UnderstudyError("vllm.no_index", core.scheduler.kv_problem)
    return index


@answering
def _begin(core: Any, asked: Answer) -> Answer:
    return _index(core).begin(**asked)


@answering
def _judge(core: Any, why: str) -> None:
    """`why` the content is not to be trusted; empty: the canary has passed."""
    _index(core).judge(why)


@answering
def _close(core: Any) -> None:
    if core.scheduler.has_unfinished_requests():  # more than the API process knows of
        raise UnderstudyError("vllm.in_progress", "requests are in progress")
    _index(core).kept.close()  # the content is the next engine's, before vLLM resets its cache


EngineCore.understudy_close_kv = _close
EngineCore.understudy_begin_kv = _begin
EngineCore.understudy_judge_kv = _judge


class PoolIndex:
    """The index of the pools of this incarnation."""

    def __init__(self, pool: KeptBlockPool, hash_algorithm: Callable[[], str]) -> None:
        """`hash_algorithm`: whatever engines must share to give equal hashes to equal tokens; asked
        for at a wake."""
        self._pool, self._hash_algorithm = pool, hash_algorithm
        self._leases: list[KvLease] = []
        self._pools: KeptPools | None = None

    @property
    def kept(self) -> KeptIndex:
        return self._pool.kept

    def begin(self, deadline_s: float, may_adopt: bool, ranks: Sequence[Answer]) -> Answer:
        """Before the first step. Of each rank its device, its claim to that device's pool, and
        `facts.facts_of` its blocks. Returns how many blocks were adopted, or why none.

        Raises:
            UnderstudyError: a pool cannot be borrowed, and the index was not touched.
        """
        for rank in ranks:
            self._leases.append(borrow(rank["device"], KvClaim(**rank["claim"]), deadline_s))
        headers = [
            IndexHeader(pool=lease.pool, hash_algorithm=self._hash_algorithm(), **rank["facts"])
            for rank, lease in zip(ranks, self._leases, strict=True)
        ]
        counts = membership.counts()
        pools = KeptPools(self._leases, headers, may_adopt=may_adopt, counts=counts)
        self._pools = pools
        self._pool.adopt(pools.adopted, headers[0].block_tokens)
        self.kept.open(pools.writer)
        return {"adopted": len(pools.adopted), "why_empty": pools.why_empty}

    def judge(self, why: str) -> None:
        """The canary has passed on the adopted blocks; or `why` no engine after this one may
        believe the content."""
        if self._pools is None:
            return
        if why:
            self.kept.give_up(why)
            self._pools.distrust(why)
        else:
            self._pools.trust()

    def leave(self) -> None:
        """Map nothing any more, with vLLM paused; another `begin` may follow."""
        self.kept.let_go()
        if self._pools is not None:
            self._pools.close()
        for lease in self._leases:
            lease.close()
        self._pools, self._leases = None, []
