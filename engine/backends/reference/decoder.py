"""The forward pass of a Llama on numpy, in float32, one sequence at a time.

Owns the arithmetic and the layout of the KV cache. Knows no files, no requests and no sampling:
weights and KV memory are given to it, and it copies neither. Read it against `modeling_llama.py` of
transformers, whose tokens it must repeat.

The surprising thing: sequences are never stacked into one product. A stacked product is faster,
but its sums are cut differently for every number of rows, and then a sequence's logits depend on
the other requests. The same holds for threads: set OPENBLAS_NUM_THREADS=1 before numpy is
imported (it also saves the thread pool's start-up). For the same reason rank 0 of a tensor-parallel
model adds the ranks' sums in their order, and sends the result to all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from engine.backends.reference.config import LlamaConfig
from engine.backends.reference.ranks import Array, Peers

# Tokens per prefill unit: large enough that a matrix product is efficient, small
# enough that a 1 B model on one core shows progress well within the 3 s after which generation
# counts as hung.
PREFILL_CHUNK = 32


def weights_from(config: LlamaConfig, view: Callable[[str], Any]) -> dict[str, Array]:
    """Every tensor as an array over the buffer that `view(name)` gives; nothing is copied."""
    return {
        name: np.frombuffer(view(name), dtype=np.float32).reshape(shape)
        for name, shape in config.tensor_shapes().items()
    }


class KVCache:
    """Keys and values of `slots` sequences of up to `max_context` tokens, in one given buffer.

    The buffer is not cleared: a slot's memory is read only up to the tokens that were written.
    It must stay mapped for as long as this object lives. `number` tells the caches of one process
    apart, so that tensor-parallel ranks mean the same one.
    """

    def __init__(
        self, config: LlamaConfig, buffer: Any, slots: int, max_context: int, number: int = 0
    ) -> None:
        self.slots = slots
        self.max_context = max_context
        self.number = number
        shape = (slots, config.layers, 2, config.kv_heads, max_context, config.head_dim)
        self._memory: Array = np.frombuffer(buffer, np.float32, math.prod(shape)).reshape(shape)

    @staticmethod
    def bytes_needed(config: LlamaConfig, slots: int, max_context: int) -> int:
        """Bytes of KV memory for `slots` sequences of `max_context` tokens each."""
        return slots * config.layers * 2 * config.kv_heads * max_context * config.head_dim * 4

    def layer(self, slot: int, layer: int) -> tuple[Array, Array]:
        """Keys and values, each (kv_heads, max_context, head_dim)."""
        keys, values = self._memory[slot, layer]
        return keys, values

    def chunk(self, slot: int, start: int, count: int) -> Array:
        """A view of `count` positions: (layers, 2, kv_heads, count, head_dim)."""
        found: Array = self._memory[slot, :, :, :, start : start + count]
        return found


class _Layer:
    """The weights of one decoder layer, each projection as (in, out)."""

    def __init__(self, weights: Mapping[str, Array], index: int) -> None:
        prefix = f"model.layers.{index}."
        self.norm_in = weights[prefix + "input_layernorm.weight"]
        self.norm_post = weights[prefix + "post_attention_layernorm.weight"]
        # A transposed view, not a copy: BLAS reads either order.
        self.query, self.key, self.value, self.out = (
            weights[f"{prefix}self_attn.{name}_proj.weight"].T for name in "qkvo"
        )
        self.gate, self.up, self.down = (
            weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down")
        )


class Decoder:
    """Logits from tokens. `weights` as `weights_from` gives them; they are only read.

    `config` and `weights` are one rank's share, and every rank must run the same steps in the same
    order, which `peers.call` announces. With one rank, `peers` has no others.
    """

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Array], peers: Peers) -> None:
        self.config = config
        self._peers = peers
        self._embedding = weights["model.embed_tokens.weight"]
        self._layers = [_Layer(weights, index) for index in range(config.layers)]
        self._norm = weights["model.norm.weight"]
        if config.tie_embeddings:
            first, end = config.head_rows or (0, config.vocab_size)
            self._head = self._embedding[first:end].T
        else:
            self._head = weights["lm_head.weight"].T
        exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
        # Angle per position for each pair.
        self._frequencies: Array = 1 / np.power(np.float32(config.rope_theta), exponents)
        self._scale = np.float32(1.0 / math.sqrt(config.head_dim))
        self._epsilon = np.float32(config.norm_eps)

    def forward(self, cache: KVCache, slot: int, tokens: Sequence[int], start: int) -> Array:
        """Run `tokens` at positions `start …`, filling the slot's KV; logits after the last one.

        Positions before `start` must be in the slot already. Returns a fresh array (vocab_size,);
        on a rank above 0, this rank's part of it.
        """
        peers = self._peers
        peers.call("forward", cache.number, slot, tuple(tokens), start)
        with np.errstate(over="ignore", under="ignore"):  # exp(-gate) may reach inf: SiLU is 0
            hidden = self._embedding[np.asarray(tokens)]
            cosine, sine = self._rotation(start, len(tokens))
            for index, layer in enumerate(self._layers):
                keys, values = cache.layer(slot, index)
                normed = self._rms_norm(hidden, layer.norm_in)
                mixed = self._attend(layer, normed, keys, values, start, cosine, sine)
                hidden = hidden + peers.sum(mixed)
                normed = self._rms_norm(hidden, layer.norm_post)
                gate = normed @ layer.gate
                inner = (gate / (1 + np.exp(-gate)) * (normed @ layer.up)) @ layer.down
                hidden = hidden + peers.sum(inner)
            last: Array = self._rms_norm(hidden[-1:], self._norm) @ self._head
        return peers.gather(last[0])

    def _attend(
        self,
        layer: _Layer,
        normed: Array,
        keys: Array,
        values: Array,
        start: int,
        cosine: Array,
        sine: Array,
    ) -> Array:
        """Grouped-query attention of `normed` (tokens, hidden) over all positions so far."""
        count, end = len(normed), start + len(normed)
        heads, head_dim = self.config.kv_heads, self.config.head_dim
        group = self.config.heads // heads
        query = _rotate((normed @ layer.query).reshape(count, -1, head_dim), cosine, sine)
        key = _rotate((normed @ layer.key).reshape(count, heads, head_dim), cosine, sine)
        keys[:, start:end] = key.transpose(1, 0, 2)
        values[:, start:end] = (normed @ layer.value).reshape(count, heads, -1).transpose(1, 0, 2)
        # All queries that share a key head in one product: (kv_heads, group * tokens, head_dim).
        query = query.reshape(count, heads, group, head_dim).transpose(1, 2, 0, 3)
        query = query.reshape(heads, group * count, head_dim)
        scores: Array = query @ keys[:, :end].transpose(0, 2, 1)
        scores *= self._scale
        if count > 1:
            hidden_future = np.arange(end) > np.arange(start, end)[:, None]
            scores.reshape(heads, group, count, end)[..., hidden_future] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        np.divide(scores, scores.sum(axis=-1, keepdims=True), out=scores)
        mixed: Array = scores @ values[:, :end]
        mixed = mixed.reshape(heads, group, count, head_dim).transpose(2, 0, 1, 3)
        projected: Array = mixed.reshape(count, -1) @ layer.out
        return projected

    def _rms_norm(self, hidden: Array, weight: Array) -> Array:
        mean = np.mean(hidden * hidden, axis=-1, keepdims=True)
        normed: Array = weight * (hidden / np.sqrt(mean + self._epsilon))
        return normed

    def _rotation(self, start: int, count: int) -> tuple[Array, Array]:
        """Cosine and sine of the angles, each (tokens, 1, head_dim / 2)."""
        positions = np.arange(start, start + count, dtype=np.float32)
        angles = (positions[:, None] * self._frequencies)[:, None]
        return np.cos(angles), np.sin(angles)


def _rotate(vectors: Array, cosine: Array, sine: Array) -> Array:
    """Turn each pair (i, i + head_dim / 2), the order of Hugging Face's Llama weights."""
    half = vectors.shape[-1] // 2
    first, second = vectors[..., :half], vectors[..., half:]
    turned = np.empty_like(vectors)
    turned[..., :half] = first * cosine - second * sine
    turned[..., half:] = second * cosine + first * sine
    return turned
