"""How much KV memory a rank takes: from settings and model alone, so that all engines agree.

Owns the defaults and the refusals. One piece of memory holds the slots of the running sequences
and behind them the blocks of the prefix cache.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.backends import free_memory
from engine.backends.reference.config import LlamaConfig
from engine.backends.reference.link import ConfigureMsg
from engine.backends.reference.model.batch import PREFILL_CHUNK
from engine.backends.reference.model.decoder import KVCache
from plumbing.errors import UsageError

DEFAULT_CONTEXT = 4096  # 1 GiB of KV for a Llama 3.2 1B with four slots, and as much for blocks


class KvSize(NamedTuple):
    """Positions per slot, blocks of the prefix cache, and bytes of both, of one rank."""

    context: int
    blocks: int
    slots_bytes: int
    kv_bytes: int


def size_kv(config: LlamaConfig, settings: ConfigureMsg) -> KvSize:
    """The context is the number asked for, or as many positions as the model and --kv-bytes allow.

    Raises:
        UsageError: `engine.context_too_long`, `engine.kv_too_small`, `engine.kv_too_large`.
    """
    asked = settings.max_context
    if asked is not None and asked > config.max_position:
        raise UsageError(
            "engine.context_too_long",
            f"--max-context {asked} is beyond the {config.max_position} positions that this model"
            " was trained for; lower it",
        )
    context = asked or min(config.max_position, DEFAULT_CONTEXT)
    limit = settings.kv_bytes
    if limit is not None and asked is None and _size(config, settings, 2).kv_bytes <= limit:
        first, end = 2, context + 1  # the largest that fits lies in between
        while end - first > 1:
            middle = (first + end) // 2
            is_fit = _size(config, settings, middle).kv_bytes <= limit
            first, end = (middle, end) if is_fit else (first, middle)
        context = first
    size = _size(config, settings, context)
    if limit is not None and size.kv_bytes > limit:
        raise UsageError(
            "engine.kv_too_small",
            f"{settings.slots} slots of {context} positions and {size.blocks * PREFILL_CHUNK}"
            f" cached tokens need {size.kv_bytes} bytes, and --kv-bytes is {limit}; raise it, or"
            " lower --slots, --max-context or --cache-tokens",
        )
    # Simulated devices share the machine's memory, so there must be room for every rank's.
    free_memory.check_can_ever_fit(
        size.kv_bytes * settings.ranks,
        free_memory.read_room(),
        "lower --max-context, --slots or --cache-tokens",
    )
    return size


def _size(config: LlamaConfig, settings: ConfigureMsg, context: int) -> KvSize:
    tokens = settings.cache_tokens
    blocks = (settings.slots * context if tokens is None else tokens) // PREFILL_CHUNK
    slots_bytes = KVCache.bytes_needed(config, settings.slots, context)
    block_bytes = KVCache.bytes_needed(config, 1, PREFILL_CHUNK)
    return KvSize(context, blocks, slots_bytes, slots_bytes + blocks * block_bytes)
