"""The size of the KV cache: what to propose if none is given, and one that is too small.

The size must be given and is never measured: a standby starts beside an engine that has the memory,
so it would measure the rest, and the size must be the same on every engine of a pod. So a missing
size is an error that proposes one (in the API process). Whether it holds one sequence is checked by
vLLM's engine core (`core_serving.py` reports it).
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from engine.backends.vllm import versions
from plumbing.errors import UsageError
from plumbing.text import size

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


def refused(error: ValueError) -> UsageError:
    """What the engine core says of a cache that it cannot plan: mostly, of one that cannot hold one
    sequence."""
    return UsageError(
        "vllm.kv_too_small" if "memory" in str(error) else "vllm.configuration",
        f"vLLM refuses the KV cache: {error}; here --kv-cache-memory-bytes sets its size, per rank"
        " and the same on every engine of the pod, and --max-model-len the longest sequence",
    )
