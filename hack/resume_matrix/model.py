"""A random checkpoint that thinks: its tokenizer knows <think> and </think>, for the parsers of
reasoning. Its weights are those of every other random checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from engine.backends.reference.random_model import END_OF_TURN, EOS, SPECIALS, write_random_model

NAMES = {"<|system|>": "<think>", END_OF_TURN: "</think>"}
EOS_TOKEN = 256 + SPECIALS.index(EOS)
THOUGHT_TOKEN = 256 + SPECIALS.index(END_OF_TURN)  # the end of a thought
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|user|>' ~ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_thinking_model(directory: Path, hidden: int = 256) -> None:
    """Heads of 64: vLLM's attention for the CPU needs at least 32."""
    write_random_model(str(directory), hidden=hidden)
    tokenizer = directory / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    for old, new in NAMES.items():
        text = text.replace(old, new)
    tokenizer.write_text(text, encoding="utf-8")
    _change(directory / "tokenizer_config.json", chat_template=TEMPLATE)
    _change(directory / "generation_config.json", eos_token_id=EOS_TOKEN)


def _change(path: Path, **values: object) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, **values}), encoding="utf-8")
