"""Which holders rest and which engines are cold, for people who look at the lock: as their
supervisors wrote it last.

The lock server knows who holds a lock, and not what for. What an engine writes into the shared
directory is enough for a sentence; nothing is decided by it.
"""

from __future__ import annotations

from typing import Any

from plumbing.errors import UnderstudyError
from plumbing.pod.messages import Tier
from plumbing.pod.paths import engine_state
from plumbing.service.files import read_json

Document = dict[str, Any]


def resting(directory: str, document: Document) -> dict[str, str]:
    """Since when and why each holder in the server's `document` rests, by engine."""
    holders = [lock["holder"] for lock in document["locks"].values() if lock["holder"]]
    found = {each["engine"]: _sentence(directory, each) for each in holders}
    return {engine: sentence for engine, sentence in found.items() if sentence}


def cold(directory: str, document: Document) -> dict[str, str]:
    """Since when and why each supervisor in the server's `document` runs no backend, by engine;
    of those that are not to run one."""
    idle = [each["engine"] for each in document["supervisors"] if each["incarnation"] is None]
    found = {engine: _cold_sentence(directory, engine) for engine in idle}
    return {engine: sentence for engine, sentence in found.items() if sentence}


def _cold_sentence(directory: str, name: str) -> str | None:
    on_file = _on_file(directory, name)
    engine, goal = on_file.get("engine") or {}, (on_file.get("goal") or {}).get("goal")
    if engine.get("state") != "dead" or goal != Tier.COLD:
        return None
    return f"since {engine.get('since')}: {engine.get('reason')}"


def _on_file(directory: str, engine: str) -> Document:
    try:
        return read_json(engine_state(directory, engine)) or {}
    except (UnderstudyError, OSError):  # `engine status` says what is wrong with it
        return {}


def _sentence(directory: str, holder: Document) -> str | None:
    on_file = _on_file(directory, holder["engine"])
    engine, token = on_file.get("engine") or {}, (on_file.get("lock") or {}).get("token")
    if engine.get("state") != "resting" or token != holder["token"]:
        return None
    return f"since {engine.get('since')}: {engine.get('reason')}"
