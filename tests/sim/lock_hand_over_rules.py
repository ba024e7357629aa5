"""The rules of a hand-over in place, each left out: the simulation must detect every one.

They are those of docs/lock.md, promise 7: the server's are broken in the real core or in its
simulated shell, the engine's in `lock_serving.py`. `seed` is a schedule that shows it, looked at
first; if a change of the simulation has moved it, others are searched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockserver.core import events as ev
from lockserver.core import evidence
from lockserver.core.lock import Lock, Signal
from lockserver.core.machine import LockMachine
from tests.sim.lock_broken_rules import STUCK, older_connection_counts
from tests.sim.lock_planted import Patch, Rule
from tests.sim.lock_serving import Serving
from tests.sim.lock_shell import Shell

TWO = "two terms|serves under"


@dataclass(frozen=True)
class HandOverRule(Rule):
    seed: int = 0


def without(rule: str) -> Callable[[Patch], None]:
    """Leave out this rule of the engine."""
    return lambda patch: patch.setattr(Serving, rule, False)


def no_word(patch: Patch) -> None:
    """The serving file is tried although its holder has not said that it handed over."""

    def every(locks: Any) -> Any:
        return [
            (lock.name, lock.holder)
            for lock in locks.values()
            if lock.is_fenced and lock.holder is not None and lock.holder.serving is not None
        ]

    patch.setattr(evidence, "handed_over", every)


def no_seal(patch: Patch) -> None:
    """A serving file that was found free can still be joined for the token that is over."""
    patch.setattr(Shell, "seal_serving", lambda self, tree, token: None)


def seal_is_taken_off(patch: Patch) -> None:
    """The next grant takes the seal off."""
    handle = LockMachine.handle

    def reset(self: LockMachine, event: Any, now_ms: float) -> Any:
        effects = handle(self, event, now_ms)
        grants = (effect for effect in effects if isinstance(effect, ev.SendGrant))
        unsealed.extend(grant.holder.incarnation for grant in grants)
        return effects

    unsealed: list[str] = []
    perform = Shell.perform

    def perform_and_reset(self: Shell, effects: Any) -> None:
        while unsealed:
            self.world.trees[unsealed.pop()].length = 0
        perform(self, effects)

    patch.setattr(LockMachine, "handle", reset)
    patch.setattr(Shell, "perform", perform_and_reset)


def any_file_will_do(patch: Patch) -> None:
    """Whatever file has the serving file's name is evidence."""
    patch.setattr(Shell, "is_filed", lambda self, tree, holder: True)


def reaped_is_handed_over(patch: Patch) -> None:
    """The serving file proves that a tree is gone."""
    fire = Lock.fire

    def fire_and_believe(self: Lock, signal: Signal, now_ms: float, holder: Any = None) -> None:
        fire(self, signal, now_ms, holder)
        if signal is Signal.NOT_WANTED:
            self.is_handed_over = True

    patch.setattr(Lock, "fire", fire_and_believe)


def serving_files_are_not_scanned(patch: Patch) -> None:
    """After a lost state, only witnesses count."""
    frees = evidence.scan_frees
    patch.setattr(
        evidence, "scan_frees", lambda locks, known, held, serving=(): frees(locks, known, held)
    )


HAND_OVER = [
    # In the order of docs/lock.md, H1 to H18.
    HandOverRule("server-waits-for-the-word", no_word, "without its word", 0),
    HandOverRule("server-seals", no_seal, TWO, 35),
    HandOverRule("server-never-unseals", seal_is_taken_off, TWO, 265),
    HandOverRule("server-tries-the-filed-file", any_file_will_do, TWO, 320),
    HandOverRule("over-in-each-want", without("says_over"), STUCK, 0),
    HandOverRule("newest-connection", older_connection_counts, f"{STUCK}|not given its grant", 250),
    HandOverRule("reaped-needs-the-witness", reaped_is_handed_over, "without its word", 5),
    HandOverRule("lost-state-scans-serving-files", serving_files_are_not_scanned, TWO, 965),
    HandOverRule("join-first", without("joins_first"), TWO, 15),
    HandOverRule("join-the-own-file", without("knows_its_file"), TWO, 955),
    HandOverRule("leave-last", without("leaves_last"), TWO, 15),
    HandOverRule("close-never-unlock", without("closes"), TWO, 485),
    HandOverRule("low-descriptor", without("on_low_descriptor"), TWO, 310),
    HandOverRule("accepter-joins", without("accepter_joins"), TWO, 15),
    HandOverRule("look-in-proc", without("looks_in_proc"), TWO, 725),
    HandOverRule("only-from-active", without("only_when_active"), TWO, 17190),
    HandOverRule("ignore-old-grants", without("ignores_old_grants"), "which is over", 20),
    HandOverRule("give-way", without("gives_way"), STUCK, 55),
]
