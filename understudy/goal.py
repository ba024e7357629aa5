"""`understudy sleep` and `wake`: give the engines of a pod a goal, and wait for the lock's holder.

Every engine is told, because the next holder of the lock serves in the same tier. An engine that
ends meanwhile is told again: its next launch does not know the order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.events import State
from engine.core.lifecycle import HOLDING
from plumbing.errors import RemoteError, UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.pod.messages import GOAL_CATALOGUE, EngineReportMsg, SetGoalMsg, Tier
from plumbing.pod.observers import ask
from plumbing.text import duration
from understudy.schema import GoalDocument, GoalEngine

BY = "understudy"
GATEWAY = "gateway"  # as it names itself in a goal
ANSWER_S = 2.0  # an engine that is stopped never answers, and only the holder is waited for
LOOK_S = 0.05
WANTED = {
    Tier.AWAKE: "awake",
    Tier.WARM: "asleep",
    Tier.OFFLOADED: "asleep with its weights offloaded",
}
DONE = {True: ("woken", "already_awake"), False: ("rested", "already_resting")}
KEPT = "kept"  # the one engine that was told does not hold the lock


@dataclass
class ToldEngine:
    """One engine: what it reported before the order, and what it reports now."""

    name: str
    before: EngineReportMsg | None = None
    now: EngineReportMsg | None = None  # None until it was told, or while it does not answer
    refusal: UnderstudyError | None = None
    absence: str = ""

    @property
    def holds(self) -> bool:
        """Whether it holds the lock, as far as it knows."""
        return self.now is not None and self.now.token > 0 and State(self.now.state) in HOLDING

    @property
    def problem(self) -> str | None:
        """Why it was not told."""
        if self.refusal is not None:
            return self.refusal.message
        return None if self.now is not None else self.absence or "no answer"

    def row(self) -> GoalEngine:
        now = self.now
        said = (now.state, now.tier, now.goal) if now is not None else (None, None, None)
        state, tier, goal = said
        return GoalEngine(engine=self.name, state=state, tier=tier, goal=goal, problem=self.problem)


async def give_goal(
    goal: Tier, paths: Mapping[str, str], timeout_s: float, *, is_one: bool
) -> tuple[str, GoalDocument]:
    """Give `goal` to the engines at these control sockets: one line for operators, and the
    document. `is_one`: the user named this engine.

    Raises:
        UnderstudyError: refused, overridden, no engine, or `pod.goal_timeout`.
    """
    begun, changed = time.monotonic(), asyncio.Event()
    engines = [ToldEngine(name) for name in paths]
    tasks = [
        asyncio.create_task(_follow(each, path, goal, changed))
        for each, path in zip(engines, paths.values(), strict=True)
    ]
    try:
        async with asyncio.timeout(timeout_s):
            while (result := _verdict(goal, engines, is_one=is_one)) is None:
                changed.clear()
                await changed.wait()
        took_ms = (time.monotonic() - begun) * 1000
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while not all(each.now or each.refusal or each.absence for each in engines):
                    changed.clear()
                    await changed.wait()
    except TimeoutError:
        raise _late(goal, engines, timeout_s) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return _text(goal, engines, result, took_ms), _document(goal, engines, result, took_ms)


async def _follow(engine: ToldEngine, path: str, goal: Tier, changed: asyncio.Event) -> None:
    """Tell `engine` its goal, again after each of its ends, and keep what it reports."""
    look, order = SetGoalMsg(), SetGoalMsg(goal, BY)
    while True:
        try:
            if engine.before is None:
                engine.before = await _report(path, look)
            engine.now = await _report(path, order if engine.now is None else look)
            engine.absence = ""
        except RemoteError as error:
            engine.refusal, engine.now = error, engine.before
        except UnderstudyError as error:
            engine.now, engine.absence = None, error.message
        changed.set()
        await asyncio.sleep(LOOK_S)


async def _report(path: str, message: SetGoalMsg) -> EngineReportMsg:
    answer = (await ask(path, GOAL_CATALOGUE, message, ANSWER_S)).message
    assert isinstance(answer, EngineReportMsg)  # the catalogue has no other answer
    return answer


def _holder(engines: Sequence[ToldEngine]) -> ToldEngine | None:
    """Who holds the lock; one that was superseded may not know it yet."""
    holding = [each for each in engines if each.holds]
    return max(holding, key=lambda each: each.now.token if each.now else 0, default=None)


def _verdict(goal: Tier, engines: Sequence[ToldEngine], *, is_one: bool) -> str | None:
    """What was done, in one word; None: not yet.

    Raises:
        UnderstudyError: it will not be done.
    """
    holder = _holder(engines)
    if holder is None:
        if any(not (each.now or each.refusal or each.absence) for each in engines):
            return None
        refusals = [each.refusal for each in engines if each.refusal is not None]
        if len(refusals) == len(engines):
            raise refusals[0]
        if all(each.absence for each in engines):
            why = "; ".join(f"{each.name}: {each.absence}" for each in engines)
            raise UnreachableError("pod.no_engine", f"no engine can be reached: {why}")
        return KEPT if is_one else None
    if holder.refusal is not None:
        raise holder.refusal
    now = holder.now
    assert now is not None
    if now.goal is not goal:
        raise UnderstudyError("pod.goal_overridden", _overridden(goal, now), engine=holder.name)
    if not _is_there(goal, now):
        return None
    was_there = holder.before is not None and _is_there(goal, holder.before)
    return DONE[goal is Tier.AWAKE][was_there]


def _is_there(goal: Tier, report: EngineReportMsg) -> bool:
    if goal is Tier.AWAKE:
        return report.state == State.ACTIVE
    return report.state == State.RESTING and report.tier is goal


def _overridden(goal: Tier, now: EngineReportMsg) -> str:
    if now.goal is Tier.AWAKE and now.goal_by == GATEWAY:
        return (
            f"a request woke {now.engine} before it slept. To prevent this, start the gateway with"
            " --wake manual"
        )
    who = f" by {now.goal_by}" if now.goal_by else ""
    return f"{now.engine} was given another goal{who} ({now.goal}) before it was {goal}"


def _late(goal: Tier, engines: Sequence[ToldEngine], timeout_s: float) -> UnderstudyError:
    after, holder = duration(timeout_s * 1000), _holder(engines)
    if holder is None or holder.now is None:
        told = ", ".join(each.name for each in engines if each.problem is None)
        then = f"; {told} will be {WANTED[goal]} at the next grant" if told else ""
        return WaitTimeoutError("pod.goal_timeout", f"no engine holds the lock after {after}{then}")
    now = holder.now
    busy = f", with {now.in_flight} requests in flight" if now.in_flight else ""
    why = f" ({now.fault})" if now.fault else ""
    return WaitTimeoutError(
        "pod.goal_timeout",
        f"{now.engine} is still {now.state}{busy}{why}, not {WANTED[goal]}, after {after}; the"
        " transition continues in the background: see `understudy status`",
    )


def _document(
    goal: Tier, engines: Sequence[ToldEngine], result: str, took_ms: float
) -> GoalDocument:
    holder = _holder(engines)
    return GoalDocument(
        schema=1,
        result=result,
        goal=goal,
        engine=holder.name if holder else None,
        token=holder.now.token if holder and holder.now else None,
        took_ms=round(took_ms, 1),
        engines=[each.row() for each in engines],
    )


def _text(goal: Tier, engines: Sequence[ToldEngine], result: str, took_ms: float) -> str:
    """One line, and one more for each engine that was not told."""
    holder, wanted = _holder(engines), WANTED[goal]
    when = "already" if result.startswith("already") else f"after {duration(took_ms)}"
    first = f"{holder.name if holder else ''} is {wanted} {when}"
    if result == KEPT:
        first = f"{engines[0].name} does not hold the lock; it will be {wanted} once it does"
    rest = [f"{each.name} did not get the goal: {each.problem}" for each in engines if each.problem]
    return "\n".join([first, *rest])
