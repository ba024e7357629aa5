"""The kinds of requests: each is asked once, cut at several tokens, and resumed.

Greedy or seeded, so that there is one right answer. Some are made of what the first one answers: a
stop string must lie over several tokens of it.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from tests.vllm.resume_matrix.model import ADAPTER, EOS_TOKEN, THOUGHT_TOKEN

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
RESPONSES = "/v1/responses"
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
# Bytes that are no character each by themselves.
HALF_CHARACTERS = list(range(128, 256))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 99, "minimum": 10},
        "tags": {
            "type": "array",
            "items": {"enum": ["red", "green"]},
            "minItems": 2,
            "maxItems": 2,
        },
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SMALL = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "n": {"type": "integer"}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SMALL}}
ARGUMENTS = r'\{"a": "[a-z]{6}", "n": [0-9]{3}\}'
CALL = rf'<tool_call>\n\{{"name": "look", "arguments": {ARGUMENTS}\}}\n</tool_call>'
HELLO = [{"role": "user", "content": "hello there"}]


class Row(NamedTuple):
    """`is_resumed`: false for a kind whose class is `none`."""

    url: str
    body: dict[str, Any]
    is_resumed: bool = True


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(32, 126) for _ in range(length)]


def first_row() -> Row:
    return completion(1)


def completion(which: int, length: int = 20, /, **more: Any) -> Row:
    body: dict[str, Any] = {
        "prompt": prompt(length, which),
        "max_tokens": 40,
        "temperature": 0,
        **more,
    }
    if "structured_outputs" in more:
        body["prompt"] = [*body["prompt"], THOUGHT_TOKEN]  # a grammar begins behind the thought
    elif "logit_bias" not in more:
        body["ignore_eos"] = True
    return Row(COMPLETIONS, {"model": "m", "stream": True, **USAGE, **body})


def chat(url: str = CHAT, **more: Any) -> Row:
    body: dict[str, Any] = {
        "messages": HELLO,
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 60,
        **more,
    }
    if url == CHAT:
        body = {**USAGE, "logit_bias": {str(THOUGHT_TOKEN): 5.5}, **body}
    return Row(url, {"model": "m", "stream": True, **body})


def adapter_rows() -> dict[str, Row]:
    """Apart from the others: in a batch with an adapter's requests, vLLM's CPU build applies the
    adapter to those without one, too."""
    return {
        "adapter": completion(1, model=ADAPTER),
        "adapter, seed and penalty": completion(
            2, model=ADAPTER, temperature=1.0, seed=9, frequency_penalty=0.5
        ),
        "adapter, regular expression": completion(
            3, model=ADAPTER, structured_outputs={"regex": r"[a-f]{4}-[0-9]{6}-(left|right)"}
        ),
    }


def long_rows(tokens: int) -> dict[str, Row]:
    """Prompts of `tokens` tokens."""
    return {
        f"{tokens:,} tokens": completion(7, tokens),
        f"{tokens:,} tokens, seed and penalties": completion(
            8, tokens, temperature=1.0, seed=8, frequency_penalty=0.4, repetition_penalty=1.1
        ),
    }


def unseeded_row() -> Row:
    """Of a batch in which no row has a seed or is greedy, some GPUs sample by another kernel."""
    return completion(2, temperature=1.0, top_p=0.9, max_tokens=400)


def all_rows(tokens: list[int], text: str) -> dict[str, Row]:
    """`tokens` and `text` are what the first row answers."""
    early = sorted({*tokens[2:10], *range(70, 100)})
    words: dict[str, Any] = {"bad_words": [text[5:7], text[20:22]]}
    penalties: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    }
    return {
        "penalties": completion(1, **penalties),
        "min tokens": completion(1, min_tokens=15, stop_token_ids=early),
        "stop string": completion(1, stop=[text[14:18]]),
        "stop string, included": completion(1, stop=[text[14:18]], include_stop_str_in_output=True),
        "stop string after min tokens": completion(
            1, stop=[text[3:5], "qq", text[25:28]], min_tokens=10
        ),
        "stop token": completion(1, stop_token_ids=[tokens[12]]),
        "bad words": completion(1, **words, frequency_penalty=0.2),
        "logit bias": completion(1, logit_bias={str(tokens[3]): -4.0, "65": 2.0}),
        "end of text": completion(3, 25, max_tokens=120, logit_bias={str(EOS_TOKEN): 5.5}),
        "logprobs, usage in each event": completion(1, logprobs=3, **CONTINUOUS),
        "seed": completion(1, temperature=1.0, seed=7),
        "seed, top k and p": completion(1, temperature=0.9, top_p=0.9, top_k=40, seed=11),
        "seed, min p": completion(1, temperature=1.0, min_p=0.05, seed=3),
        "seed, top k alone": completion(1, temperature=1.0, top_k=20, seed=4),
        "two answers": completion(1, n=2, temperature=1.0, seed=6)._replace(is_resumed=False),
        "half characters": completion(
            9, 12, temperature=1.0, seed=2, allowed_token_ids=HALF_CHARACTERS
        ),
        "characters of several tokens": completion(
            9, 12, temperature=1.0, seed=2, structured_outputs={"regex": "[äöü€漢字😀]{8}"}
        ),
        "JSON schema": completion(5, 30, max_tokens=120, structured_outputs={"json": PERSON}),
        "regular expression": completion(
            1, structured_outputs={"regex": r"[a-f]{4}-[0-9]{6}-(left|right)-[x-z]{8}"}
        ),
        "choice": completion(
            1, structured_outputs={"choice": ["a very long choice", "b other", "c third one"]}
        ),
        "seed, penalty and expression": completion(
            1,
            temperature=1.0,
            seed=5,
            presence_penalty=0.6,
            structured_outputs={"regex": r"[a-z ]{20,30}\."},
        ),
        "model's length": completion(6, 1000, max_tokens=24),
        "one token": completion(1, max_tokens=1),
        "echo": completion(1, echo=True, max_tokens=10),
        "reasoning": chat(),
        "reasoning, then JSON": chat(max_tokens=120, structured_outputs={"json": SMALL}),
        "tool call": chat(
            max_tokens=160, tools=[TOOL], tool_choice="auto", structured_outputs={"regex": CALL}
        ),
        "named tool": chat(
            max_tokens=120,
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "look"}},
        ),
        "messages": chat(MESSAGES, temperature=0, max_tokens=30, seed=None),
        "responses": Row(
            RESPONSES,
            {
                "model": "m",
                "input": "hello there",
                "stream": True,
                "temperature": 0,
                "max_output_tokens": 30,
            },
        ),
    }
