"""Requests whose next token, text or end depends on what came before, each in another way."""

from __future__ import annotations

from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TOKENS = 18
GREEDY = {"prompt": "hello", "temperature": 0, "max_tokens": TOKENS}  # 1_}o1,:kBv1+J=12.*
SEEDED = {**GREEDY, "temperature": 0.9, "top_p": 0.9, "seed": 7}
TALK = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": TOKENS}
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
# With a frequency penalty these make "☕" again and again, which has three tokens.
COFFEE = {str(byte): 100 - place / 2 for place, byte in enumerate("☕".encode())}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, GREEDY),
    "greedy, usage": (COMPLETIONS, {**GREEDY, **USAGE}),
    "greedy, continuous usage": (COMPLETIONS, {**GREEDY, **CONTINUOUS}),
    "chat": (CHAT, TALK),
    "chat, continuous usage": (CHAT, {**TALK, **CONTINUOUS}),
    "prompt of three chunks": (COMPLETIONS, {**GREEDY, "prompt": "a longer prompt, " * 5}),
    "to the end of the context": (COMPLETIONS, {"prompt": [65] * 140, "max_tokens": 20, "seed": 1}),
    "one token": (COMPLETIONS, {**GREEDY, "max_tokens": 1}),
    "seed": (COMPLETIONS, SEEDED),
    "no seed": (CHAT, {**TALK, "temperature": 1.0}),
    "stop string": (COMPLETIONS, {**GREEDY, "stop": ["=12."]}),
    "stop string, held back": (COMPLETIONS, {**GREEDY, "stop": ["2.*!"], **USAGE}),
    "stop string of two that overlap": (COMPLETIONS, {**GREEDY, "stop": ["1+J=2", "+J=1", "J="]}),
    "stop string behind min_tokens": (
        COMPLETIONS,
        {**GREEDY, "stop": ["1"], "min_tokens": 6, **USAGE},
    ),
    "stop token": (COMPLETIONS, {**GREEDY, "stop_token_ids": [ord("J")], **USAGE}),
    "stop token behind min_tokens": (
        COMPLETIONS,
        {**GREEDY, "stop_token_ids": [ord("1"), ord("o")], "min_tokens": 9},
    ),
    "end token": (COMPLETIONS, {**SEEDED, "logit_bias": {"257": 9, "261": 9}, "min_tokens": 5}),
    "end token ignored": (COMPLETIONS, {**SEEDED, "logit_bias": {"257": 8}, "ignore_eos": True}),
    "all penalties, seed": (
        CHAT,
        {
            **TALK,
            "temperature": 0.8,
            "seed": 3,
            "repetition_penalty": 1.3,
            "presence_penalty": 1.5,
            "frequency_penalty": -0.5,
        },
    ),
    "logit bias": (COMPLETIONS, {**GREEDY, "logit_bias": {"49": -100, "88": 3.5}}),
    "half characters": (
        COMPLETIONS,
        {**GREEDY, "logit_bias": COFFEE, "frequency_penalty": 2, **USAGE},
    ),
}
