"""The size of the KV cache: what to propose to whoever gave none, and what slows a takeover down.

The size is asked for and never measured: a standby starts beside an engine that has the memory, and
would measure what is left of it; and it must be the same on every engine of a pod. So a missing
size is an error, and the error does the arithmetic. Reads vLLM's configuration, imports no vLLM but
for the name of a data type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plumbing.errors import UsageError

# Of full length. Enough to try an engine out; who knows their load gives a size that fits it.
SEQUENCES = 4
STEP_BYTES = 64 << 20  # sizes that people can read, and whole large pages on every kind of memory


@dataclass(frozen=True, slots=True)
class Proposal:
    """A size per rank, and how it comes about. All of one rank."""

    bytes_per_token: int
    tokens: int
    sequences: int

    @property
    def size_bytes(self) -> int:
        return -(-self.bytes_per_token * self.tokens * self.sequences // STEP_BYTES) * STEP_BYTES


def propose_bytes(vllm_config: Any) -> int:
    """A size of the KV cache per rank, in bytes, that is enough to try an engine out."""
    return propose(vllm_config).size_bytes


def propose(vllm_config: Any) -> Proposal:
    """`propose_bytes`, with how it was computed.

    Every layer counts as one of full attention: too much for a model with windows or states, whose
    layers need less, and never too little for one sequence.
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
    """What to say to whoever gave no size."""
    found = propose(vllm_config)
    ranks = vllm_config.parallel_config.world_size
    return UsageError(
        "vllm.no_kv_size",
        "the size of the KV cache is not given, and beside an engine that serves it cannot be"
        f" measured; give every engine of the pod the same, for example --kv-cache-memory-bytes"
        f" {found.size_bytes}: {found.sequences} sequences of {found.tokens} tokens at"
        f" {found.bytes_per_token} bytes per token, rounded up to {STEP_BYTES >> 20} MiB; each of"
        f" the engine's ranks ({ranks}) takes that much",
        proposed_bytes=found.size_bytes,
        bytes_per_token=found.bytes_per_token,
        tokens=found.tokens,
        sequences=found.sequences,
        ranks=ranks,
    )


def warnings(vllm_config: Any) -> list[str]:
    """Settings whose pinned host memory keeps a dead engine's processes in the kernel: no takeover
    before they are gone (243 GB of it took 26 s)."""
    cache, offload = vllm_config.cache_config, vllm_config.offload_config
    pinned = {
        "--kv-offloading-size": (cache.kv_offloading_size or 0, "GiB of KV cache"),
        "--cpu-offload-gb": (offload.uva.cpu_offload_gb, "GiB of weights"),
        "--offload-group-size": (offload.prefetch.offload_group_size, "layers in each group"),
    }
    return [
        f"{flag} {amount:g} ({what}) pins host memory, which a dying process gives back at about"
        " 10 GB a second: the next engine is granted nothing before that, so a failover takes that"
        " much longer; raise --reap-ms to fit"
        for flag, (amount, what) in pinned.items()
        if amount
    ]
