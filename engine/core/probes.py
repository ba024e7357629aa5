"""The probe table: four questions, eight states, and why (docs/states.md shows it).

Owns TABLE. Must not know HTTP. "First" means that no incarnation of this engine has reached
standby in this pod yet, nor was it cold on purpose: until then kubelet's startup probe decides,
afterwards an engine that relaunches must not take the serving pod out of its Service, and the first
load of one that was cold must not be taken for a hang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from engine.core.events import State


class Rule(StrEnum):
    YES = "200"
    NO = "503"
    UNLESS_FIRST = "503 first, else 200"
    UNLESS_FIRST_OR_COLD = "503 first, else 200; 200 while cold by its goal"
    UNLESS_FIRST_WITHIN_BUDGET = "503 first; later 200 until the budget is spent"
    WITHIN_BUDGET = "200 until the budget is spent"
    WHILE_HEALTHY = "200 while generation is healthy"
    UNLESS_CRASH_LOOP = "200 until the budget is spent or a crash loop is declared"


ALWAYS, NEVER = (dict.fromkeys(State, rule) for rule in (Rule.YES, Rule.NO))

TABLE: Mapping[str, Mapping[State, Rule]] = {
    "startup": {
        **ALWAYS,
        State.INIT: Rule.UNLESS_FIRST,
        State.DEAD: Rule.UNLESS_FIRST_OR_COLD,
    },
    "live": {
        **ALWAYS,
        State.INIT: Rule.UNLESS_FIRST_WITHIN_BUDGET,
        State.WAKING: Rule.WITHIN_BUDGET,
        State.ACTIVE: Rule.WHILE_HEALTHY,
        State.DRAINING: Rule.WITHIN_BUDGET,
        State.RELEASING: Rule.WITHIN_BUDGET,
        State.DEAD: Rule.UNLESS_CRASH_LOOP,
    },
    "ready": {**NEVER, **dict.fromkeys((State.STANDBY, State.ACTIVE, State.RESTING), Rule.YES)},
    "serving": {**NEVER, State.ACTIVE: Rule.YES},
}


@dataclass(frozen=True, slots=True)
class View:
    """What the probes depend on."""

    state: State
    # Some incarnation of this engine, in this pod, was standby; or the engine was cold on purpose.
    was_started: bool
    is_budget_spent: bool  # of this state; while dead, of reaping
    is_healthy: bool
    is_crash_loop: bool
    is_cold: bool = False  # it is not launched, because its goal is `cold`


def objection(endpoint: str, view: View) -> str:
    """Why `endpoint` ("startup", "live", "ready", "serving") is not answered with 200, in one word;
    "" if it is."""
    first = "" if view.was_started else "never_standby_yet"
    spent = "budget_spent" if view.is_budget_spent else ""
    objections = {
        Rule.YES: "",
        Rule.NO: f"is_{view.state}",
        Rule.UNLESS_FIRST: first,
        Rule.UNLESS_FIRST_OR_COLD: "" if view.is_cold else first,
        Rule.UNLESS_FIRST_WITHIN_BUDGET: first or spent,
        Rule.WITHIN_BUDGET: spent,
        Rule.WHILE_HEALTHY: "" if view.is_healthy else "generation_unhealthy",
        Rule.UNLESS_CRASH_LOOP: "crash_loop" if view.is_crash_loop else spent,
    }
    return objections[TABLE[endpoint][view.state]]
