"""The rules of the memory service, each left out: what the simulation must catch.

One function per rule; it patches the real core (or what stands around it) so that the rule does not
hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from gms import messages as msg
from gms.core.region import RegionPhase
from gms.core.upkeep import Upkeep
from gms.core.weights import WeightsMachine
from plumbing.errors import UnderstudyError
from tests.sim.faults import Hazard
from tests.sim.gms_device import SimDevice
from tests.sim.kit import Patch, Plant, PlantedRules
from tests.sim.tp_world import World

CRASHES = Hazard.DEATHS | Hazard.SERVER
CHANGES = Hazard.DEATHS | Hazard.CHECKPOINT
NO_END = "no end after|cannot become whole"


RULES = PlantedRules()
# By rule: in which schedules it counts, and whether two copies do not fit there.
SHOWN_IN: dict[str, tuple[Hazard, bool]] = {}


def rule(
    name: str, hazards: Hazard, caught: str, *, is_tight: bool = False
) -> Callable[[Plant], Plant]:
    """The decorated function leaves out the rule `name`."""
    SHOWN_IN[name] = hazards, is_tight
    return RULES.rule(name, caught)


@rule("uuids", CRASHES | CHANGES, "two memories|two files|stale|lost")
def numbers_for_epochs(patch: Patch) -> None:
    """Ids that start over with every server."""
    boot = SimDevice.boot

    def boot_counting(self: SimDevice) -> None:
        self._ids = itertools.count(1)
        boot(self)

    patch.setattr(SimDevice, "boot", boot_counting)


@rule("evidence", CRASHES, "lost|doubled")
def a_deadline_ends_recovery(patch: Patch) -> None:
    """A survivor that has not come back by then is given up."""
    due, done = WeightsMachine._due, WeightsMachine.done

    def give_up(self: WeightsMachine) -> None:
        due(self)
        if self.now_ms >= self._began_ms + 10_000:
            for orphan in self.orphans:
                del self.regions[orphan.id]

    def ignore_strangers(self: WeightsMachine, effect: Any, *more: Any, **named: Any) -> None:
        if getattr(effect, "region", None) in (None, *self.regions):
            done(self, effect, *more, **named)

    patch.setattr(WeightsMachine, "_due", give_up)
    patch.setattr(WeightsMachine, "done", ignore_strangers)


@rule("orphans-block-rw", CRASHES, "doubled|lost")
def write_beside_an_orphan(patch: Patch) -> None:
    """Memory of the previous server does not block a load."""
    _forget(patch, "orphans")


@rule("releasing-blocks-rw", Hazard.DEATHS, "doubled")
def write_beside_a_dying_process(patch: Patch) -> None:
    """Memory that was given up is taken for free."""
    _forget(patch, "being_freed")


def _forget(patch: Patch, what: str) -> None:
    decide = WeightsMachine.decide

    def hasty(self: WeightsMachine, wish: msg.AttachMsg) -> Any:
        with pytest.MonkeyPatch.context() as hidden:
            hidden.setattr(WeightsMachine, what, property(lambda self: []))
            return decide(self, wish)

    patch.setattr(WeightsMachine, "decide", hasty)


@rule("late-survivors", CRASHES, "has its session|no end after")
def refuse_late_survivors(patch: Patch) -> None:
    """Once the epoch is back, who comes after is not taken in."""
    _refuse(patch, lambda self, message: self.committed is not None)


@rule("orphan-survivors", CRASHES | CHANGES, f"has its session|{NO_END}")
def refuse_survivors_of_other_epochs(patch: Patch) -> None:
    """Only the journalled epoch's readers are let back."""

    def is_other(self: WeightsMachine, message: msg.HandBackMsg) -> bool:
        epoch = self.regions.get(message.region)
        return epoch is not None and epoch.phase is RegionPhase.ORPHANED and epoch.expected is None

    _refuse(patch, is_other)


def _refuse(patch: Patch, is_unwanted: Callable[[WeightsMachine, msg.HandBackMsg], bool]) -> None:
    judge = WeightsMachine._judge_survivor

    def refuse(self: WeightsMachine, session: Any, message: msg.HandBackMsg) -> None:
        if is_unwanted(self, message):
            self._refuse(session, UnderstudyError("gms.not_committed", "not wanted"))
        else:
            judge(self, session, message)

    patch.setattr(WeightsMachine, "_judge_survivor", refuse)


IN_TURN = CRASHES | Hazard.SESSIONS | Hazard.DRIVER


@rule("next-survivor", IN_TURN, f"session|returning|{NO_END}")
def check_only_one_survivor(patch: Patch) -> None:
    """A hand-back that fails its check was the only one."""
    take_back, checked = WeightsMachine._take_back, set[tuple[WeightsMachine, str]]()

    def take_once(self: WeightsMachine, session: Any, region: Any, message: Any) -> None:
        if (self, region.id) not in checked or region.returning is not None:
            checked.add((self, region.id))
            take_back(self, session, region, message)

    patch.setattr(WeightsMachine, "_take_back", take_once)


@rule("condemn", Hazard.DEATHS | Hazard.BAD_PAGE, NO_END)
def never_condemn(patch: Patch) -> None:
    """A bad epoch stays in service."""
    patch.setattr(Upkeep, "on_condemn", lambda self, event, message: None)


@rule("content-identity", CHANGES, "mixed weights")
def identity_of_structure_only(patch: Patch) -> None:
    """An identity that does not tell two checkpoints of one model apart."""
    patch.setattr(World, "identity", lambda self, version, rank: {"rank": rank})
