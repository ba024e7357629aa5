"""The `messages` of a chat request, flattened to what a chat template takes: role and text."""

from __future__ import annotations

from typing import Any

from engine.backends.reference.http.openai.errors import bad_value
from engine.backends.reference.http.openai.fields import string

ROLES = ("system", "developer", "user", "assistant")
MESSAGES_MAX = 4096  # far above any real conversation; the context's length is the real limit
ACCEPTED_KEYS = {"role", "content", "name"}


def messages(value: Any, param: str) -> tuple[dict[str, str], ...]:
    """Check and flatten; each result has `role`, `content` and perhaps `name`, all strings."""
    if not isinstance(value, list) or not 0 < len(value) <= MESSAGES_MAX:
        raise bad_value(param, f"{param} must be an array of 1 to {MESSAGES_MAX} messages.")
    return tuple(_message(item, f"{param}[{index}]") for index, item in enumerate(value))


def _message(value: Any, param: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise bad_value(param, f"{param} must be an object with role and content.")
    role = value.get("role")
    if role not in ROLES:
        raise bad_value(
            f"{param}.role", f"{param}.role must be one of {', '.join(ROLES)}, not {role!r:.60}."
        )
    for key, item in value.items():
        if key not in ACCEPTED_KEYS and item not in (None, [], ""):
            raise bad_value(f"{param}.{key}", f"{param}.{key} is not supported by this engine.")
    checked = {"role": role, "content": _content(value.get("content"), f"{param}.content")}
    if value.get("name") is not None:
        checked["name"] = string(value["name"], f"{param}.name")
    return checked


def _content(value: Any, param: str) -> str:
    if isinstance(value, str):
        return string(value, param)
    if not isinstance(value, list) or not value:
        raise bad_value(param, f"{param} must be a string or an array of text parts.")
    texts = []
    for index, part in enumerate(value):
        where = f"{param}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise bad_value(where, f"{where} is of type {kind!r:.60}; only text is supported.")
        texts.append(string(part.get("text"), f"{where}.text"))
    return "\n".join(texts)
