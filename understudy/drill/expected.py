"""Prompts and answers learnt elsewhere, in a file: what a drill compares with instead of itself.

Owns the file. A drill that learns its answers from the pod it drills finds every difference
between two engines, and none that both make alike. The file comes from a server without failover,
serving the same model; which prompts are fit for that (the two best candidates well apart at
each step), whoever wrote it has seen to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from plumbing.errors import UsageError
from understudy.drill.records import End, Exchange, Prompt


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
