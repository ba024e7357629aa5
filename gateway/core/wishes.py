"""Which model a request is for, and what its client wants of the pool beside the answer.

The model is named in the body, else in the path (`/m/<model>/…`), else in a header; where there is
only one, it need not be named. A wish that cannot be read is refused; all else in a body is the
engine's to judge, and the gateway changes nothing in it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

T = TypeVar("T")
PRIORITY_MAX = 1000  # either way
# A number of seconds, or a duration as Go writes it: 1h30m. A dozen digits are 30,000 years.
_NUMBER = r"(\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})"
_UNITS_MS = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1000.0, None: 1000.0}
_UNITS_MS |= {"m": 60_000.0, "h": 3_600_000.0}
_PART = re.compile(rf"{_NUMBER}\s*(ns|us|µs|ms|s|m|h)?", re.ASCII)
_DURATION = re.compile(
    rf"([+-]?)({_NUMBER}|(?:{_NUMBER}\s*(?:ns|us|µs|ms|s|m|h)){{1,7}})", re.ASCII
)
_FOREVER_S = 10**12
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})", re.IGNORECASE)  # RFC 7240


class BadWish(ValueError):
    """A client's wish cannot be read. `must_be`: what can."""

    def __init__(self, field: str, must_be: str) -> None:
        super().__init__(field, must_be)
        self.field, self.must_be = field, must_be
        self.header = f"X-Understudy-{field.replace('_', '-').title()}"


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


def first_of(read: Callable[[object], T | None], *said: object) -> T | None:
    """The first of `said` that is there, as `read` reads it. None: none was said. Raises
    `BadWish` if any of them cannot be read."""
    return next((each for each in [*map(read, said)] if each is not None), None)


def priority(said: object) -> int | None:
    """Within limits."""
    if said is None:
        return None
    if isinstance(said, int | str) and not isinstance(said, bool):
        with contextlib.suppress(ValueError):
            return max(-PRIORITY_MAX, min(PRIORITY_MAX, int(said)))
    raise BadWish("priority", "a whole number, and lower is sooner")


def keep_alive_ms(said: object) -> float | None:
    """As Ollama reads it: a number is in seconds, and less than nothing is for ever."""
    if said is None:
        return None
    if isinstance(said, int | float) and not isinstance(said, bool):
        return math.inf if said < 0 else min(said, _FOREVER_S) * 1000.0
    found = _DURATION.fullmatch(said.strip()) if isinstance(said, str) else None
    if found is None:
        raise BadWish("keep_alive", 'seconds, a duration such as "5m", 0, or -1 for ever')
    ms = sum(float(each[1]) * _UNITS_MS[each[2]] for each in _PART.finditer(found[2]))
    return math.inf if found[1] == "-" and ms else ms


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
