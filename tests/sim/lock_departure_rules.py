"""The rules for engines that are told to end, each left out: the simulation must detect every one.

Two are the server's, in the real core, and two the engine's, in `lock_departures.py`.
"""

from __future__ import annotations

from typing import Any

from lockserver.core import events as ev
from lockserver.core.machine import LockMachine
from lockserver.core.supervisors import SupervisorRecord
from tests.sim.lock_departures import Departures
from tests.sim.lock_planted import Patch, Rule, hear


def leaver_is_granted(patch: Patch) -> None:
    """An engine that leaves keeps its place in the queue."""

    def wait(self: LockMachine, event: ev.Input) -> ev.Input:
        if isinstance(event, ev.Wanted):
            leavers.discard(event.msg.supervisor)
        return event

    leavers: set[str] = set()
    hear(patch, wait)
    patch.setattr(SupervisorRecord, "may_wait_for", lambda self, lock: lock in self.locks)


def any_waiter_is_a_successor(patch: Patch) -> None:
    """Whoever waits counts as a successor, whether or not it knows that the holder leaves."""
    adopt = SupervisorRecord.adopt

    class Everything(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    def vouch(self: SupervisorRecord, want: ev.Wanted) -> None:
        adopt(self, want)
        self.succeeds = Everything()

    patch.setattr(SupervisorRecord, "adopt", vouch)


def without(rule: str) -> Any:
    """Leave out this rule of the engine."""
    return lambda patch: patch.setattr(Departures, rule, False)


DEPARTURES = [
    Rule("leaver-is-not-granted", leaver_is_granted, "is granted, and leaves"),
    Rule("successor-knows", any_waiter_is_a_successor, "none vouched"),
    Rule("vouch-only-untold", without("vouches_untold"), "vouches, and was told to end"),
    Rule("settled-answer", without("waits_for_settled"), "no engine vouched for them"),
]
