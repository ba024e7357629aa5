"""The drill's prompts and their expected answers.

With greedy sampling an answer depends on the model alone, so every engine must give the same one.
Answers are learnt before the first kill; prompts with too short an answer are not used. They can
also come from a file, written by a server without failover that serves the same model: that detects
errors that both engines share. Its prompts must have a clear best token at each step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plumbing.errors import UnderstudyError, UsageError
from understudy.drill.clients import Target, send
from understudy.drill.records import End, Exchange, Prompt

ANSWER_TOKENS_MAX = 16  # short answers allow many requests
CHUNKS_MIN = 3
PROMPTS_USED = 6

COMPLETIONS = (
    "The understudy steps onto the stage and",
    "One two three four five six",
    "def fibonacci(n):",
    "Once upon a time there was a lock that",
    "A B C D E F G",
    "The weights were loaded once, and",
)
CHATS = ("Name three colours.", "What is a phone call?", "Count to seven.")


def all_prompts(model: str) -> list[Prompt]:
    """All prompts, for `model` as `/v1/models` names it; both kinds alternate."""
    common: dict[str, Any] = {
        "model": model,
        "max_tokens": ANSWER_TOKENS_MAX,
        "temperature": 0,
        "stream": True,
    }
    completions = [
        Prompt(f"completion-{number}", "/v1/completions", {**common, "prompt": text})
        for number, text in enumerate(COMPLETIONS)
    ]
    chats = [
        Prompt(
            f"chat-{number}",
            "/v1/chat/completions",
            {**common, "messages": [{"role": "user", "content": text}]},
        )
        for number, text in enumerate(CHATS)
    ]
    mixed: list[Prompt] = []
    while completions or chats:
        mixed += completions[:2] + chats[:1]
        completions, chats = completions[2:], chats[1:]
    return mixed


async def learn_answers(
    target: Target, prompts: Sequence[Prompt], *, needs_token: bool = True
) -> tuple[list[Prompt], dict[str, Exchange]]:
    """Send each prompt once; returns those to use, and their answers by key.

    Without `needs_token`, any server will do, not only our engines.

    Raises:
        UnderstudyError: `drill.no_answers`, the model gave no usable answer.
    """
    used: list[Prompt] = []
    answers: dict[str, Exchange] = {}
    last = "no prompt was sent"
    for prompt in prompts:
        answer = await send(target, prompt)
        is_whole = answer.end is End.DONE and answer.status == 200
        if is_whole and answer.token is None and needs_token:
            raise UnderstudyError(
                "drill.no_token", "the answers carry no X-Understudy-Token; is this an engine?"
            )
        if is_whole and answer.chunks >= CHUNKS_MIN:
            used.append(prompt)
            answers[prompt.key] = answer
        else:
            last = f"{prompt.path}: {answer.status} {answer.end}, {answer.chunks} pieces of text"
            last += f", {answer.detail}" if answer.detail else ""
        if len(used) == PROMPTS_USED:
            break
    if not used:
        raise UnderstudyError(
            "drill.no_answers", f"the model gave no usable answer; the last one: {last}"
        )
    return used, answers


def write_expected(
    path: Path, prompts: Sequence[Prompt], answers: Mapping[str, Exchange], source: str
) -> None:
    """Write the answers of `source` to `prompts`, by key."""
    asked = [
        {
            "key": prompt.key,
            "path": prompt.path,
            "body": {name: value for name, value in prompt.body.items() if name != "model"},
            "text": answers[prompt.key].text,
            "finish_reason": answers[prompt.key].finish_reason,
        }
        for prompt in prompts
    ]
    path.write_text(json.dumps({"source": source, "prompts": asked}, indent=2) + "\n")


def read_expected(path: Path, model: str) -> tuple[list[Prompt], dict[str, Exchange]]:
    """The prompts, for `model` as `/v1/models` names it, and the expected answer to each.

    Raises:
        UsageError: `drill.bad_expected`, the file is not valid.
    """
    try:
        asked = json.loads(path.read_text())["prompts"]
        prompts = [
            Prompt(each["key"], each["path"], {"model": model, **each["body"]}) for each in asked
        ]
        answers = {
            each["key"]: Exchange(
                each["key"],
                0.0,
                End.DONE,
                status=200,
                text=each["text"],
                finish_reason=each["finish_reason"],
            )
            for each in asked
        }
    except OSError as error:
        raise UsageError("drill.bad_expected", f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            "drill.bad_expected",
            f"{path} is not a file of expected answers ({type(error).__name__}: {error}); "
            "`make drill-vllm` writes one",
        ) from error
    if not prompts:
        raise UsageError("drill.bad_expected", f"{path} contains no prompts")
    return prompts, answers
