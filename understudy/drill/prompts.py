"""The drill's prompts and their expected answers.

With greedy sampling an answer depends on the model alone, so every engine must give the same one;
where the backend computes every request alike whatever runs beside it, that holds for sampling with
a seed, too. Answers are learnt before the first kill; prompts of a kind that the server refuses, or
with too short an answer, are not used. `hack.drill_vllm` takes them from a server without failover,
which detects errors that both engines share.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from plumbing.errors import UnderstudyError
from understudy.drill.clients import Target, send
from understudy.drill.records import End, Exchange, Prompt
from understudy.http_get import get

ANSWER_TOKENS_MAX = 16  # short answers allow many requests
CHUNKS_MIN = 3

COMPLETIONS = (
    "The understudy steps onto the stage and",
    "One two three four five six",
    "def fibonacci(n):",
    "Once upon a time there was a lock that",
    "A B C D E F G",
    "The weights were loaded once, and",
)
LONG_TOKENS = 96  # so that a kill meets a stream that has much behind it
# What is added to a plain body. A backend that does not know a kind answers 400.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "usage": {"stream_options": {"include_usage": True}},
    "long": {"max_tokens": LONG_TOKENS, "ignore_eos": True},
    "whole": {"stream": False},
    "seed": {"temperature": 1.0, "top_p": 0.9, "seed": 7, "max_tokens": 32},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "min-tokens": {"min_tokens": ANSWER_TOKENS_MAX - 2},
    "stop": {"stop": ["e", "qu"], "max_tokens": 32},
    "bias": {"logit_bias": {"101": -100, "113": 3}, "max_tokens": 24},
    "whole-long": {"stream": False, "max_tokens": LONG_TOKENS},
    "whole-seed": {"stream": False, "temperature": 1.0, "seed": 11, "max_tokens": 32},
}
LONG_STREAM_TOKENS = 160  # longer than a turn with streams beside it: it is parked, and resumes
LONG_KINDS = ("long", "seed", "penalties", "usage")  # of a stream that outlasts its model's turn
CHATS = ("Name three colours.", "What is a phone call?", "Count to seven.")


def _prompt(key: str, model: str, text: str, **more: Any) -> Prompt:
    """A short greedy stream of a completion."""
    body = {"model": model, "max_tokens": ANSWER_TOKENS_MAX, "temperature": 0, "stream": True}
    return Prompt(key, "/v1/completions", {**body, "prompt": text, **more})


def all_prompts(model: str) -> list[Prompt]:
    """All prompts, for `model` as `/v1/models` names it; both kinds alternate."""
    completions = [_prompt(f"completion-{n}", model, text) for n, text in enumerate(COMPLETIONS)]
    chats = []
    for number, text in enumerate(CHATS):
        body = {**completions[0].body, "messages": [{"role": "user", "content": text}]}
        del body["prompt"]
        chats.append(Prompt(f"chat-{number}", "/v1/chat/completions", body))
    return _mixed(chats, completions, every=2)


def varied_prompts(model: str) -> list[Prompt]:
    """A few plain prompts, and one of every kind that an engine must continue in its own way."""
    plain = all_prompts(model)[:3]
    pairs = zip(KINDS.items(), itertools.cycle(plain), strict=False)
    varied = [
        Prompt(f"{name}-{base.key}", base.path, {**base.body, **change})
        for (name, change), base in pairs
    ]
    return [*plain, *varied]


def bank_of(backend: str | None, model: str) -> list[Prompt]:
    """The prompts that a drill sends to `backend`."""
    return all_prompts(model) if backend == "vllm" else varied_prompts(model)


def pool_prompts(backend: str | None, model: str) -> list[Prompt]:
    """Short and long streams, whole answers, and the state that must survive a pause; their keys
    name the model."""
    mixed = bank_of(backend, model)
    common = {"max_tokens": LONG_STREAM_TOKENS, "ignore_eos": True}
    kinds = LONG_KINDS if backend != "vllm" else LONG_KINDS[:1]  # as in `bank_of`
    path, body = mixed[0].path, mixed[0].body
    long = [Prompt(f"stream-{it}", path, {**body, **KINDS[it], **common}) for it in kinds]
    whole = Prompt("whole-stream", path, {**body, **common, "stream": False})
    return [
        Prompt(f"{model}/{each.key}", each.path, each.body)
        for each in _mixed([*long, whole], mixed, every=3)
    ]


def _mixed(few: Sequence[Prompt], many: Sequence[Prompt], every: int) -> list[Prompt]:
    """One of the few after every `every` of the others, as long as there are any."""
    rest, mixed = list(few), []
    for start in range(0, len(many), every):
        mixed += [*many[start : start + every], *rest[:1]]
        rest = rest[1:]
    return [*mixed, *rest]


async def model_name(target: Target) -> str:
    """What the pod calls its first model.

    Raises:
        UnderstudyError: `drill.no_model`.
    """
    answer = await get(f"http://{target.address}/v1/models", timeout_s=30)
    models = answer.json().get("data") or [{}]
    name = models[0].get("id")
    if not isinstance(name, str):
        reply = json.dumps(answer.json())[:200] if answer.body else answer.reason
        raise UnderstudyError(
            "drill.no_model", f"/v1/models lists no model ({answer.status}: {reply})"
        )
    return name


async def learn_answers(
    target: Target, prompts: Sequence[Prompt], *, needs_token: bool = True
) -> tuple[list[Prompt], dict[str, Exchange]]:
    """Send each prompt once; returns those that can be used, and their answers by key.

    Without `needs_token`, any server will do, not only our engines.

    Raises:
        UnderstudyError: `drill.no_answers`, the model gave no usable answer.
    """
    used: list[Prompt] = []
    answers: dict[str, Exchange] = {}
    last, refused = "no prompt was sent", None
    for prompt in prompts:
        answer = await send(target, prompt)
        is_whole = answer.end is End.DONE and answer.status == 200
        if is_whole and answer.token is None and needs_token:
            raise UnderstudyError(
                "drill.no_token",
                "the answers carry no X-Understudy-Token; is this an engine, and does no proxy"
                " before it remove the header?",
            )
        if is_whole and answer.chunks >= _chunks_min(prompt):
            used.append(prompt)
            answers[prompt.key] = answer
        else:
            refused = answer.detail if answer.end is End.REFUSED and not answer.status else None
            last = f"{prompt.path}: {answer.status} {answer.end}, {answer.chunks} pieces of text"
            last += f", {answer.detail}" if answer.detail else ""
    if not used:
        who = target.url or target.address
        why = f"gave no usable answer; the last one: {last}"
        why = f"refuses connections ({refused})" if refused is not None else why
        raise UnderstudyError("drill.no_answers", f"{who} {why}")
    return used, answers


def _chunks_min(prompt: Prompt) -> int:
    """The least pieces of text of a usable answer: of a stream enough to be cut in between, where
    nothing but a stop string makes it short."""
    is_free = "stop" not in prompt.body
    return CHUNKS_MIN if is_free and prompt.body.get("stream") else 1
