"""A random checkpoint that thinks: its tokenizer knows <think> and </think>, for the parsers of
reasoning. Its weights are those of every other random checkpoint. And an adapter of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy
from safetensors.numpy import save_file

from engine.backends.reference.random_model import END_OF_TURN, EOS, SPECIALS, write_random_model

NAMES = {"<|system|>": "<think>", END_OF_TURN: "</think>"}
EOS_TOKEN = 256 + SPECIALS.index(EOS)
THOUGHT_TOKEN = 256 + SPECIALS.index(END_OF_TURN)  # the end of a thought
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|user|>' ~ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


ADAPTER = "adapted"
HIDDEN, HEADS, KV_HEADS, LAYERS, RANK = 256, 4, 2, 2, 8
POSITIONS = 1 << 16


def write_thinking_model(directory: Path) -> None:
    """Heads of 64: vLLM's attention for the CPU needs at least 32."""
    shape = {"hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS, "layers": LAYERS}
    write_random_model(str(directory), **shape, max_position=POSITIONS)
    tokenizer = directory / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    for old, new in NAMES.items():
        text = text.replace(old, new)
    tokenizer.write_text(text, encoding="utf-8")
    _change(directory / "tokenizer_config.json", chat_template=TEMPLATE)
    _change(directory / "generation_config.json", eos_token_id=EOS_TOKEN)


def write_adapter(directory: Path) -> None:
    """A random LoRA adapter of that model, strong enough that it chooses other tokens."""
    random = numpy.random.default_rng(1)
    widths = {"q_proj": HIDDEN, "v_proj": HIDDEN // HEADS * KV_HEADS}
    tensors = {}
    for layer, (name, width) in itertools.product(range(LAYERS), widths.items()):
        at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        for part, shape in (("lora_A", (RANK, HIDDEN)), ("lora_B", (width, RANK))):
            tensors[f"{at}.{part}.weight"] = random.standard_normal(shape, numpy.float32) / 8
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*widths]}
    (directory / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")


def _change(path: Path, **values: object) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, **values}), encoding="utf-8")
