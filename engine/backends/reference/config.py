"""What a checkpoint's `config.json` says, and whether the decoder can do it.

Owns the meaning of every key that changes the numbers of a Llama. Knows no tensors and no numpy.
The surprising thing: a key that is *not understood* must stop the load. A decoder that skips an
unknown rope type still produces fluent text, and nobody would notice that it is wrong.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

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

TensorShapes = dict[str, tuple[int, ...]]


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
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    head_rows: tuple[int, int] | None = None

    def of_rank(self, rank: int, ranks: int) -> LlamaConfig:
        """What `rank` of `ranks` computes: its heads, its part of the MLP, its rows of the head.

        As in Megatron-LM (Shoeybi et al. 2019, §3): q, k, v, gate and up are cut by rows, o and
        down by columns, the head by rows of the vocabulary. Embedding and norms are not cut:
        every rank has them whole.

        Raises:
            UsageError: `engine.bad_tensor_parallel`, with the numbers that would do.
        """
        if ranks == 1:
            return self
        common = math.gcd(self.kv_heads, self.heads, self.intermediate_size)
        if common % ranks:
            would_do = [str(each) for each in range(1, common + 1) if common % each == 0]
            raise UsageError(
                "engine.bad_tensor_parallel",
                f"--tensor-parallel {ranks} must divide this model's {self.heads} heads,"
                f" {self.kv_heads} key and value heads and intermediate size"
                f" {self.intermediate_size}; {', '.join(would_do)} would do",
                tensor_parallel=ranks,
            )
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks,
            intermediate_size=self.intermediate_size // ranks,
            head_rows=head_span(self.vocab_size, rank, ranks),
        )

    @property
    def head_shape(self) -> tuple[int, int]:
        first, end = self.head_rows or (0, self.vocab_size)
        return end - first, self.hidden_size

    def tensor_shapes(self) -> TensorShapes:
        """Every tensor that the decoder reads, by its Hugging Face name, in the order of use."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: TensorShapes = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes[prefix + "self_attn.q_proj.weight"] = (query, hidden)
            shapes[prefix + "self_attn.k_proj.weight"] = (key, hidden)
            shapes[prefix + "self_attn.v_proj.weight"] = (key, hidden)
            shapes[prefix + "self_attn.o_proj.weight"] = (hidden, query)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = self.head_shape
        return shapes


def head_span(vocab_size: int, rank: int, ranks: int) -> tuple[int, int]:
    """First and end of the rows of the head that `rank` computes; they need not be equally many."""
    return vocab_size * rank // ranks, vocab_size * (rank + 1) // ranks


def read_config(directory: str) -> LlamaConfig:
    """Read `config.json`, and `generation_config.json` where there is one.

    Raises:
        UsageError: `model.missing`, `model.broken` or `model.unsupported`; the sentence names
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
    """Check and translate; `generation` gives the end-of-sequence ids precedence, as elsewhere."""
    architectures = document.get("architectures")
    if architectures is not None and architectures != [ARCHITECTURE]:
        _unsupported(path, "architectures", architectures, [ARCHITECTURE])
    if architectures is None and document.get("model_type") != "llama":
        _unsupported(path, "model_type", document.get("model_type"), "llama")
    for key, accepted in ACCEPTED.items():
        if key in document and not any(_same(document[key], value) for value in accepted):
            _unsupported(path, key, document[key], accepted[0])
    hidden, heads = (
        _count(document, "hidden_size", path),
        _count(document, "num_attention_heads", path),
    )
    kv_heads = _count(document, "num_key_value_heads", path, default=heads)
    if heads % kv_heads:
        _broken(path, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
    if document.get("head_dim") is None and hidden % heads:
        _broken(path, "hidden_size", hidden, f"a multiple of num_attention_heads {heads}")
    head_dim = _count(document, "head_dim", path, default=hidden // heads)
    if head_dim % 2:
        _broken(path, "head_dim", head_dim, "even, since rotary embedding turns pairs")
    tie = document.get("tie_word_embeddings", False)
    if not isinstance(tie, bool):
        _broken(path, "tie_word_embeddings", tie, "true or false")
    max_position = _count(document, "max_position_embeddings", path, default=2048)
    eos = generation.get("eos_token_id", document.get("eos_token_id"))
    return LlamaConfig(
        vocab_size=_count(document, "vocab_size", path),
        hidden_size=hidden,
        intermediate_size=_count(document, "intermediate_size", path),
        layers=_count(document, "num_hidden_layers", path),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=_number(document, "rms_norm_eps", path, default=1e-6),
        rope=_rope(document, max_position, path),
        tie_embeddings=tie,
        bos_token_id=next(
            iter(_token_ids(document.get("bos_token_id"), "bos_token_id", path)), None
        ),
        eos_token_ids=_token_ids(eos, "eos_token_id", path),
    )


def _rope(document: dict[str, Any], max_position: int, path: str) -> Rope:
    """`rope_parameters` (transformers 5) holds what `rope_theta` and `rope_scaling` held before."""
    key = "rope_parameters" if document.get("rope_parameters") is not None else "rope_scaling"
    scaling = document.get(key)
    if scaling is None:
        return Rope(_number(document, "rope_theta", path, default=10000.0))
    if not isinstance(scaling, dict):
        _broken(path, key, scaling, "an object")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        _unsupported(path, f"{key}.rope_type", kind, ROPE_TYPES)
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        _unsupported(path, f"{key}.partial_rotary_factor", scaling["partial_rotary_factor"], 1.0)
    theta = _number({**document, **scaling}, "rope_theta", path, default=10000.0)
    if kind == "default":
        return Rope(theta)
    factor = _number(scaling, "factor", path)
    if kind == "linear":
        return Rope(theta, "linear", factor)
    low, high = (_number(scaling, name, path) for name in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        _broken(path, f"{key}.high_freq_factor", high, f"above low_freq_factor {low}")
    original = _count(scaling, "original_max_position_embeddings", path, default=max_position)
    return Rope(theta, "llama3", factor, low, high, original)


def _count(document: dict[str, Any], key: str, path: str, default: int | None = None) -> int:
    value = document.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        _broken(path, key, value, "a positive whole number")
    return value


def _number(document: dict[str, Any], key: str, path: str, default: float | None = None) -> float:
    value = document.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
        _broken(path, key, value, "a positive number")
    return float(value)


def _token_ids(value: Any, key: str, path: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids
    ):
        _broken(path, key, value, "a token id or a list of them")
    return tuple(ids)


def _same(value: Any, accepted: Any) -> bool:
    """Equal, and not merely so because Python holds 0 == False == 0.0."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


def _unsupported(path: str, key: str, value: Any, accepted: Any) -> NoReturn:
    raise UsageError(
        "model.unsupported",
        f"{path}: {key} is {json.dumps(value)[:200]}, and the reference backend only does "
        f"{json.dumps(accepted)}; choose another checkpoint or the vllm backend.",
        key=key,
        value=value,
    )


def _broken(path: str, key: str, value: Any, wanted: str) -> NoReturn:
    found = "missing" if value is None else json.dumps(value)[:200]
    raise UsageError(
        "model.broken",
        f"{path}: {key} is {found}, but must be {wanted}; download the file again.",
        key=key,
        value=value,
    )
