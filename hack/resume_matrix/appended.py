"""The other method, for comparison: tokens that were already made are appended to the prompt, and
`max_tokens` is reduced. What it loses is what vLLM knows of the border between the two."""

from __future__ import annotations

import json
from typing import Any

from hack.resume_matrix.hop_client import Answer, ask
from hack.resume_matrix.rows import CHAT, COMPLETIONS, RESPONSES, Row

TOKENIZE = "/tokenize"
# Fields of chats that completions do not have.
CHATS_ONLY = ("messages", "tools", "tool_choice")
# And what the first answer has said.
ONCE_ONLY = ("echo",)


def appended(path: str, row: Row, first: Answer, cut: int) -> Row | None:
    """The request that another engine would get; None if there is none that could be right."""
    if row.body.get("tool_choice") not in (None, "auto"):
        return None  # the grammar is the chat's own
    if row.url == RESPONSES:
        return None  # its fields have other names
    body = {
        name: value for name, value in row.body.items() if name not in (*CHATS_ONLY, *ONCE_ONLY)
    }
    tokens = row.body.get("prompt")
    if tokens is None:
        asked = {"model": "m", "messages": row.body["messages"], "add_generation_prompt": True}
        tokens = json.loads(ask(path, TOKENIZE, asked).body)["tokens"]
    body["prompt"] = [*tokens, *first.tokens[:cut]]
    if (most := body.get("max_tokens")) is not None:
        body["max_tokens"] = most - cut
        if "min_tokens" in body:  # more than `max_tokens` would be refused
            body["min_tokens"] = min(body["min_tokens"], body["max_tokens"])
    return Row(COMPLETIONS, body)


def is_right(row: Row, first: Answer, second: Answer, cut: int) -> bool:
    """Whether tokens, finish and text are those of the first answer."""
    if second.status != 200 or first.tokens[cut:] != second.tokens:
        return False
    there = first.groups_of(cut)
    if row.url != COMPLETIONS or there is None:
        return row.url != CHAT or _finish(first) == _finish(second)
    seen = [event for group in first.groups[:there] for event in group.events]
    joined = _text(seen) + _text(second.events)
    return joined == _text(first.events) and _finish(first) == _finish(second)


def _finish(answer: Answer) -> list[Any]:
    choices = [each for event in answer.events for each in event.get("choices", ())]
    return [each["finish_reason"] for each in choices if each.get("finish_reason")]


def _text(events: list[Any]) -> str:
    choices = [each for event in events for each in event.get("choices", ())]
    return "".join(each.get("text", "") for each in choices)
