"""Whether a KV cache of a given size can hold one sequence, asked while somebody can be told.

vLLM asks too, in its engine core, which cannot report to the supervisor: there the sentence is lost
and the engine dies of something that looks as if a restart would mend it. So every worker asks the
same function first, about its own rank. Reads vLLM's plan of a cache and allocates nothing.

The surprising thing: vLLM says what is needed only rounded to hundredths of a GiB, and its
arithmetic depends on how layers are grouped; the need is found by asking again with other sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

from engine.backends.vllm import shim
from plumbing.errors import UsageError
from plumbing.part.format import size

# More than any device has. Where even this is not enough, the size is not what is wrong.
SIZE_BYTES_MAX = 1 << 48


def check_holds_a_sequence(vllm_config: Any, spec: dict[str, Any], given_bytes: int) -> None:
    """Refuse a cache of `given_bytes` per rank that cannot hold one sequence of full length.

    `spec` is what a worker's `get_kv_cache_spec` returns, by layer.

    Raises:
        UsageError: `vllm.kv_too_small`, with `given_bytes` and `needed_bytes`.
    """
    if not spec:
        return  # no attention, no cache
    register_all_kvcache_specs(vllm_config)  # as the engine core does before it asks

    def fits(size_bytes: int) -> bool:
        return _fits(vllm_config, spec, size_bytes)

    if fits(given_bytes) or not fits(SIZE_BYTES_MAX):
        return  # not the size: vLLM has a sentence of its own for whatever else it is
    sizes = range(given_bytes + 1, SIZE_BYTES_MAX)
    needed_bytes = sizes[bisect_left(sizes, True, key=fits)]
    tokens = vllm_config.model_config.max_model_len
    raise UsageError(
        "vllm.kv_too_small",
        f"a KV cache of {given_bytes} bytes ({size(given_bytes)}) per rank cannot hold one"
        f" sequence of {tokens} tokens, which needs {needed_bytes} bytes"
        f" ({size(needed_bytes)}); give every engine of the pod the same"
        f" --kv-cache-memory-bytes of at least that, or a smaller --max-model-len",
        given_bytes=given_bytes,
        needed_bytes=needed_bytes,
        max_model_len=tokens,
    )


def _fits(vllm_config: Any, spec: dict[str, Any], size_bytes: int) -> bool:
    """Whether vLLM can plan a cache of this size; its configuration stays as it was."""
    model = vllm_config.model_config
    max_model_len = model.max_model_len
    try:
        shim.get_kv_cache_configs(vllm_config, [dict(spec)], [size_bytes])
    except ValueError:
        return False
    finally:
        model.max_model_len = max_model_len  # with --max-model-len auto, planning shortens it
    return True
