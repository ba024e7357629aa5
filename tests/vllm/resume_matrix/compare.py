"""Whether two answers say the same.

Events are never compared one by one: vLLM merges outputs by timing, so that even two uninterrupted
answers are cut into different events. What they say together is compared, and so is what a client
of a gateway would see: the events up to the cut of the first answer, and those behind it of the
second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tests.vllm.resume_matrix.client import Answer

# Made anew by each engine, or a kind of event, which depends on how the events were cut.
VOLATILE = (
    *("id", "item_id", "response_id", "created", "created_at", "completed_at", "sequence_number"),
    *("index", "signature", "type", "object", "model", "role"),
)
# Their numbers before the cut are not known to the second engine.
LOGPROBS = ("token_logprobs", "top_logprobs", "text_offset", "logprob")
LISTS = ("tokens", "token_ids")
TOLERANCE = 2e-3

Content = tuple[dict[str, Any], dict[str, Any]]


def content(events: Sequence[Any]) -> Content:
    """Every text and list of all events joined, and the last of each number."""
    joined: dict[str, Any] = {}
    last: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        name = path.rpartition(".")[2]
        if name in VOLATILE or name in LOGPROBS:
            return
        match value:
            case dict():
                for key, each in value.items():
                    walk(each, f"{path}.{key}")
            case list() if name in LISTS:
                joined.setdefault(path, []).extend(value)
            case list():
                for each in value:
                    walk(each, path)
            case str():
                joined[path] = joined.get(path, "") + value
            case int() | float():
                last[path] = value

    for event in events:
        walk(event, "")
    return {path: value for path, value in joined.items() if value}, last


def logprobs(events: Sequence[Any]) -> list[float]:
    """Of the chosen tokens, for completions."""
    found: list[float] = []
    for event in events:
        for choice in event.get("choices", ()):
            found += (choice.get("logprobs") or {}).get("token_logprobs", ())
    return found


def difference(first: Answer, second: Answer, cut: int) -> str:
    """What is wrong with `second`, which is `first` resumed behind `cut` tokens, or nothing."""
    if second.status != 200:
        return f"status {second.status}: {second.body[:200]!r}"
    if second.continuation != first.continuation:
        return f"its class is {second.continuation}"
    if not second.is_whole:
        return f"it does not end: {second.body[-200:]!r}"
    if second.tokens != first.tokens:
        at = sum(x == y for x, y in zip(first.tokens, second.tokens, strict=False))
        return f"{at} of {len(first.tokens)} tokens are equal"
    here = second.groups_of(cut)
    if here is None:
        return f"no group ends behind {cut} tokens: {second.chunks}"
    if content(first.events) != content(second.events):
        return _describe(content(first.events), content(second.events))
    there = first.groups_of(cut)
    if there is None:
        return ""
    seen = [*(each for group in first.groups[:there] for each in group.events)]
    rest = [*(each for group in second.groups[here:] for each in group.events)]
    if content(first.events) != content([*seen, *rest]):
        return "joined at the cut: " + _describe(content(first.events), content([*seen, *rest]))
    pairs = zip(logprobs(first.events)[cut:], logprobs(second.events)[cut:], strict=True)
    if not all(math.isclose(x, y, abs_tol=TOLERANCE) for x, y in pairs):
        return "log probabilities differ"
    return ""


def _describe(first: Content, second: Content) -> str:
    parts = [
        f"{path}: {one.get(path)!r:.80} and {other.get(path)!r:.80}"
        for one, other in zip(first, second, strict=True)
        for path in sorted({*one, *other})
        if one.get(path) != other.get(path)
    ]
    return "; ".join(parts)
