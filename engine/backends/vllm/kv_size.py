"""The size of the KV cache: what to propose if none is given, whether one is large enough.

The size must be given and is never measured: a standby starts beside an engine that has the memory,
so it would measure the rest, and the size must be the same on every engine of a pod. So a missing
size is an error that proposes one (in the API process). A size that cannot hold one sequence is
refused too, by each worker: vLLM's engine core checks it as well, but cannot report to the
supervisor, so its message is lost and the death looks as if a restart would fix it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from msgspec import Struct

from engine.backends.vllm import versions
from plumbing.errors import UsageError
from plumbing.text import size

# More than any device has. If even this is not enough, the size is not the problem.
SIZE_BYTES_MAX = 1 << 48
# Of full length: enough for a trial. A known load deserves a size of its own.
SEQUENCES = 4
STEP_BYTES = 64 << 20  # readable sizes, and whole huge pages on every kind of memory
# What model runner V2 keeps for each request that may run, in every engine: worth a warning.
REQUESTS_BYTES_MAX = 256 << 20
COUNT_BYTES = 4  # of a token in a table


class Proposal(Struct, frozen=True):
    """A size per rank, and the factors of it."""

    bytes_per_token: int
    tokens: int
    sequences: int

    @property
    def size_bytes(self) -> int:
        return -(-self.bytes_per_token * self.tokens * self.sequences // STEP_BYTES) * STEP_BYTES


def propose(vllm_config: Any) -> Proposal:
    """A size that is enough for a trial.

    Every layer counts as full attention: too much for layers with windows or states, never too
    little for one sequence.
    """
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache = vllm_config.cache_config
    tensors = 1 if model.use_mla else 2  # the latent, or keys and values
    width = model.get_num_kv_heads(parallel) * model.get_head_size()
    item_bytes = kv_cache_dtype_str_to_dtype(cache.cache_dtype, model).itemsize
    layers = model.get_num_layers(parallel)
    blocks = -(-model.max_model_len // cache.block_size) + 1  # vLLM keeps one to itself
    return Proposal(
        bytes_per_token=tensors * width * item_bytes * layers,
        tokens=blocks * cache.block_size,
        sequences=min(SEQUENCES, vllm_config.scheduler_config.max_num_seqs),
    )


def refusal(vllm_config: Any) -> UsageError:
    """The error for a missing size."""
    found = propose(vllm_config)
    ranks = vllm_config.parallel_config.world_size
    return UsageError(
        "vllm.no_kv_size",
        "the size of the KV cache is missing, and it cannot be measured beside a serving engine;"
        " give every engine of the pod the same, for example --kv-cache-memory-bytes"
        f" {found.size_bytes}: {found.sequences} sequences of {found.tokens} tokens at"
        f" {found.bytes_per_token} bytes per token, rounded up to {STEP_BYTES >> 20} MiB; each of"
        f" the engine's ranks ({ranks}) takes that much",
    )


def warnings(vllm_config: Any) -> list[str]:
    """Settings that pin host memory, which the kernel frees slowly when a process dies (26 s for
    243 GB); no takeover happens before that. And what every engine keeps of a device."""
    cache, offload = vllm_config.cache_config, vllm_config.offload_config
    pinned = {
        "--kv-offloading-size": (cache.kv_offloading_size or 0, "GiB of KV cache"),
        "--cpu-offload-gb": (offload.uva.cpu_offload_gb, "GiB of weights"),
        "--offload-group-size": (offload.prefetch.offload_group_size, "layers in each group"),
    }
    found = [
        f"{flag} {amount:g} ({what}) pins host memory, which the kernel frees at about 10 GB a"
        " second when a process dies: a failover takes that much longer, so raise --reap-ms"
        for flag, (amount, what) in pinned.items()
        if amount
    ]
    return [*found, *_of_requests(vllm_config)]


def _of_requests(vllm_config: Any) -> list[str]:
    """What a rank with model runner V2 keeps for requests, whatever they ask for, and also while it
    sleeps: counts of every token, for penalties, on the device, and the tokens in pinned memory."""
    model, sequences = vllm_config.model_config, vllm_config.scheduler_config.max_num_seqs
    device = sequences * model.get_vocab_size() * COUNT_BYTES
    pinned = sequences * model.max_model_len * COUNT_BYTES
    is_v1 = versions.in_use(vllm_config) != versions.V2
    if is_v1 or max(device, pinned) < REQUESTS_BYTES_MAX:
        return []
    return [
        f"--max-num-seqs {sequences}: every engine, also one that stands by or sleeps, keeps"
        f" {size(device)} of each device and {size(pinned)} of pinned host memory for its requests;"
        " where memory is short, lower it"
    ]


def check_holds_a_sequence(vllm_config: Any, spec: dict[str, Any], given_bytes: int) -> None:
    """Refuse a cache of `given_bytes` per rank that cannot hold one sequence of full length.

    `spec` is what a worker's `get_kv_cache_spec` returns, by layer. Plans a cache as the engine
    core does, and allocates nothing. vLLM's own error rounds the need to hundredths of a GiB, and
    it depends on how layers are grouped; so the need is found by bisection.

    Raises:
        UsageError: `vllm.kv_too_small`, with `given_bytes` and `needed_bytes`.
    """
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    if not spec:
        return  # no attention, no cache
    register_all_kvcache_specs(vllm_config)  # as the engine core does first

    model = vllm_config.model_config
    tokens = model.max_model_len

    def fits(size_bytes: int) -> bool:
        try:
            versions.get_kv_cache_configs(vllm_config, [dict(spec)], [size_bytes])
        except ValueError:
            return False
        finally:
            model.max_model_len = tokens  # with --max-model-len auto, planning shortens it
        return True

    if fits(given_bytes) or not fits(SIZE_BYTES_MAX):
        return  # the size is not the problem; vLLM has its own error for whatever is
    sizes = range(given_bytes + 1, SIZE_BYTES_MAX)
    needed_bytes = sizes[bisect_left(sizes, True, key=fits)]
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
