"""The contracts with vLLM by which the index of a KV pool is kept; data only, a part of
`contract_list.py`. If one is broken, nothing is published and nothing is adopted."""

from __future__ import annotations

from engine.backends.vllm.contract_forms import (
    Contract,
    contains,
    every,
    exists,
    lacks,
    takes,
    takes_only,
    within,
)

cache_config = within("config/cache.py")
parallel_config = within("config/parallel.py")
vllm_config = within("config/vllm.py")
layer_base = within("model_executor/layers/attention_layer_base.py")
block_pool = within("v1/core/block_pool.py")
kv_cache_manager = within("v1/core/kv_cache_manager.py")
kv_cache_utils = within("v1/core/kv_cache_utils.py")
async_scheduler = within("v1/core/sched/async_scheduler.py")
scheduler = within("v1/core/sched/scheduler.py")
single_type = within("v1/core/single_type_kv_cache_manager.py")
core_client = within("v1/engine/core_client.py")
engine_core = within("v1/engine/core.py")
executor = within("v1/executor/multiproc_executor.py")
kv_cache_interface = within("v1/kv_cache_interface.py")
runner_v2 = within("v1/worker/gpu/model_runner.py")
gpu_runner = within("v1/worker/gpu_model_runner.py")

KV: dict[str, tuple[Contract, ...]] = {
    "kv/block_pool.py": (
        block_pool(
            "a block gets every hash in one place",
            "BlockPool._insert_block_hash",
            every(
                takes_only("block_hash_with_group_id", "block", "num_tokens"),
                contains(
                    "block.set_block_hash(block_hash_with_group_id, num_tokens=num_tokens)",
                    "self.cached_block_hash_to_block.insert(block_hash_with_group_id, block)",
                ),
            ),
        ),
        block_pool(
            "a request's full blocks are hashed in one place",
            "BlockPool.cache_full_blocks",
            every(
                takes("request", "blocks", "num_full_blocks"),
                contains("self._insert_block_hash(", "self._remove_cached_block_hashes(blk)"),
            ),
        ),
        block_pool(
            "a block loses its hashes in one place",
            "BlockPool._remove_cached_block_hashes",
            every(takes_only("block"), contains("block.reset_hash()")),
        ),
        block_pool(
            "a block that is evicted loses its hashes",
            "BlockPool._maybe_evict_cached_block",
            every(takes_only("block"), contains("self._remove_cached_block_hashes(block)")),
        ),
        block_pool(
            "every block that is handed out is evicted first",
            "BlockPool.get_new_blocks",
            contains("self.free_block_queue.popleft_n(", "self._maybe_evict_cached_block(block)"),
        ),
        block_pool(
            "hashes that move to another block leave the first one",
            "BlockPool.move_block_hashes",
            contains("self._remove_cached_block_hashes(src_block)", "self._insert_block_hash("),
        ),
        block_pool(
            "blocks are evicted by their numbers in one place",
            "BlockPool.evict_blocks",
            contains("self._maybe_evict_cached_block(block)"),
        ),
        block_pool(
            "all hashes are reset in one place",
            "BlockPool.reset_prefix_cache",
            every(takes_only(), contains("block.reset_hash()")),
        ),
        block_pool(
            "blocks of the cache that a request uses are touched",
            "BlockPool.touch",
            takes_only("blocks"),
        ),
        block_pool(
            "a pool has its blocks by number, and a queue of the free ones",
            "BlockPool.__init__",
            contains("self.blocks: ", "self.free_block_queue = ", "self.hash_block_size = "),
        ),
        kv_cache_utils(
            "a block knows its hash, its users and whether it is the placeholder",
            "KVCacheBlock",
            contains("block_id: int", "ref_cnt: int", "is_null: bool", "def block_hash(self)"),
        ),
        kv_cache_utils(
            "a free block can be put at the end of the queue",
            "FreeKVCacheBlockQueue",
            contains("def remove(self, block: KVCacheBlock)", "def append(self, block: "),
        ),
        kv_cache_utils(
            "a key is a hash, and four bytes of a group",
            "make_block_hash_with_group_id",
            contains("group_id.to_bytes(4, 'big', signed=False)"),
        ),
        single_type(
            "blocks of a prefix that was found are touched",
            "SingleTypeKVCacheManager.add_local_computed_blocks",
            contains("self.block_pool.touch(new_computed_blocks)"),
        ),
    ),
    "kv/scheduler.py": (
        scheduler(
            "a step is scheduled in one place",
            "Scheduler.schedule",
            contains("num_scheduled_tokens=num_scheduled_tokens", "return scheduler_output"),
        ),
        scheduler(
            "a step's output is processed in one place, with the step",
            "Scheduler.update_from_output",
            takes_only("scheduler_output", "model_runner_output"),
        ),
        scheduler(
            "once a step's output is processed, what it and those before it wrote is there",
            "Scheduler.update_from_output",
            contains("self.processed_step_seq += 1"),
        ),
        scheduler(
            "a scheduler has its groups and a manager of blocks",
            "Scheduler.__init__",
            contains("self.kv_cache_config = ", "self.kv_cache_manager = ", "self.cache_config = "),
        ),
        async_scheduler(
            "the overlapping scheduler schedules and processes as the plain one",
            "AsyncScheduler",
            every(
                contains("class AsyncScheduler(Scheduler)"),
                lacks("schedule", "update_from_output"),
            ),
        ),
        scheduler(
            "a scheduler knows how many requests it has",
            "Scheduler.get_num_unfinished_requests",
            takes_only(),
        ),
        kv_cache_manager(
            "the manager of blocks has the pool",
            "KVCacheManager.__init__",
            contains("self.block_pool = "),
        ),
        engine_core(
            "a step's output is processed before the next, unless steps are queued",
            "EngineCore.step",
            contains("self.scheduler.schedule(", "self.scheduler.update_from_output("),
        ),
        engine_core(
            "queued steps are processed in the order in which they were sent",
            "EngineCore.step_with_batch_queue",
            contains("batch_queue.appendleft((future, scheduler_output", "batch_queue.pop()"),
        ),
        engine_core(
            "the core has the executor, by which it asks its workers",
            "EngineCore.__init__",
            contains("self.model_executor = "),
        ),
        executor(
            "workers are asked in turn with the steps",
            "MultiprocExecutor.collective_rpc",
            takes("method", "timeout", "args"),
        ),
        engine_core(
            "the core's methods are called by name",
            "EngineCoreProc._handle_client_request",
            contains("getattr(self, method_name)"),
        ),
        kv_cache_utils(
            "the hash that chains begin with is set once the algorithm is known",
            "init_none_hash",
            contains("global NONE_HASH"),
        ),
    ),
    "kv/eligible.py": (
        cache_config(
            "whether and how blocks are hashed is known",
            "CacheConfig",
            contains("enable_prefix_caching:", "prefix_caching_hash_algo:"),
        ),
        parallel_config(
            "how many ranks share a block is known",
            "ParallelConfig",
            contains("decode_context_parallel_size:"),
        ),
        kv_cache_interface(
            "a group has its layers and what they are",
            "KVCacheGroupSpec",
            contains("layer_names:", "kv_cache_spec:", "is_eagle_group:"),
        ),
        kv_cache_interface(
            "full attention says how far it reaches",
            "FullAttentionSpec",
            contains("sliding_window:", "attention_chunk_size:", "non_causal:"),
        ),
    ),
    "kv/facts.py": (
        vllm_config("a configuration has a digest", "VllmConfig.compute_hash", exists),
        layer_base(
            "a layer knows the attention backend that it uses",
            "AttentionLayerBase.get_attn_backend",
            takes_only(),
        ),
        kv_cache_interface(
            "a plan of a KV cache has blocks, tensors and groups",
            "KVCacheConfig",
            contains("num_blocks:", "kv_cache_tensors:", "kv_cache_groups:"),
        ),
        gpu_runner(
            "a runner has the tensors of its KV cache",
            "GPUModelRunner.__init__",
            contains("self.kv_caches: "),
        ),
        runner_v2(
            "the runner of version 2 has those that are on its device",
            "GPUModelRunner.initialize_kv_cache",
            contains(
                "self.kv_caches = [cache for cache in kv_caches_dict.values()"
                " if cache.device == self.device]"
            ),
        ),
    ),
    "api/kept_memory.py": (
        core_client(
            "the core's methods can be called by name from another process",
            "AsyncMPClient.call_utility_async",
            takes("method"),
        ),
    ),
}
