"""What one engine runs: the command line's settings, and the meaning of a checkpoint's
`config.json`.

Owns every key that changes the numbers of a Llama. Knows no tensors and no numpy. The surprising
thing: a key that is *not understood* must stop the load. A decoder that skips an unknown rope type
still produces fluent text, and its errors would go unnoticed.
"""

from __future__ import annotations

import math
import os
from itertools import product
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from engine.backends.shards import broken, read_json
from engine.messages import RANKS_MAX
from engine.messages import Rank as RankNumber
from plumbing.errors import UsageError

# A key may be absent, null, or hold one of these values. Anything else changes the arithmetic.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "architectures": (["LlamaForCausalLM"],),
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "rope_type": ("default",),
    "partial_rotary_factor": (1.0,),
    **dict.fromkeys(("attention_bias", "mlp_bias", "rope_interleaved"), (False,)),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), (False,)),
    **dict.fromkeys(("quantization_config", "compression_config", "rope_scaling"), (None,)),
    **dict.fromkeys(("sliding_window", "num_local_experts"), (None,)),
}
# The one chat template: `<s><|user|>…<|end|><|assistant|>`, with its tokens.
BOS, END_OF_TURN, ASSISTANT_TURN = "<s>", "<|end|>", "<|assistant|>"
CHAT_SPECIALS = (BOS, "<|system|>", "<|user|>", ASSISTANT_TURN, END_OF_TURN)

Count = Annotated[int, Meta(gt=0, lt=1 << 31)]
Positive = Annotated[float, Meta(gt=0, lt=1e30)]
TokenId = Annotated[int, Meta(ge=0)]


class Settings(Struct, frozen=True):
    """The command line's, for one rank. `cache_tokens` None: as many as the slots hold."""

    directory: str
    slots: Annotated[int, Meta(ge=1, le=1024)] = 8
    max_context: Annotated[int, Meta(ge=2, le=1 << 20)] | None = None  # the longest of any Llama
    cache_tokens: Annotated[int, Meta(ge=8, le=1 << 27)] | None = None  # an index of 256 MiB
    may_adopt: bool = True
    rank: RankNumber = 0
    ranks: Annotated[int, Meta(ge=1, le=RANKS_MAX)] = 1
    # Far below the three seconds without progress after which generation counts as hung.
    token_interval_ms: Annotated[int, Meta(ge=0, le=1000)] = 0


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
    rope_theta: Positive = 10000.0
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
    """Read and check `config.json`.

    Raises:
        UsageError: `model.missing`, `model.broken` or `model.unsupported`; the message names
            the file, the key and the value.
    """
    path = os.path.join(directory, "config.json")
    return parse_config(read_json(path), path)


def parse_config(document: dict[str, Any], path: str) -> LlamaConfig:
    """The meaning of `document`, which is from `path`."""
    found = {key: value for key, value in document.items() if value is not None}
    rope = found.pop("rope_parameters", {})  # since transformers 5
    found |= rope if isinstance(rope, dict) else {"rope_type": rope}
    for key, accepted in ACCEPTED.items():
        if key in found and found[key] not in accepted:
            unsupported(path, f"{key} is {found[key]!r:.200}, and must be {accepted[0]!r}")
    if not {"architectures", "model_type"} & found.keys():
        unsupported(path, "model_type must be llama")
    if not isinstance(found.get("eos_token_id", []), list):
        found["eos_token_id"] = [found["eos_token_id"]]
    try:
        config = msgspec.convert(found | {"head_rows": None}, LlamaConfig)
    except msgspec.ValidationError as error:
        broken(path, str(error)[:200])
    heads, kv_heads = config.heads, config.kv_heads or config.heads
    if heads % kv_heads:
        broken(path, f"num_key_value_heads {kv_heads} must divide num_attention_heads {heads}")
    if not config.head_dim and config.hidden_size % heads:
        broken(path, f"num_attention_heads {heads} must divide hidden_size {config.hidden_size}")
    head_dim = config.head_dim or config.hidden_size // heads
    if head_dim % 2:
        broken(path, f"head_dim {head_dim} must be even, since rotary embedding turns pairs")
    return replace(config, kv_heads=kv_heads, head_dim=head_dim)


def unsupported(path: str, reason: str) -> NoReturn:
    what = f"{path}: {reason}; choose another checkpoint or the vllm backend."
    raise UsageError("model.unsupported", what)
