"""Writes a small random Llama checkpoint, to serve where there is no model.

`python -m engine.backends.reference.random_model DIRECTORY`. The files are the same for the same
seed. Its tokenizer is byte-level, and its answers are printable ASCII, one character per token:
the output rows of all other tokens are zero, so greedy text shows exactly which tokens were made.
The surprising thing: weights are scaled up. A freshly initialised Llama repeats one token whatever
the prompt; this one must give each prompt its own answer, or a drill could not tell a right answer
from a wrong one.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, processors

from engine.backends.reference.config import (
    BOS,
    CHAT_SPECIALS,
    END_OF_TURN,
    LlamaConfig,
    parse_config,
)
from plumbing.errors import UnderstudyError, UsageError

EOS = "</s>"
SPECIALS = (BOS, EOS, *CHAT_SPECIALS[1:])
# What `Tokenizer.render_chat` writes, for vLLM.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] or message.content is not string %}"
    "{{ raise_exception('a message needs a known role and a text') }}{% endif %}"
    "{{ '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PRINTABLE = range(0x20, 0x7F)
# In the order in which they are written: without the last one there is no checkpoint.
FILES = (
    *("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    "config.json",
)

# Standard deviation of a projection's output per unit of input. At 1 the residual stream keeps its
# past; above, attention and MLP outweigh it and the next token depends on the whole prompt.
GAIN = 3.0
WORD_EMBEDDING_STD = 1.0


def write_random_model(
    directory: str,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 192,
    max_position: int = 2048,
) -> None:
    """Write FILES, with weights as bfloat16.

    Raises:
        UsageError: `model.exists` when the directory has other files than an interrupted call's.
    """
    os.makedirs(directory, exist_ok=True)
    if set(os.listdir(directory)) - {*FILES[:-1]}:
        raise UsageError(
            "model.exists", f"{directory} is not empty; name a new directory for the model."
        )
    tokenizer = byte_tokenizer()
    bos, eos, end_of_turn = (tokenizer.token_to_id(name) for name in (BOS, EOS, END_OF_TURN))
    document = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos,
        "eos_token_id": [eos, end_of_turn],
    }
    generation = {"bos_token_id": bos, "eos_token_id": [eos, end_of_turn]}  # for vLLM
    for_tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
    }
    paths = [os.path.join(directory, name) for name in FILES]
    config = parse_config(document, paths[-1])
    save_bfloat16(paths[0], random_weights(config, seed))
    tokenizer.save(paths[1])
    for path, content in zip(paths[2:], (for_tokenizer, generation, document), strict=True):
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")


def random_weights(config: LlamaConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """Normal weights for every tensor; norms are 1 and the head knows printable ASCII only."""
    source = np.random.default_rng(seed)
    weights = {}
    for name, shape in config.tensor_shapes().items():
        if len(shape) == 1:
            weights[name] = np.ones(shape, np.float32)
            continue
        std = WORD_EMBEDDING_STD if "embed_tokens" in name else GAIN / shape[1] ** 0.5
        weights[name] = source.standard_normal(shape, np.float32) * np.float32(std)
    head = weights["lm_head.weight"]
    head[: PRINTABLE.start] = 0
    head[PRINTABLE.stop :] = 0
    return weights


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte, id = the byte; special tokens follow."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def byte_letters() -> list[str]:
    """The letter that byte-level tokenizers (GPT-2's scheme) write for each byte."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]


def save_bfloat16(path: str, weights: dict[str, NDArray[np.float32]]) -> None:
    """A safetensors file of bfloat16, rounded to nearest even.

    By hand: the library takes bfloat16 from torch only, and its raw interface changed in 0.8.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in weights.items():
        start, end = end, end + 2 * array.size
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns tensors to 8 bytes
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for array in weights.values():
            bits = array.view(np.uint32)
            file.write(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.backends.reference.random_model",
        description="Write a random Llama checkpoint, by default a small one.",
        epilog="--hidden 4096 --layers 6 makes a file of 0.6 GiB.",
    )
    parser.add_argument("directory", help="new or empty")
    defaults = {"seed": 0, "hidden": 64, "layers": 2, "heads": 4, "kv-heads": 2}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--head-dim", type=int, help="default: hidden / heads")
    text = "succeed without a change if the directory has a model"
    parser.add_argument("--if-missing", action="store_true", help=text)
    options = vars(parser.parse_args(arguments))
    directory, if_missing = options.pop("directory"), options.pop("if_missing")
    if if_missing and os.path.exists(os.path.join(directory, FILES[-1])):
        return 0
    try:
        write_random_model(directory, **options)
    except UnderstudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
