"""Which holders rest, for people who look at the lock: as their supervisors wrote it last.

The lock server knows who holds a lock, and not what for. What an engine writes into the shared
directory is enough for a sentence; nothing is decided by it.
"""

from __future__ import annotations

from typing import Any

from plumbing.errors import UnderstudyError
from plumbing.part.paths import engine_state
from plumbing.service.files import read_json

Document = dict[str, Any]


def resting(directory: str, document: Document) -> dict[str, str]:
    """Since when and why each holder in the server's `document` rests, by engine."""
    holders = [lock["holder"] for lock in document["locks"].values() if lock["holder"]]
    found = {each["engine"]: _sentence(directory, each) for each in holders}
    return {engine: sentence for engine, sentence in found.items() if sentence}


def _sentence(directory: str, holder: Document) -> str | None:
    try:
        on_file = read_json(engine_state(directory, holder["engine"])) or {}
    except (UnderstudyError, OSError):  # `engine status` says what is wrong with it
        return None
    engine, token = on_file.get("engine") or {}, (on_file.get("lock") or {}).get("token")
    if engine.get("state") != "resting" or token != holder["token"]:
        return None
    return f"since {engine.get('since')}: {engine.get('reason')}"
