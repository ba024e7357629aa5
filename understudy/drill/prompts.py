"""The drill's questions and their expected answers.

Greedy sampling makes an answer a fact about the model alone: whoever serves must say the same.
The questions are asked once before the first kill; those that a model answers with next to
nothing are left out, because an answer of no tokens can neither be cut nor be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plumbing.errors import UnderstudyError, UsageError
from understudy.drill.clients import Target, send
from understudy.drill.records import End, Exchange, Prompt

ANSWER_TOKENS_MAX = 16  # short answers mean many requests, and many requests mean many ways to fail
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
CHATS = (
    "Name three colours.",
    "What is a phone call?",
    "Count to seven.",
)


def all_prompts(model: str) -> list[Prompt]:
    """Every question of the bank, for `model` as `/v1/models` calls it; both kinds in turn."""
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
    """Ask each question once; the ones to use, and their answers by key.

    Without `needs_token`, of any server: one that is no engine of ours says no token.

    Raises:
        UnderstudyError: `drill.no_answers`, the model answers nothing that could be compared.
    """
    used: list[Prompt] = []
    answers: dict[str, Exchange] = {}
    said = "no prompt was asked"
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
            said = f"{prompt.path}: {answer.status} {answer.end}, {answer.chunks} pieces of text"
            said += f", {answer.detail}" if answer.detail else ""
        if len(used) == PROMPTS_USED:
            break
    if not used:
        raise UnderstudyError(
            "drill.no_answers", f"the model gave no answer that could be compared; last: {said}"
        )
    return used, answers


def write_expected(
    path: Path, prompts: Sequence[Prompt], answers: Mapping[str, Exchange], source: str
) -> None:
    """Write the answers to `prompts`, by key, as `source` gave them."""
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
    """The prompts, for `model` as `/v1/models` calls it, and the answer that each must have.

    Raises:
        UsageError: `drill.bad_expected`, this is not such a file.
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
            f"{path} holds no prompts with answers ({type(error).__name__}: {error}); it is made "
            "by a drill's comparison with another server",
        ) from error
    if not prompts:
        raise UsageError("drill.bad_expected", f"{path} holds not one prompt")
    return prompts, answers
