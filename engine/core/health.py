"""Health of generation: does the active engine still make tokens?

Owns the rule that progress is life. Requests in flight make progress within a budget
(`Patience`: `hang_ms`, longer on a busy machine and without a standby); idle, a canary every
30 s. The backend is asked all the time, but an engine whose tokens advance is not hung, however
late it answers: a missing answer is a verdict only when the budget has passed without an answer and
without progress.

The surprising things: only progress, or a canary that passed, proves anything, so when the last
request leaves without progress a canary runs at once, and clients that give up and retry do not
hide a hang. A hang is measured from when this side *saw* work in flight. And a supervisor that did
not run itself (stopped, thawed, starved) cannot blame the backend: time without a look does not
count, and after a long gap every deadline starts again. An engine that is not active is not asked:
while it is parked, that would cost an idle machine too much, and in other states it has a budget.
It is only seen whether its processes are stopped.

How long the active engine may show nothing before it counts as hung:

    with a standby ready     hang_ms, stretched by the CPU pressure
    alone                    hang_alone_ms, unless the former is more

A process that waits for a CPU is slow, not hung: where half of the time is lost to waiting, the
budget doubles. The stretch has a limit, so that a hang is found within 10 s on any machine. Without
a standby, a kill turns a possible outage into a certain one; an unknown standby counts as none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from plumbing.text import duration

HANG_MS = 3_000
# Of a machine that swaps, or of another engine that is being launched: half a minute of silence has
# been seen to end by itself, and a relaunch takes about as long.
HANG_ALONE_MS = 30_000
STRETCH_MAX = 2.5  # 7.5 s of `hang_ms`, and the looks on top of that, are less than 10 s


@dataclass(frozen=True, slots=True)
class Signs:
    """What a look shows besides the backend's answers."""

    progress: int = 0  # the counter of the shared page; only that it moves matters
    pressure: float | None = None  # the share of time lost to waiting for a CPU, 0 to 1
    has_standby: bool = True  # another engine could be granted the lock at once


NOTHING_SEEN = Signs()


@dataclass(frozen=True, slots=True)
class Patience:
    """The budgets of a silent engine."""

    hang_ms: int = HANG_MS
    hang_alone_ms: int = HANG_ALONE_MS

    def budget_ms(self, signs: Signs) -> float:
        """The longest silence."""
        stretched_ms = self.hang_ms * stretch(signs.pressure)
        return stretched_ms if signs.has_standby else max(stretched_ms, self.hang_alone_ms)

    def explain(self, signs: Signs) -> str:
        """`budget 6.3s: 3s, stretched 2.1 times by a CPU pressure of 52 %`."""
        budget_ms, factor = self.budget_ms(signs), stretch(signs.pressure)
        text = f"budget {duration(budget_ms)}"
        if budget_ms > self.hang_ms * factor:
            return f"{text}: no standby is ready"
        if factor >= 1.05:
            text += f": {duration(self.hang_ms)}, stretched {factor:.1f} times by a CPU pressure"
            text += f" of {100 * (signs.pressure or 0):.0f} %"
        return text


DEFAULT = Patience()


def stretch(pressure: float | None) -> float:
    """How many times longer everything may take: 1 without pressure, twice at one half."""
    left = 1 - min(1.0, max(0.0, pressure or 0.0))
    return STRETCH_MAX if left * STRETCH_MAX <= 1 else 1 / left


ANSWER_MS = 1_000
IDLE_CANARY_MS = 30_000
# Of the five seconds that a hang may cost, hang_ms takes three: it is seen at most two intervals
# later, since an answer may be as old as the look before it. Asking costs nothing.
INTERVAL_MS = 250
# A loop that is this late was not running; a busy one is late by a few milliseconds.
LATE_MS = 250
# A supervisor that was away for this long was stopped or frozen, and its backend probably too.
STOPPED_MS = 1_000


# A second apart, so that a process that is stopped for a moment, to look at it, is not lost.
STOPPED_LOOKS_MAX = 5


class Action(StrEnum):
    ASK = "ask"
    CANARY = "canary"


class StoppedLooks:
    """One incarnation that is not active. Looks are counted, not time: a supervisor that was
    stopped together with its backend cannot blame it."""

    def __init__(self) -> None:
        self._looks = 0

    def looked(self, stopped: Sequence[str]) -> str | None:
        """`stopped`: the processes that a signal has stopped; none while it is active."""
        self._looks = self._looks + 1 if stopped else 0
        if self._looks < STOPPED_LOOKS_MAX:
            return None
        return (
            f"{' and '.join(stopped)} of the backend {'is' if len(stopped) == 1 else 'are'} stopped"
            " (SIGSTOP)"
        )


class GenerationHealth:
    """One active period of one incarnation; made when it begins to serve. A verdict is why the
    engine is unhealthy."""

    def __init__(
        self,
        now_ms: float,
        *,
        patience: Patience = DEFAULT,
        answer_ms: int = ANSWER_MS,
        idle_canary_ms: int = IDLE_CANARY_MS,
        interval_ms: int = INTERVAL_MS,
    ) -> None:
        self._patience = patience
        self._answer_ms = answer_ms
        self._idle_canary_ms = idle_canary_ms
        self._interval_ms = interval_ms
        self._asked_ms: float | None = None
        self._next_ask_ms = self._next_look_ms = now_ms
        self._called_ms = now_ms
        self._looked_ms = now_ms
        self._proven_ms = now_ms  # the canary that gated `active` has just passed
        self._sign_ms = now_ms  # of the last answer or progress
        self._signs = Signs(has_standby=False)
        # How long requests have waited since the last progress, over all looks; None: none have.
        self._silent_ms: float | None = None
        self._saw_work = False
        # From when the running canary has its budget: its start, or the last progress since.
        self._canary_ms: float | None = None
        self.in_flight = 0

    def tick(self, now_ms: float, signs: Signs = NOTHING_SEEN) -> list[Action] | str:
        """What to do now; call it at `next_ms` at the latest, and after every answer."""
        self._forgive_a_gap(now_ms)
        self._see(now_ms, signs)
        self._next_look_ms = now_ms + self._interval_ms
        if self._is_mute(now_ms):
            silent = duration(now_ms - self._sign_ms)
            return self._verdict(f"the backend did not answer and made no token in {silent}")
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
        ask_ms = self._next_ask_ms if self._asked_ms is None else math.inf
        return min(ask_ms, self._next_look_ms, self._canary_due_ms())

    def answered(self, now_ms: float, in_flight: int, signs: Signs = NOTHING_SEEN) -> str | None:
        """The backend's answer. While there are answers, a hang is judged by them."""
        self._forgive_a_gap(now_ms)
        self._asked_ms, self._sign_ms = None, now_ms
        self._see(now_ms, signs)
        # Some backends count the canary among the requests; it has a deadline of its own.
        has_work = in_flight > int(self._canary_ms is not None)
        if has_work:
            waited_ms = now_ms - self._looked_ms if self._saw_work else 0.0
            self._silent_ms = 0.0 if self._silent_ms is None else self._silent_ms + waited_ms
        self.in_flight, self._saw_work = in_flight, has_work
        self._looked_ms = now_ms
        budget_ms = self._patience.budget_ms(self._signs)
        if has_work and self._silent_ms is not None and self._silent_ms >= budget_ms:
            requests = "1 request" if in_flight == 1 else f"{in_flight} requests"
            silent = duration(self._silent_ms)
            return self._verdict(f"{requests} in flight and no token in {silent}")
        if self._canary_ms is not None and now_ms - self._canary_ms >= budget_ms:
            silent = duration(now_ms - self._canary_ms)
            return self._verdict(f"the idle canary made no token in {silent}")
        return None

    def canary_done(self, now_ms: float, *, ok: bool, detail: str) -> str | None:
        self._canary_ms = None
        self._prove(now_ms)
        return None if ok else f"the idle canary failed: {detail or 'wrong tokens'}"

    def late_ms(self, now_ms: float) -> float:
        """How late the backend's answer is; 0 while it is on time."""
        return 0.0 if self._asked_ms is None else max(0.0, now_ms - self._asked_ms - self._limit_ms)

    @property
    def _limit_ms(self) -> float:
        return self._answer_ms * stretch(self._signs.pressure)

    def _is_mute(self, now_ms: float) -> bool:
        """Neither an answer nor progress: the answer is late, and the budget is spent."""
        is_late = self._asked_ms is not None and now_ms - self._asked_ms >= self._limit_ms
        return is_late and now_ms - self._sign_ms >= self._patience.budget_ms(self._signs)

    def _verdict(self, what: str) -> str:
        return f"{what} ({self._patience.explain(self._signs)})"

    def _canary_due_ms(self) -> float:
        """At once when requests have left without progress since they were seen."""
        if self.in_flight or self._canary_ms is not None:
            return math.inf
        if self._silent_ms is not None:
            return self._looked_ms
        return max(self._looked_ms, self._proven_ms + self._idle_canary_ms)

    def _see(self, now_ms: float, signs: Signs) -> None:
        if signs.progress != self._signs.progress:
            self._prove(now_ms)
        self._signs = signs

    def _prove(self, now_ms: float) -> None:
        """There is progress: a canary queued behind requests gets its full time again."""
        self._proven_ms = self._sign_ms = now_ms
        self._silent_ms = None
        if self._canary_ms is not None:
            self._canary_ms = now_ms

    def _forgive_a_gap(self, now_ms: float) -> None:
        gap_ms = now_ms - max(self._called_ms, self.next_ms())
        self._called_ms = now_ms
        if gap_ms <= LATE_MS:
            return
        is_new_start = gap_ms >= STOPPED_MS
        if is_new_start and self._silent_ms is not None:
            self._silent_ms = 0.0

        def later(moment_ms: float) -> float:
            return now_ms if is_new_start else moment_ms + gap_ms

        self._looked_ms, self._sign_ms = later(self._looked_ms), later(self._sign_ms)
        if self._asked_ms is not None:
            self._asked_ms = later(self._asked_ms)
        if self._canary_ms is not None:
            self._canary_ms = later(self._canary_ms)
