"""Health of generation: does the active engine still make tokens?

Owns the rule of DESIGN §7: the backend answers within 1 s; with requests in flight something moved
within `hang_ms`; idle, a canary every 30 s. Must not know how questions travel. The surprising
thing: a hang is measured from when this side *saw* work in flight, so the first look at a request
never counts the idle time before it. And whoever did not run himself (stopped, thawed, starved)
cannot say that others were silent: after a late look, every deadline begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ANSWER_MS = 1_000
HANG_MS = 3_000
IDLE_CANARY_MS = 30_000
# Of the five seconds that a hang may cost, hang_ms takes three: it is seen at most twice this
# later, since what one look says may be as old as the look before it. The questions cost nothing.
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


class Health:
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
        self._canary_ms: float | None = None
        self._next_ask_ms = now_ms
        self._moved_ms = now_ms  # the canary that gated `active` has just passed
        self._progress = -1
        self.in_flight = 0

    def tick(self, now_ms: float) -> list[Action] | Unhealthy:
        """What to do now; call it at `next_ms` at the latest."""
        self._forgive_a_gap(now_ms)
        if self._asked_ms is not None and now_ms - self._asked_ms >= self._answer_ms:
            return Unhealthy(f"the backend did not answer within {self._answer_ms} ms")
        if self._canary_ms is not None and now_ms - self._canary_ms >= self._hang_ms:
            return Unhealthy(f"the idle canary made no token within {self._hang_ms} ms")
        actions = []
        if self._asked_ms is None and now_ms >= self._next_ask_ms:
            self._asked_ms = now_ms
            self._next_ask_ms = now_ms + self._interval_ms
            actions.append(Action.ASK)
        is_idle = self.in_flight == 0 and self._canary_ms is None
        if is_idle and now_ms - self._moved_ms >= self._idle_canary_ms:
            self._canary_ms = now_ms
            actions.append(Action.CANARY)
        return actions

    def next_ms(self) -> float:
        """When `tick` has something to say again."""
        moments = [
            self._next_ask_ms if self._asked_ms is None else self._asked_ms + self._answer_ms
        ]
        if self._canary_ms is not None:
            moments.append(self._canary_ms + self._hang_ms)
        elif not self.in_flight:
            moments.append(self._moved_ms + self._idle_canary_ms)
        return min(moments)

    def answered(self, now_ms: float, in_flight: int, progress: int) -> Unhealthy | None:
        """The backend's answer; a hang is judged here, by what it says, never by its silence."""
        self._forgive_a_gap(now_ms)
        self._asked_ms = None
        if progress != self._progress or (in_flight and not self.in_flight):
            self._moved_ms = now_ms
        self._progress, self.in_flight = progress, in_flight
        if in_flight and now_ms - self._moved_ms >= self._hang_ms:
            return Unhealthy(f"{in_flight} requests in flight and no token in {self._hang_ms} ms")
        return None

    def canary_done(self, now_ms: float, *, ok: bool, detail: str) -> Unhealthy | None:
        self._canary_ms = None
        self._moved_ms = now_ms
        return None if ok else Unhealthy(f"the idle canary failed: {detail or 'wrong tokens'}")

    def _forgive_a_gap(self, now_ms: float) -> None:
        if now_ms - self.next_ms() <= LATE_MS:
            return
        self._moved_ms = now_ms
        if self._asked_ms is not None:
            self._asked_ms = now_ms
        if self._canary_ms is not None:
            self._canary_ms = now_ms
