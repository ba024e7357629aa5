"""The random model of the reference backend as a GGUF file, for llama.cpp.

The same weights and the same tokenizer, of one token per byte. Its answers differ from the
reference backend's (rotary embeddings pair other elements there), so they are compared with its
own. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.backends.reference.config import parse_config
from engine.backends.reference.random_model import random_weights, write_random_model

VERSION, ALIGNMENT = 3, 32
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
CONTROL, BYTE = 3, 6  # types of tokens
BYTES = 256
# HF's names of a layer's tensors.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(path: Path, seed: int) -> None:
    """Write the random model of `seed`."""
    with tempfile.TemporaryDirectory() as checkpoint:
        write_random_model(checkpoint, seed=seed)
        keys = json.loads(Path(checkpoint, "config.json").read_text())
        generation = json.loads(Path(checkpoint, "generation_config.json").read_text())
    config = parse_config(keys, generation, str(path))
    tensors = {_name(name): each for name, each in random_weights(config, seed).items()}
    with path.open("wb") as file:
        file.write(b"".join(_head(_values(keys), tensors)))
        for array in tensors.values():
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            file.write(array.astype("<f4").tobytes())


def _name(hf: str) -> str:
    stem, _, kind = hf.rpartition(".")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{kind}"
    _, _, number, rest = stem.split(".", 3)  # model.layers.0.mlp.up_proj
    return f"blk.{number}.{LAYER[rest]}.{kind}"


def _values(keys: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    """The metadata, each with its type."""
    specials = keys["vocab_size"] - BYTES
    tokens = [f"<0x{each:02X}>" for each in range(BYTES)]
    tokens += [f"<special-{each}>" for each in range(specials)]
    kinds = [BYTE] * BYTES + [CONTROL] * specials
    return {
        "general.architecture": (STRING, "llama"),
        "general.alignment": (UINT32, ALIGNMENT),
        "llama.context_length": (UINT32, keys["max_position_embeddings"]),
        "llama.embedding_length": (UINT32, keys["hidden_size"]),
        "llama.block_count": (UINT32, keys["num_hidden_layers"]),
        "llama.feed_forward_length": (UINT32, keys["intermediate_size"]),
        "llama.attention.head_count": (UINT32, keys["num_attention_heads"]),
        "llama.attention.head_count_kv": (UINT32, keys["num_key_value_heads"]),
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, keys["rms_norm_eps"]),
        "llama.rope.dimension_count": (UINT32, keys["head_dim"]),
        "llama.rope.freq_base": (FLOAT32, keys["rope_theta"]),
        "llama.vocab_size": (UINT32, keys["vocab_size"]),
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.scores": (ARRAY, (FLOAT32, [0.0] * len(tokens))),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, kinds)),
        "tokenizer.ggml.bos_token_id": (UINT32, keys["bos_token_id"]),
        "tokenizer.ggml.eos_token_id": (UINT32, keys["eos_token_id"]),
        "tokenizer.ggml.unknown_token_id": (UINT32, len(tokens) - 1),
        "tokenizer.ggml.add_space_prefix": (BOOL, False),
    }


def _head(
    values: Mapping[str, tuple[int, Any]], tensors: Mapping[str, np.ndarray[Any, Any]]
) -> Iterator[bytes]:
    yield b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(values))
    for key, (kind, value) in values.items():
        yield _string(key) + struct.pack("<I", kind) + _value(kind, value)
    offset = 0
    for name, array in tensors.items():
        sizes = array.shape[::-1]
        yield _string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, offset)
        offset += array.size * 4
        offset += -offset % ALIGNMENT


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        of: int
        each: Sequence[Any]
        of, each = value
        return struct.pack("<IQ", of, len(each)) + b"".join(_value(of, one) for one in each)
    return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}[kind], value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
