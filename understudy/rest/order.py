"""An order to all engines of a pod to rest, or to be awake: what they answer, and when it is done.

Pure: words of engines in, a verdict out. Every engine is told, since the next holder of the lock
stands in the same tier; it is done when the one that holds the lock is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.events import State
from engine.core.lifecycle import HOLDING
from plumbing.errors import UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.pod.messages import EngineReportMsg, Tier
from plumbing.text import duration

SCHEMA = 1
DONE = {True: ("woken", "already_awake"), False: ("rested", "already_resting")}
WANTED = {
    Tier.AWAKE: "awake",
    Tier.WARM: "resting",
    Tier.OFFLOADED: "resting with its weights offloaded",
}
GATEWAY = "gateway"  # as it names itself in a goal
KEPT = "kept"  # the goal of an engine that does not hold the lock


@dataclass
class OrderedEngine:
    """One engine and its words."""

    name: str
    before: EngineReportMsg | None = None  # it was told
    now: EngineReportMsg | None = None
    answered: int | None = None  # its count of goals, with this one
    refusal: UnderstudyError | None = None
    absence: str = ""  # why it cannot be heard

    @property
    def holds(self) -> bool:
        """Whether it holds the lock, as far as it knows."""
        return self.now is not None and self.now.token > 0 and State(self.now.state) in HOLDING

    @property
    def has_said(self) -> bool:
        return bool(self.answered is not None or self.refusal or self.absence)


@dataclass
class GoalOrder:
    """`is_one`: a user named this engine, and means no other."""

    goal: Tier
    engines: Sequence[OrderedEngine]
    is_one: bool = False
    _names: dict[str, OrderedEngine] = field(init=False)

    def __post_init__(self) -> None:
        self._names = {each.name: each for each in self.engines}

    # ------------------------------------------------------------------ what engines say

    def heard(self, name: str, am: EngineReportMsg, *, is_answer: bool = False) -> None:
        """`is_answer`: to the goal; what comes before that is from before it."""
        engine = self._names[name]
        engine.absence = ""
        if is_answer:
            engine.answered = am.goal_seen
        elif engine.answered is None and engine.before is None:
            engine.before = am
        engine.now = am

    def refused(self, name: str, error: UnderstudyError) -> None:
        self._names[name].refusal = error

    def lost(self, name: str, reason: str) -> None:
        """What it said counts no longer; it is told again."""
        engine = self._names[name]
        engine.absence, engine.now, engine.answered = reason, None, None

    # ------------------------------------------------------------------ what follows

    @property
    def holder(self) -> OrderedEngine | None:
        """Who holds the lock; one that was superseded may not know it yet."""
        holding = [each for each in self.engines if each.holds]
        return max(holding, key=lambda each: each.now.token if each.now else 0, default=None)

    @property
    def is_heard_by_all(self) -> bool:
        """Whether every engine has answered, or cannot."""
        return all(each.has_said for each in self.engines)

    def verdict(self) -> str | None:
        """What was done, in one word; None: not yet.

        Raises:
            UnderstudyError: it will not be done: the holder refuses, or somebody else has given it
                another goal.
        """
        holder = self.holder
        if holder is None:
            if not self.is_heard_by_all:
                return None
            self._check_somebody_obeys()
            return KEPT if self.is_one else None
        if holder.refusal is not None:
            raise holder.refusal
        now = holder.now
        if holder.answered is None or now is None:
            return None
        if now.goal is not self.goal:
            raise UnderstudyError("pod.goal_overridden", self._overridden(now), engine=holder.name)
        if not self._is_there(now):
            return None
        was_there = holder.before is not None and self._is_there(holder.before)
        return DONE[self.goal is Tier.AWAKE][was_there]

    def _is_there(self, am: EngineReportMsg) -> bool:
        if self.goal is Tier.AWAKE:
            return am.state == State.ACTIVE
        return am.state == State.RESTING and am.tier is self.goal

    def _check_somebody_obeys(self) -> None:
        refusals = [each.refusal for each in self.engines if each.refusal is not None]
        if refusals and not any(each.answered is not None for each in self.engines):
            raise refusals[0]
        if all(each.absence for each in self.engines):
            why = "; ".join(f"{each.name}: {each.absence}" for each in self.engines)
            raise UnreachableError("pod.no_engine", f"no engine can be told: {why}")

    def _overridden(self, now: EngineReportMsg) -> str:
        if now.goal is Tier.AWAKE and now.goal_by == GATEWAY:
            return (
                f"a request woke {now.engine} before it slept. To prevent this, start the gateway"
                " with --wake manual"
            )
        who = f" by {now.goal_by}" if now.goal_by else ""
        return f"{now.engine} was given another goal{who} ({now.goal}) before it was {self.goal}"

    def late(self, timeout_s: float) -> UnderstudyError:
        """The error where it was not done in time."""
        holder, wanted = self.holder, WANTED[self.goal]
        if holder is None or holder.now is None:
            told = ", ".join(each.name for each in self.engines if each.answered is not None)
            if told:
                told = f"; {told} will be {wanted} at the next grant"
            message = f"no engine holds the lock after {duration(timeout_s * 1000)}{told}"
        else:
            now = holder.now
            busy = f", with {now.in_flight} requests in flight" if now.in_flight else ""
            why = f" ({now.fault})" if now.fault else ""
            message = (
                f"{now.engine} is still {now.state}{busy}{why}, not {wanted}, after"
                f" {duration(timeout_s * 1000)}; the transition continues in the background: see"
                " `understudy status`"
            )
        return WaitTimeoutError("pod.goal_timeout", message)

    def document(self, result: str, took_ms: float) -> dict[str, Any]:
        """For `--json`."""
        holder = self.holder
        return {
            "schema": SCHEMA,
            "result": result,
            "goal": self.goal,
            "engine": holder.name if holder is not None else None,
            "token": holder.now.token if holder is not None and holder.now is not None else None,
            "took_ms": round(took_ms, 1),
            "engines": [_row(each) for each in self.engines],
        }

    def text(self, result: str, took_ms: float) -> str:
        """One line, and one more for each engine that does not obey."""
        holder = self.holder
        name = holder.name if holder is not None else ""
        words = {
            "woken": f"{name} is awake after {duration(took_ms)}",
            "already_awake": f"{name} is awake already",
            "rested": f"{name} is {WANTED[self.goal]} after {duration(took_ms)}",
            "already_resting": f"{name} is {WANTED[self.goal]} already",
        }
        wanted = WANTED[self.goal]
        kept = f"{self.engines[0].name} does not hold the lock; it will be {wanted} once it does"
        not_told = [each for each in self.engines if each.answered is None]
        rest = [f"{each.name} was not told: {_why_not(each)}" for each in not_told]
        return "\n".join([words.get(result, kept), *rest])


def _why_not(engine: OrderedEngine) -> str:
    return engine.refusal.message if engine.refusal is not None else engine.absence or "no answer"


def _row(engine: OrderedEngine) -> dict[str, Any]:
    now = engine.now
    return {
        "engine": engine.name,
        "state": now.state if now is not None else None,
        "tier": now.tier if now is not None else None,
        "goal": now.goal if now is not None else None,
        "problem": None if engine.answered is not None else _why_not(engine),
    }
