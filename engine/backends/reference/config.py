"""What one engine runs: the command line's settings, and the meaning of a checkpoint's
`config.json`.

Owns every key that changes the numbers of a Llama. Knows no tensors and no numpy. The surprising
thing: a key that is *not understood* must stop the load. A decoder that skips an unknown rope type
still produces fluent text, and its errors would go unnoticed.
"""

from __future__ import annotations

import json
import math
import os
from itertools import product
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from engine.backends.shards import read_json
from engine.messages import RANKS_MAX, KvMemoryKind
from engine.messages import Rank as RankNumber
from plumbing.errors import UsageError

ARCHITECTURE = "LlamaForCausalLM"

# A key may be absent, or hold one of these values. Anything else changes the arithmetic.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "architectures": ([ARCHITECTURE], None),
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
ORIGINAL = "original_max_position_embeddings"
# What each rope type needs beside its base.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
}

# The one chat template: `<s><|user|>…<|end|><|assistant|>`, with its tokens.
BOS, END_OF_TURN, ASSISTANT_TURN = "<s>", "<|end|>", "<|assistant|>"
CHAT_SPECIALS = (BOS, "<|system|>", "<|user|>", ASSISTANT_TURN, END_OF_TURN)

Count = Annotated[int, Meta(gt=0, lt=1 << 31)]
Positive = Annotated[float, Meta(gt=0, lt=1e30)]
TokenId = Annotated[int, Meta(ge=0)]


class Settings(Struct, frozen=True):
    """The command line's, for one rank. `max_context` None: what fits; `cache_tokens` None: as many
    as the slots hold."""

    directory: str
    slots: Annotated[int, Meta(ge=1, le=1024)] = 8
    max_context: Annotated[int, Meta(ge=2, le=1 << 20)] | None = None  # the longest of any Llama
    kv_bytes: int | None = None
    cache_tokens: Annotated[int, Meta(ge=0, le=1 << 27)] | None = None  # an index of 256 MiB
    kv_memory: KvMemoryKind = "gms"
    may_adopt: bool = True
    rank: RankNumber = 0
    ranks: Annotated[int, Meta(ge=1, le=RANKS_MAX)] = 1
    # Far below the three seconds without progress after which generation counts as hung.
    token_interval_ms: Annotated[int, Meta(ge=0, le=1000)] = 0


class Rope(
    Struct,
    frozen=True,
    rename={"kind": "rope_type", "theta": "rope_theta", "original_max_position": ORIGINAL},
):
    """Rotary embedding: how the angle per position is stretched beyond the trained context. As
    `rope_parameters` of transformers 5."""

    theta: Positive = 10000.0
    kind: Literal["default", "llama3"] = "default"
    factor: Positive = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position: Count = 8192


class LlamaConfig(
    Struct,
    frozen=True,
    kw_only=True,
    rename={
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "max_position": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
        "eos_token_ids": "eos_token_id",
    },
):
    """The numbers of one Llama, or of one rank's share of it (`of_rank`).

    `head_dim` need not be `hidden_size / heads`. `head_rows` are the first and the end of the rows
    of the output head that are computed here; None: all.
    """

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    layers: Count
    heads: Count
    kv_heads: Count = 0  # in a file: as many as `heads`
    head_dim: Count = 0  # in a file: `hidden_size / heads`
    max_position: Count = 2048
    norm_eps: Positive = 1e-6
    rope: Rope
    tie_embeddings: bool = False
    eos_token_ids: tuple[TokenId, ...] = ()
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
            head_rows=(self.vocab_size * rank // ranks, self.vocab_size * (rank + 1) // ranks),
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


def read_config(directory: str) -> LlamaConfig:
    """Read `config.json`, and `generation_config.json` where there is one.

    Raises:
        UsageError: `model.missing`, `model.broken` or `model.unsupported`; the message names
            the file, the key and the value.
    """
    path = os.path.join(directory, "config.json")
    document = read_json(path)
    generation_path = os.path.join(directory, "generation_config.json")
    generation = read_json(generation_path) if os.path.exists(generation_path) else {}
    return parse_config(document, generation, path)


def parse_config(document: dict[str, Any], generation: dict[str, Any], path: str) -> LlamaConfig:
    """Check and translate. The end-of-sequence ids of `generation` win, as in transformers."""
    for key, accepted in ACCEPTED.items():
        if key in document and document[key] not in accepted:
            _unsupported(path, key, document[key], accepted[0])
    if "eos_token_id" in generation:
        document = {**document, "eos_token_id": generation["eos_token_id"]}
    found = {key: value for key, value in document.items() if value is not None}
    if not {"architectures", "model_type"} & found.keys():
        _unsupported(path, "model_type", None, "llama")
    if not isinstance(found.get("eos_token_id", []), list):
        found["eos_token_id"] = [found["eos_token_id"]]
    found |= {"rope": _rope(found, path), "head_rows": None}
    try:
        config = msgspec.convert(found, LlamaConfig, strict=True)
    except msgspec.ValidationError as error:
        _broken(path, str(error)[:200])
    heads, kv_heads = config.heads, config.kv_heads or config.heads
    if heads % kv_heads:
        _broken(path, f"num_key_value_heads {kv_heads} must divide num_attention_heads {heads}")
    if not config.head_dim and config.hidden_size % heads:
        _broken(path, f"num_attention_heads {heads} must divide hidden_size {config.hidden_size}")
    head_dim = config.head_dim or config.hidden_size // heads
    if not config.rope.low_freq_factor < config.rope.high_freq_factor:
        _broken(path, "the rope's low_freq_factor must be below its high_freq_factor")
    if head_dim % 2:
        _broken(path, f"head_dim {head_dim} must be even, since rotary embedding turns pairs")
    return replace(config, kv_heads=kv_heads, head_dim=head_dim)


def _rope(found: dict[str, Any], path: str) -> dict[str, Any]:
    """The keys of `Rope` from those of transformers 5 (`rope_parameters`) or 4."""
    name = "rope_parameters" if "rope_parameters" in found else "rope_scaling"
    given = found.get(name, {})
    if not isinstance(given, dict):
        _broken(path, f"{name} is not an object")
    rope = {"rope_theta": found.get("rope_theta", Rope().theta)}
    rope |= {key: value for key, value in given.items() if value is not None}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in ROPE_KEYS:
        _unsupported(path, f"{name}.rope_type", kind, list(ROPE_KEYS))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        _unsupported(path, f"{name}.partial_rotary_factor", rope["partial_rotary_factor"], 1.0)
    rope.setdefault(ORIGINAL, found.get("max_position_embeddings", 2048))
    missing = [key for key in ROPE_KEYS[kind] if key not in rope]
    if missing:
        _broken(path, f"{name} lacks {missing[0]}")
    return {"rope_type": kind, **{key: rope[key] for key in ("rope_theta", *ROPE_KEYS[kind])}}


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
