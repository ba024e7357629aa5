"""The status document as text, at most 15 lines. Owns words and lines, no facts."""

from __future__ import annotations

from typing import Any


def render(document: dict[str, Any]) -> str:
    raise NotImplementedError
