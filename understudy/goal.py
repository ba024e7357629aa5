"""`understudy sleep` and `wake`: give the engines of a pod a goal, and wait for the lock's holder.

Every engine is told, because the next holder of the lock serves in the same tier. An engine that
ends meanwhile is told again: its next launch does not know the order.
"""

from __future__ import annotations

import asyncio
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


@dataclass
class ToldEngine:
    """One engine: what it reported before the order, and what it reports now."""

    name: str
    path: str
    before: EngineReportMsg | None = None
    now: EngineReportMsg | None = None  # None until it was told, or while it does not answer
    error: UnderstudyError | None = None  # why it was not told

    async def tell(self, goal: Tier) -> None:
        """Tell it once in each of its lives, and note what it reports."""
        try:
            if self.before is None:
                self.before = await self._report(SetGoalMsg())
            is_told = self.now is not None and self.error is None
            self.now = await self._report(SetGoalMsg() if is_told else SetGoalMsg(goal, BY))
            self.error = None
        except UnderstudyError as error:
            self.now = self.before if isinstance(error, RemoteError) else None
            self.error = error

    async def _report(self, message: SetGoalMsg) -> EngineReportMsg:
        answer = (await ask(self.path, GOAL_CATALOGUE, message, ANSWER_S)).message
        assert isinstance(answer, EngineReportMsg)  # the catalogue has no other answer
        return answer

    def row(self) -> GoalEngine:
        now, problem = self.now, self.error.message if self.error is not None else None
        said = (now.state, now.tier, now.goal) if now is not None else (None, None, None)
        state, tier, goal = said
        return GoalEngine(engine=self.name, state=state, tier=tier, goal=goal, problem=problem)


async def give_goal(
    goal: Tier, paths: Mapping[str, str], timeout_s: float
) -> tuple[str, GoalDocument]:
    """Give `goal` to the engines at these control sockets: one line for operators, and the
    document.

    Raises:
        UnderstudyError: refused, overridden, no engine, or `pod.goal_timeout`.
    """
    begun, engines = time.monotonic(), [ToldEngine(*pair) for pair in paths.items()]
    result = None
    try:
        async with asyncio.timeout(timeout_s):
            while result is None:
                await asyncio.gather(*(each.tell(goal) for each in engines))
                result = _verdict(goal, engines)
                await asyncio.sleep(LOOK_S if result is None else 0)
    except TimeoutError:
        raise _late(goal, engines, timeout_s) from None
    now = _holder(engines)
    document = GoalDocument(
        schema=1,
        result=result,
        goal=goal,
        engine=now.engine if now else None,
        token=now.token if now else None,
        took_ms=round((time.monotonic() - begun) * 1000, 1),
        engines=[each.row() for each in engines],
    )
    return _text(goal, document), document


def _holder(engines: Sequence[ToldEngine]) -> EngineReportMsg | None:
    """What the lock's holder reports; an engine that was superseded may not know it yet."""
    said = [each.now for each in engines if each.now is not None]
    holding = [now for now in said if now.token > 0 and State(now.state) in HOLDING]
    return max(holding, key=lambda now: now.token, default=None)


def _verdict(goal: Tier, engines: Sequence[ToldEngine]) -> str | None:
    """What was done, in one word; None: not yet.

    Raises:
        UnderstudyError: it will not be done.
    """
    now = _holder(engines)
    if now is None:
        errors = [each.error for each in engines if each.error is not None]
        if len(errors) < len(engines):
            return None
        refused = next((each for each in errors if isinstance(each, RemoteError)), None)
        why = "; ".join(each.message for each in errors)
        raise refused or UnreachableError("pod.no_engine", f"no engine can be reached: {why}")
    holder = next(each for each in engines if each.now is now)
    if holder.error is not None:
        raise holder.error
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
    who = f" by {now.goal_by}" if now.goal_by else ""
    found = f"{now.engine} was given another goal{who} ({now.goal}) before it was {goal}"
    is_woken = now.goal is Tier.AWAKE and now.goal_by == GATEWAY
    return f"{found}; `gateway serve --wake manual` prevents it" if is_woken else found


def _late(goal: Tier, engines: Sequence[ToldEngine], timeout_s: float) -> UnderstudyError:
    after, now = duration(timeout_s * 1000), _holder(engines)
    if now is None:
        told = ", ".join(each.name for each in engines if each.now and not each.error)
        then = f"; {told} will be {WANTED[goal]} at the next grant" if told else ""
        return WaitTimeoutError("pod.goal_timeout", f"no engine holds the lock after {after}{then}")
    busy = f", with {now.in_flight} requests in flight" if now.in_flight else ""
    why = f" ({now.fault})" if now.fault else ""
    return WaitTimeoutError(
        "pod.goal_timeout",
        f"{now.engine} is still {now.state}{busy}{why}, not {WANTED[goal]}, after {after}; the"
        " transition continues in the background: see `understudy status`",
    )


def _text(goal: Tier, document: GoalDocument) -> str:
    """One line, and one more for each engine that was not told."""
    is_already = document.result.startswith("already")
    when = "already" if is_already else f"after {duration(document.took_ms)}"
    first = f"{document.engine} is {WANTED[goal]} {when}"
    missed = (each for each in document.engines if each.problem)
    rest = [f"{each.engine} did not get the goal: {each.problem}" for each in missed]
    return "\n".join([first, *rest])
