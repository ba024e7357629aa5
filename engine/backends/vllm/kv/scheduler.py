"""In the engine core: vLLM's schedulers, which keep the index of the KV pools, and how an engine
begins with that index.

vLLM finds these classes by name (`scheduler_cls`), and the backend calls the core's methods by name
(`call_utility_async`), so four are added to it here.

`PoolIndex` owns the order in which an engine begins: borrow, compare, adopt into the block pool or
begin empty, and only then may a step be sent. What fails here costs the adoption and the
publication, not the wake; but then the index that is there must go (`understudy_forget_kv` of the
workers), because this engine is about to write over the blocks that it describes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from engine.backends.kept_pools import KeptPools
from engine.backends.vllm.kv import facts
from engine.backends.vllm.kv.block_pool import KeptBlockPool, KeptIndex, problem_with_groups
from engine.backends.vllm.membership import Answer, answering
from engine.kv.adopter import Adoption, Checksums
from engine.kv.layout import IndexHeader
from gms.client import KvClaim, KvLease, borrow_pool
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
        self.kept.processed(scheduler_output)
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
def _begin(core: Any, asked: Any) -> Answer:
    checksums = facts.asking(core.model_executor)
    begun = _index(core).begin(msgspec.convert(asked, Beginning), checksums)
    return msgspec.structs.asdict(begun)


@answering
def _judge(core: Any, why: str) -> None:
    """`why` the content is not to be trusted; empty: the canary has passed."""
    _index(core).judge(why)


@answering
def _report(core: Any) -> Answer:
    kept = _index(core).kept
    return {"problem": kept.problem, "published": kept.published, "kept": kept.kept}


@answering
def _close(core: Any) -> None:
    if core.scheduler.has_unfinished_requests():  # more than the API process knows of
        raise UnderstudyError("vllm.in_progress", "requests are in progress")
    _index(core).kept.close()  # the content is the next engine's, before vLLM resets its cache


EngineCore.understudy_close_kv = _close
EngineCore.understudy_begin_kv = _begin
EngineCore.understudy_report_kv = _report
EngineCore.understudy_judge_kv = _judge


class RankPool(Struct, frozen=True):
    """One rank's device, its claim to that device's pool, and `facts.facts_of` its blocks."""

    device: str
    claim: KvClaim
    facts: dict[str, Any]


class Beginning(Struct, frozen=True):
    """What the backend asks of the engine core at a wake."""

    directory: str
    deadline_s: float
    may_adopt: bool
    has_audit: bool
    ranks: tuple[RankPool, ...]


class Begun(Struct, frozen=True):
    """`adopted` blocks, or why there are none. `torn`: blocks whose bytes had changed."""

    adopted: int = 0
    why_empty: str = ""
    torn: int = 0


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

    def begin(self, asked: Beginning, checksums: Checksums) -> Begun:
        """Before the first step. `checksums` are made by the workers.

        Raises:
            UnderstudyError: a pool cannot be borrowed, and the index was not touched.
        """
        for rank in asked.ranks:
            lease = borrow_pool(
                asked.directory, rank.device, rank.claim, asked.deadline_s, on_change=logger.warning
            )
            self._leases.append(lease)
        headers = [
            IndexHeader(pool=lease.pool, hash_algorithm=self._hash_algorithm(), **rank.facts)
            for rank, lease in zip(asked.ranks, self._leases, strict=True)
        ]
        pools = self._pools = KeptPools(self._leases, headers)
        adoption = pools.find(checksums, may_adopt=asked.may_adopt)
        try:
            self._pool.adopt(adoption.records, headers[0].block_tokens)
        except UnderstudyError as error:
            self._pool.reset_prefix_cache()
            adoption = Adoption(why_empty=error.message, torn=adoption.torn)
        self.kept.open(pools.writer(adoption), checksums if asked.has_audit else None)
        return Begun(len(adoption.records), adoption.why_empty, len(adoption.torn))

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
            self._pools.release()
        for lease in self._leases:
            lease.close()
        self._pools, self._leases = None, []
