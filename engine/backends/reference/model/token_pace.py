"""A least time between two tokens of a request: what makes a small model as slow as a large one.

Prompts and tokens that were made before are not slowed down, as a large model computes those
faster than it makes new ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection


class TokenPace:
    """`is_idle` is set by the caller: its last step found nothing to do."""

    def __init__(self, interval_ms: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self.is_idle = False
        self._interval_s, self._now_s = interval_ms / 1000, now_s
        self._due_s: dict[int, float] = {}  # by request

    def made(self, request: int) -> None:
        """This request has made a token."""
        if self._interval_s:
            self._due_s[request] = self._now_s() + self._interval_s

    def resting(self) -> Collection[int]:
        """The requests that make no token now."""
        if self._due_s:
            now_s = self._now_s()
            self._due_s = {each: due_s for each, due_s in self._due_s.items() if due_s > now_s}
        return self._due_s

    def pause_ms(self) -> int:
        """For how long there is nothing to do, unless a message comes."""
        if not self.is_idle or not self._due_s:
            return 0
        return max(0, math.ceil(1000 * (min(self._due_s.values()) - self._now_s())))
