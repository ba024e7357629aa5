"""Health of generation: does the active engine still make tokens?

Owns the rule of DESIGN §7: the backend answers within 1 s; requests in flight make progress within
`hang_ms`; idle, a canary every 30 s. The surprising things: only progress, or a canary that passed,
proves anything, so when the last request leaves without progress a canary runs at once, and clients
that give up and retry do not hide a hang. A hang is measured from when this side *saw* work in
flight. And a supervisor that did not run itself (stopped, thawed, starved) cannot blame the
backend: after a late look, every deadline starts again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

ANSWER_MS = 1_000
HANG_MS = 3_000
IDLE_CANARY_MS = 30_000
# Of the five seconds that a hang may cost, hang_ms takes three: it is seen at most two intervals
# later, since an answer may be as old as the look before it. Asking costs nothing.
INTERVAL_MS = 250
# A loop that is this late was not running; a busy one is late by a few milliseconds.
LATE_MS = 250


class Action(StrEnum):
    ASK = "ask"
    CANARY = "canary"


@dataclass(frozen=True, slots=True)
class Unhealthy:
    """The verdict, in words."""

    reason: str


class GenerationHealth:
    """One active period of one incarnation; made when it begins to serve."""

    def __init__(
        self,
        now_ms: float,
        *,
        answer_ms: int = ANSWER_MS,
        hang_ms: int = HANG_MS,
        idle_canary_ms: int = IDLE_CANARY_MS,
        interval_ms: int = INTERVAL_MS,
    ) -> None:
        self._answer_ms = answer_ms
        self._hang_ms = hang_ms
        self._idle_canary_ms = idle_canary_ms
        self._interval_ms = interval_ms
        self._asked_ms: float | None = None
        self._next_ask_ms = now_ms
        self._looked_ms = now_ms
        self._proven_ms = now_ms  # the canary that gated `active` has just passed
        self._progress = -1
        # How long requests have waited since the last progress, over all looks; None: none have.
        self._silent_ms: float | None = None
        self._saw_work = False
        # From when the running canary has `hang_ms`: its start, or the last progress since.
        self._canary_ms: float | None = None
        self.in_flight = 0

    def tick(self, now_ms: float) -> list[Action] | Unhealthy:
        """What to do now; call it at `next_ms` at the latest, and after every answer."""
        self._forgive_a_gap(now_ms)
        if self._asked_ms is not None and now_ms - self._asked_ms >= self._answer_ms:
            return Unhealthy(f"the backend did not answer within {self._answer_ms} ms")
        actions = []
        if self._asked_ms is None and now_ms >= self._next_ask_ms:
            self._asked_ms = now_ms
            self._next_ask_ms = now_ms + self._interval_ms
            actions.append(Action.ASK)
        if now_ms >= self._canary_due_ms():
            self._canary_ms = now_ms
            actions.append(Action.CANARY)
        return actions

    def next_ms(self) -> float:
        """When `tick` is due again."""
        look_ms = self._next_ask_ms if self._asked_ms is None else self._asked_ms + self._answer_ms
        return min(look_ms, self._canary_due_ms())

    def answered(self, now_ms: float, in_flight: int, progress: int) -> Unhealthy | None:
        """The backend's answer; a hang is judged by answers, never by silence."""
        self._forgive_a_gap(now_ms)
        self._asked_ms = None
        if progress != self._progress:
            self._prove(now_ms)
        # Some backends count the canary among the requests; it has a deadline of its own.
        has_work = in_flight > int(self._canary_ms is not None)
        if has_work:
            waited_ms = now_ms - self._looked_ms if self._saw_work else 0.0
            self._silent_ms = 0.0 if self._silent_ms is None else self._silent_ms + waited_ms
        self._progress, self.in_flight, self._saw_work = progress, in_flight, has_work
        self._looked_ms = now_ms
        if has_work and self._silent_ms is not None and self._silent_ms >= self._hang_ms:
            return Unhealthy(f"{in_flight} requests in flight and no token in {self._hang_ms} ms")
        if self._canary_ms is not None and now_ms - self._canary_ms >= self._hang_ms:
            return Unhealthy(f"the idle canary made no token within {self._hang_ms} ms")
        return None

    def canary_done(self, now_ms: float, *, ok: bool, detail: str) -> Unhealthy | None:
        self._canary_ms = None
        self._prove(now_ms)
        return None if ok else Unhealthy(f"the idle canary failed: {detail or 'wrong tokens'}")

    def _canary_due_ms(self) -> float:
        """At once when requests have left without progress since they were seen."""
        if self.in_flight or self._canary_ms is not None:
            return math.inf
        if self._silent_ms is not None:
            return self._looked_ms
        return max(self._looked_ms, self._proven_ms + self._idle_canary_ms)

    def _prove(self, now_ms: float) -> None:
        """There is progress: a canary queued behind requests gets its full time again."""
        self._proven_ms = now_ms
        self._silent_ms = None
        if self._canary_ms is not None:
            self._canary_ms = now_ms

    def _forgive_a_gap(self, now_ms: float) -> None:
        if now_ms - self.next_ms() <= LATE_MS:
            return
        self._looked_ms = now_ms
        if self._silent_ms is not None:
            self._silent_ms = 0.0
        if self._asked_ms is not None:
            self._asked_ms = now_ms
        if self._canary_ms is not None:
            self._canary_ms = now_ms
