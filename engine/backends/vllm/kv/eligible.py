"""Decides for which engines the index is kept, and says why it is not kept for the others.

Any doubt means no. The memory is still shared between engines, but no content is believed.
"""

from __future__ import annotations

from typing import Any

from engine.backends.vllm import contracts, versions
from engine.backends.vllm.contracts import Sources

KV_FILES = ("kv/",)
# Hashes of the others are made with a seed of the process, or collide.
HASH_ALGORITHMS = ("sha256", "sha256_cbor")


def problem_with(config: Any, sources: Sources) -> str:
    """Why an engine with this `VllmConfig` publishes no blocks, or nothing. Reads vLLM's
    `sources`."""
    cache, parallel = config.cache_config, config.parallel_config
    if not cache.enable_prefix_caching:
        return "prefix caching is off"
    if cache.prefix_caching_hash_algo not in HASH_ALGORITHMS:
        return (
            f"hashes by {cache.prefix_caching_hash_algo} are valid in one process only; use"
            " --prefix-caching-hash-algo sha256"
        )
    if getattr(cache, "calculate_kv_scales", False):
        return "the scales of the KV cache are computed by each engine"
    if config.speculative_config is not None:
        return "speculative decoding was not tried with it"
    if config.kv_transfer_config is not None:
        return "a connector writes to the KV cache, too"
    if parallel.decode_context_parallel_size > 1:
        return "with --decode-context-parallel-size a block lies in parts on several ranks"
    if config.scheduler_config.scheduler_cls is not None:
        return "vLLM has a scheduler of its own (--scheduler-cls)"
    return contracts.changed(sources, KV_FILES, versions.in_use(config))


def problem_with_groups(groups: Any, hash_block_tokens: int) -> str:
    """Why blocks of these `KVCacheGroupSpec`s are not published, or nothing: only models with one
    group of full attention are."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    if len(groups) != 1:
        return f"this model's KV cache has {len(groups)} groups of layers, and only one can be kept"
    group = groups[0]
    spec = group.kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        return f"this model's KV cache is of {type(spec).__name__}, and only full attention is kept"
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return "this model's attention does not reach back to the first token"
    if getattr(spec, "non_causal", False):
        return "this model's attention reaches forward, so a block depends on what follows it"
    if getattr(group, "is_eagle_group", False):
        return "a draft model writes to the KV cache, too"
    if spec.block_size != hash_block_tokens:
        return (
            f"blocks of {spec.block_size} tokens are hashed in parts of {hash_block_tokens} tokens"
        )
    return ""
