"""The rules of the memory service, each left out: what the simulation must catch.

One function per rule; it patches the real core (or what stands around it) so that the rule does not
hold. `caught` is what the simulation then says, and where its schedules are to look for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from engine.core.loading import Role
from gms import messages as msg
from gms.core.region import RegionPhase
from gms.core.upkeep import Upkeep
from gms.core.weights import WeightsMachine
from plumbing.errors import UnderstudyError
from tests.sim.faults import Hazard
from tests.sim.gms_device import SimDevice
from tests.sim.tp_world import World

CRASHES = Hazard.DEATHS | Hazard.SERVER
CHANGES = Hazard.DEATHS | Hazard.CHECKPOINT

Unwanted = Callable[[WeightsMachine, msg.HandBackMsg], bool]


@dataclass(frozen=True)
class Rule:
    """`leave_out` breaks it; then schedules with these hazards must fail with `caught`."""

    name: str
    leave_out: Callable[[pytest.MonkeyPatch], None]
    hazards: Hazard
    caught: str  # a regular expression
    roles: tuple[Role, ...] = (Role.AUTO, Role.AUTO)
    is_tight: bool = False


def numbers_for_epochs(patch: pytest.MonkeyPatch) -> None:
    """Ids that start over with every server."""
    boot = SimDevice.boot

    def boot_counting(self: SimDevice) -> None:
        self._ids = itertools.count(1)
        boot(self)

    patch.setattr(SimDevice, "boot", boot_counting)


def a_deadline_ends_recovery(patch: pytest.MonkeyPatch) -> None:
    """A survivor that has not come back by then is given up."""
    due, done = WeightsMachine._due, WeightsMachine._done

    def give_up(self: WeightsMachine) -> None:
        due(self)
        if self.now_ms >= self._began_ms + 10_000:
            for orphan in self.orphans:
                del self.regions[orphan.id]

    def ignore_strangers(self: WeightsMachine, effect: Any, result: Any, error: Any) -> None:
        if getattr(effect, "region", None) in (None, *self.regions):
            done(self, effect, result, error)

    patch.setattr(WeightsMachine, "_due", give_up)
    patch.setattr(WeightsMachine, "_done", ignore_strangers)


def write_beside_an_orphan(patch: pytest.MonkeyPatch) -> None:
    """Memory of the previous server does not block a load."""
    _forget(patch, "orphans")


def write_beside_a_dying_process(patch: pytest.MonkeyPatch) -> None:
    """Memory that was given up is taken for free."""
    _forget(patch, "being_freed")


def _forget(patch: pytest.MonkeyPatch, what: str) -> None:
    decide = WeightsMachine.decide

    def hasty(self: WeightsMachine, wish: msg.AttachMsg) -> Any:
        with pytest.MonkeyPatch.context() as hidden:
            hidden.setattr(WeightsMachine, what, property(lambda self: []))
            return decide(self, wish)

    patch.setattr(WeightsMachine, "decide", hasty)


def refuse_late_survivors(patch: pytest.MonkeyPatch) -> None:
    """Once the epoch is back, who comes after is not taken in."""
    _refuse(patch, lambda self, message: self.committed is not None)


def refuse_survivors_of_other_epochs(patch: pytest.MonkeyPatch) -> None:
    """Only the journalled epoch's readers are let back."""

    def is_other(self: WeightsMachine, message: msg.HandBackMsg) -> bool:
        epoch = self.regions.get(message.region)
        return epoch is not None and epoch.phase is RegionPhase.ORPHANED and epoch.expected is None

    _refuse(patch, is_other)


def abort_in_doubt(patch: pytest.MonkeyPatch) -> None:
    """A writer whose commit was not answered has lost, whatever the journal says."""
    _refuse(patch, lambda self, message: not (message.epoch and message.epoch.was_committed))


def _refuse(patch: pytest.MonkeyPatch, is_unwanted: Unwanted) -> None:
    judge = WeightsMachine._judge_survivor

    def refuse(self: WeightsMachine, session: Any, message: msg.HandBackMsg) -> None:
        if is_unwanted(self, message):
            self._refuse(session, UnderstudyError("gms.not_committed", "not wanted"))
        else:
            judge(self, session, message)

    patch.setattr(WeightsMachine, "_judge_survivor", refuse)


def check_only_one_survivor(patch: pytest.MonkeyPatch) -> None:
    """A hand-back that fails its check was the only one."""
    take_back, checked = WeightsMachine._take_back, set[tuple[WeightsMachine, str]]()

    def take_once(self: WeightsMachine, session: Any, region: Any, message: Any) -> None:
        if (self, region.id) not in checked or region.returning is not None:
            checked.add((self, region.id))
            take_back(self, session, region, message)

    patch.setattr(WeightsMachine, "_take_back", take_once)


def never_condemn(patch: pytest.MonkeyPatch) -> None:
    """A bad epoch stays in service."""
    patch.setattr(Upkeep, "_condemn", lambda self, event, message: None)


def never_evict(patch: pytest.MonkeyPatch) -> None:
    """A committed epoch is not freed to make room, even where no process maps it."""
    fit = WeightsMachine.fit

    def fit_beside(self: WeightsMachine, size_bytes: int, *, may_replace: bool) -> Any:
        return fit(self, size_bytes, may_replace=False)

    patch.setattr(WeightsMachine, "fit", fit_beside)


def identity_of_structure_only(patch: pytest.MonkeyPatch) -> None:
    """An identity that does not tell two checkpoints of one model apart."""
    patch.setattr(World, "identity", lambda self, version, rank: {"rank": rank})


NO_END = "no end after|cannot become whole"

RULES = [
    Rule("uuids", numbers_for_epochs, CRASHES | CHANGES, "two memories|two files|stale|lost"),
    Rule("evidence", a_deadline_ends_recovery, CRASHES, "lost|doubled"),
    Rule("orphans-block-rw", write_beside_an_orphan, CRASHES, "doubled|lost"),
    Rule("releasing-blocks-rw", write_beside_a_dying_process, Hazard.DEATHS, "doubled"),
    Rule("late-survivors", refuse_late_survivors, CRASHES, "has its session|no end after"),
    Rule(
        "orphan-survivors",
        refuse_survivors_of_other_epochs,
        CRASHES | CHANGES,
        f"has its session|{NO_END}",
    ),
    Rule(
        "next-survivor",
        check_only_one_survivor,
        CRASHES | Hazard.SESSIONS | Hazard.DRIVER,
        f"session|returning|{NO_END}",
    ),
    Rule("condemn", never_condemn, Hazard.DEATHS | Hazard.BAD_PAGE, NO_END),
    Rule("evict", never_evict, CHANGES, NO_END, is_tight=True),
    Rule("content-identity", identity_of_structure_only, CHANGES, "mixed weights"),
]
