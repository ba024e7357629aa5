"""In a worker: what the bytes of a KV block depend on besides its tokens.

The facts are taken from what this rank has allocated and loaded, not from what was asked of it:
where each layer's cache lies, its shape, strides and dtype, and which attention backend writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.backends.shards import digest_of
from engine.backends.vllm import versions
from plumbing.errors import InvariantError

Facts = dict[str, Any]


def facts_of(worker: Any, kv_cache_config: Any, base_address: int) -> Facts:
    """For the header of an index (`engine.kv.layout.IndexHeader`), without what only others know:
    the pool, the weights, and the hash algorithm. `base_address` is that of the cache."""
    config = worker.vllm_config
    caches: Sequence[torch.Tensor] = worker.model_runner.kv_caches
    if not caches:  # V2 lists those that are on its device, by that device's exact name
        raise InvariantError("the model runner lists no KV cache, so none of it would be checked")
    layers = sorted(
        {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    )
    context = config.compilation_config.static_forward_context
    backends = {str(context[layer].get_attn_backend().get_name()) for layer in layers}
    document = {
        "caches": [
            [each.data_ptr() - base_address, list(each.shape), list(each.stride()), str(each.dtype)]
            for each in caches
        ],
        # vLLM's own digest of everything that shapes its computation.
        "configuration": config.compute_hash(),
        "images": str(getattr(config.model_config.multimodal_config, "mm_processor_kwargs", "")),
        "plan": repr(kv_cache_config),
    }
    dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in caches})
    return {
        "blocks": int(kv_cache_config.num_blocks),
        "block_tokens": int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size),
        "layout_digest": digest_of(document),
        # Scales are the checkpoint's, so its identity covers them; computed ones are not eligible.
        "dtype": f"{config.cache_config.cache_dtype} as {', '.join(dtypes)}",
        "attention_backend": ", ".join(sorted(backends)),
        "rank": int(worker.rank),
        "ranks": int(config.parallel_config.world_size),
        "engine_version": f"vllm {versions.vllm_version()}, torch {versions.torch_version()}",
    }
