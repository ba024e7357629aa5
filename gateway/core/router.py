"""Which model a request is for, and what its client asks of the pool beside the answer.

The model is named in the body, else in the path (`/m/<model>/…`), else in a header; where there is
only one, it need not be named. What cannot be read counts as not said: a body is the engine's to
judge, and the gateway changes nothing in it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

PRIORITY_MAX = 1000  # either way
_DURATION = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*(ms|s|m|h)?\s*")
_UNITS_MS = {"ms": 1.0, "s": 1000.0, "m": 60_000.0, "h": 3_600_000.0, None: 1000.0}
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})", re.IGNORECASE)  # RFC 7240


class Wishes(Struct, frozen=True):
    """For which model, how soon, for how long to wait, and to keep it awake afterwards."""

    model: str
    priority: int | None = None
    wait_ms: float = math.inf
    keep_alive_ms: float | None = None


class Router:
    """`aliases` of each model's name."""

    def __init__(self, aliases: Mapping[str, Sequence[str]]) -> None:
        self.known = ", ".join(aliases)
        self._models = {alias: name for name, names in aliases.items() for alias in names}
        self._models.update((name, name) for name in aliases)
        self._only = next(iter(aliases)) if len(aliases) == 1 else ""

    def find(self, *names: object) -> tuple[str, str]:
        """The model that the first of `names` that says anything stands for, and that name; "" for
        one that is not known."""
        named = next((each for each in names if isinstance(each, str) and each), "")
        return (self._models.get(named, "") if named else self._only), named


def priority_of(*said: object) -> int | None:
    """The first of `said` that is a number, within limits. None: nobody has said."""
    for each in said:
        if isinstance(each, int | str | bytes) and not isinstance(each, bool):
            with contextlib.suppress(ValueError):
                return max(-PRIORITY_MAX, min(PRIORITY_MAX, int(each)))
    return None


def keep_alive_ms(*said: object) -> float | None:
    """The first of `said` that is a duration, as Ollama reads it: a number is in seconds, and less
    than nothing is for ever. None: nobody has said."""
    for each in said:
        if each is None or isinstance(each, bool):
            continue
        found = _DURATION.fullmatch(str(each)[:32])
        if found is not None:
            ms = float(found[1]) * _UNITS_MS[found[2]]
            return math.inf if ms < 0 else ms
    return None


def wait_ms(prefer: str) -> float:
    """What `Prefer: wait=20` allows."""
    found = _WAIT.search(prefer)
    return math.inf if found is None else int(found[1]) * 1000.0


def model_in_path(target: str) -> tuple[str, str]:
    """The model in a path such as `/m/chat/v1/models`, and the path behind it, as they are written;
    "" and the whole path where there is none."""
    if not target.startswith("/m/"):
        return "", target
    end = min(
        (found for mark in "/?#" if (found := target.find(mark, 3)) >= 0), default=len(target)
    )
    rest = target[end:]
    return target[3:end], rest if rest.startswith("/") else "/" + rest
