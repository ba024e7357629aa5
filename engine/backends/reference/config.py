"""The meaning of a checkpoint's `config.json`, and whether the decoder supports it.

Owns every key that changes the numbers of a Llama. Knows no tensors and no numpy. The surprising
thing: a key that is *not understood* must stop the load. A decoder that skips an unknown rope type
still produces fluent text, and its errors would go unnoticed.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta, Struct

from engine.backends.shards import read_json
from plumbing.errors import UsageError

ARCHITECTURE = "LlamaForCausalLM"

# A key may be absent, or hold one of these values. Anything else changes the arithmetic.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "sliding_window": (None,),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
    "num_local_experts": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}
ROPE_TYPES = ("default", "linear", "llama3")

# The one chat template: `<s><|user|>…<|end|><|assistant|>`, with its tokens.
BOS, END_OF_TURN, ASSISTANT_TURN = "<s>", "<|end|>", "<|assistant|>"
CHAT_SPECIALS = (BOS, "<|system|>", "<|user|>", ASSISTANT_TURN, END_OF_TURN)

Count = Annotated[int, Meta(gt=0, lt=1 << 31)]
Positive = Annotated[float, Meta(gt=0, lt=1e30)]
TokenId = Annotated[int, Meta(ge=0)]


class _RopeKeys(Struct):
    """`rope_parameters` of transformers 5, or `rope_scaling` of transformers 4."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    partial_rotary_factor: float | None = None


class _ConfigKeys(Struct):
    """The keys of `config.json` that are read; others do not change the numbers."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count | None = None
    rms_norm_eps: Positive | None = None
    tie_word_embeddings: bool = False
    eos_token_id: TokenId | list[TokenId] | None = None
    rope_theta: Positive | None = None
    rope_scaling: _RopeKeys | None = None
    rope_parameters: _RopeKeys | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: how the angle per position is stretched beyond the trained context."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The numbers of one Llama, or of one rank's share of it (`of_rank`).

    `head_dim` need not be `hidden_size / heads`. `head_rows` are the first and the end of the rows
    of the output head that are computed here; None: all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: Rope
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    head_rows: tuple[int, int] | None = None

    def of_rank(self, rank: int, ranks: int) -> LlamaConfig:
        """What `rank` of `ranks` computes: its heads, its part of the MLP, its rows of the head.

        As in Megatron-LM (Shoeybi et al. 2019, §3): q, k, v, gate and up are cut by rows, o and
        down by columns, the head by rows of the vocabulary. Embedding and norms are not cut:
        every rank has them whole.

        Raises:
            UsageError: `engine.bad_tensor_parallel`, with the valid numbers.
        """
        if ranks == 1:
            return self
        common = math.gcd(self.kv_heads, self.heads, self.intermediate_size)
        if common % ranks:
            valid = [str(each) for each in range(1, common + 1) if common % each == 0]
            raise UsageError(
                "engine.bad_tensor_parallel",
                f"--tensor-parallel {ranks} must divide this model's {self.heads} heads,"
                f" {self.kv_heads} key and value heads and intermediate size"
                f" {self.intermediate_size}; choose one of {', '.join(valid)}",
                tensor_parallel=ranks,
            )
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks,
            intermediate_size=self.intermediate_size // ranks,
            head_rows=head_span(self.vocab_size, rank, ranks),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the decoder reads, by its Hugging Face name, in the order of use."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden)
        }
        per_layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for layer, (name, shape) in product(range(self.layers), per_layer.items()):
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            first, end = self.head_rows or (0, self.vocab_size)
            shapes["lm_head.weight"] = (end - first, hidden)
        return shapes


def head_span(vocab_size: int, rank: int, ranks: int) -> tuple[int, int]:
    """First and end of the rows of the head that `rank` computes; their numbers may differ."""
    return vocab_size * rank // ranks, vocab_size * (rank + 1) // ranks


def read_config(directory: str) -> LlamaConfig:
    """Read `config.json`, and `generation_config.json` where there is one.

    Raises:
        UsageError: `model.missing`, `model.broken` or `model.unsupported`; the message names
            the file, the key and the value.
    """
    if not os.path.isdir(directory):
        raise UsageError(
            "model.missing",
            f"{directory} is not a directory; give the directory of a Hugging Face checkpoint "
            "(config.json, *.safetensors, tokenizer.json).",
        )
    path = os.path.join(directory, "config.json")
    document = read_json(path)
    generation_path = os.path.join(directory, "generation_config.json")
    generation = read_json(generation_path) if os.path.exists(generation_path) else {}
    return parse_config(document, generation, path)


def parse_config(document: dict[str, Any], generation: dict[str, Any], path: str) -> LlamaConfig:
    """Check and translate. The end-of-sequence ids of `generation` win, as in transformers."""
    architectures = document.get("architectures")
    if architectures not in (None, [ARCHITECTURE]):
        _unsupported(path, "architectures", architectures, [ARCHITECTURE])
    if architectures is None and document.get("model_type") != "llama":
        _unsupported(path, "model_type", document.get("model_type"), "llama")
    for key, accepted in ACCEPTED.items():
        if key in document and document[key] not in accepted:
            _unsupported(path, key, document[key], accepted[0])
    if "eos_token_id" in generation:
        document = {**document, "eos_token_id": generation["eos_token_id"]}
    try:
        keys = msgspec.convert(document, _ConfigKeys, strict=True)
    except msgspec.ValidationError as error:
        _broken(path, str(error)[:200])
    heads, kv_heads = keys.num_attention_heads, keys.num_key_value_heads or keys.num_attention_heads
    if heads % kv_heads:
        _broken(path, f"num_key_value_heads {kv_heads} must divide num_attention_heads {heads}")
    if keys.head_dim is None and keys.hidden_size % heads:
        _broken(path, f"num_attention_heads {heads} must divide hidden_size {keys.hidden_size}")
    head_dim = keys.head_dim or keys.hidden_size // heads
    if head_dim % 2:
        _broken(path, f"head_dim {head_dim} must be even, since rotary embedding turns pairs")
    max_position = keys.max_position_embeddings or 2048
    eos = keys.eos_token_id
    return LlamaConfig(
        vocab_size=keys.vocab_size,
        hidden_size=keys.hidden_size,
        intermediate_size=keys.intermediate_size,
        layers=keys.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=keys.rms_norm_eps or 1e-6,
        rope=_rope(keys, max_position, path),
        tie_embeddings=keys.tie_word_embeddings,
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos or ()),
    )


def _rope(keys: _ConfigKeys, max_position: int, path: str) -> Rope:
    name = "rope_scaling" if keys.rope_parameters is None else "rope_parameters"
    rope = keys.rope_parameters or keys.rope_scaling or _RopeKeys()
    kind = rope.rope_type or rope.type or "default"
    if kind not in ROPE_TYPES:
        _unsupported(path, f"{name}.rope_type", kind, ROPE_TYPES)
    if rope.partial_rotary_factor not in (None, 1.0):
        _unsupported(path, f"{name}.partial_rotary_factor", rope.partial_rotary_factor, 1.0)
    theta = rope.rope_theta or keys.rope_theta or 10000.0
    if kind == "default":
        return Rope(theta)
    if rope.factor is None:
        _broken(path, f"{name} lacks factor")
    if kind == "linear":
        return Rope(theta, "linear", rope.factor)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if low is None or high is None or high <= low:
        _broken(path, f"{name} must have a low_freq_factor below its high_freq_factor")
    original = rope.original_max_position_embeddings or max_position
    return Rope(theta, "llama3", rope.factor, low, high, original)


def _unsupported(path: str, key: str, value: Any, accepted: Any) -> NoReturn:
    raise UsageError(
        "model.unsupported",
        f"{path}: {key} is {json.dumps(value)[:200]}, and the reference backend supports only "
        f"{json.dumps(accepted)}; choose another checkpoint or the vllm backend.",
        key=key,
        value=value,
    )


def _broken(path: str, reason: str) -> NoReturn:
    raise UsageError("model.broken", f"{path}: {reason}; download the file again.")
