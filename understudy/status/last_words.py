"""What engines last wrote of themselves: the offline view of `understudy status`.

Their state files outlive them. What they say was true when it was written and may not be now, so
it is shown as what it is. Whom the lock belongs to is `lockserver status` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from plumbing.errors import UnderstudyError
from plumbing.part.format import since, table
from plumbing.service.files import read_json


def last_words(directory: Path) -> list[dict[str, Any]]:
    """The document in every engine's state file that can be read."""
    found = []
    for path in sorted(directory.glob("engine_*.json")):
        try:
            document = read_json(str(path))
        except (UnderstudyError, OSError):
            continue  # `engine status` says what is wrong with it
        if document is not None:
            found.append(document)
    return found


def last_lines(documents: Sequence[dict[str, Any]], now: datetime) -> list[str]:
    """These documents for people; nothing where there is none."""
    rows = [_row(each.get("engine") or {}, now) for each in documents]
    if not rows:
        return []
    header = ("engine", "role", "was", "since", "reason")
    return ["offline view: what the engines last wrote of themselves", *table([header, *rows])]


def _row(engine: dict[str, Any], now: datetime) -> tuple[str, ...]:
    words = (engine.get(key) for key in ("id", "role", "state"))
    return (
        *(str(word or "?") for word in words),
        since(engine.get("since"), now),
        str(engine.get("reason") or "-"),
    )
