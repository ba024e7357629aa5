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
from gms.core import device as capacity
from gms.core import events as ev
from gms.core import grants
from gms.core.events import EpochPhase
from gms.core.machine import DeviceMachine
from gms.core.recovery import HANDING_BACK, Recovery
from gms.core.upkeep import Upkeep
from plumbing.errors import UnderstudyError
from tests.sim.faults import Hazard
from tests.sim.gms_device import SimDevice
from tests.sim.tp_world import World

CRASHES = Hazard.DEATHS | Hazard.SERVER
CHANGES = Hazard.DEATHS | Hazard.CHECKPOINT

Unwanted = Callable[[Recovery, msg.RejoinMsg], bool]


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
    deadline_passed, free = DeviceMachine._deadline_passed, DeviceMachine._epoch_free

    def give_up(self: DeviceMachine, now_ms: float) -> list[ev.DeviceEffect]:
        due_ms = self._recovery.next_report_ms()
        if due_ms is not None and due_ms <= now_ms:
            for orphan in self.device.orphans:
                del self.device.epochs[orphan.id]
        return deadline_passed(self, now_ms)

    def ignore_strangers(
        self: DeviceMachine, event: ev.EpochFree, now_ms: float
    ) -> list[ev.DeviceEffect]:
        return free(self, event, now_ms) if event.epoch in self.device.epochs else []

    patch.setattr(DeviceMachine, "_deadline_passed", give_up)
    patch.setattr(DeviceMachine, "_epoch_free", ignore_strangers)


def write_beside_an_orphan(patch: pytest.MonkeyPatch) -> None:
    """Memory of the previous server does not block a load."""
    _forget(patch, EpochPhase.ORPHANED)


def write_beside_a_dying_process(patch: pytest.MonkeyPatch) -> None:
    """Memory that was given up is taken for free."""
    _forget(patch, EpochPhase.RELEASING)


def _forget(patch: pytest.MonkeyPatch, phase: EpochPhase) -> None:
    real = grants.decide

    def hasty(request: Any, epochs: Any, *more: Any) -> grants.Verdict:
        return real(request, [e for e in epochs if e.phase is not phase], *more)

    patch.setattr(grants, "decide", hasty)


def refuse_late_survivors(patch: pytest.MonkeyPatch) -> None:
    """Once the epoch is back, who comes after is not taken in."""
    _refuse(patch, lambda self, rejoin: self.device.committed is not None)


def refuse_survivors_of_other_epochs(patch: pytest.MonkeyPatch) -> None:
    """Only the journalled epoch's readers are let back."""

    def is_other(self: Recovery, rejoin: msg.RejoinMsg) -> bool:
        epoch = self.device.epochs.get(rejoin.epoch)
        return epoch is not None and epoch.phase is EpochPhase.ORPHANED and epoch.expected is None

    _refuse(patch, is_other)


def abort_in_doubt(patch: pytest.MonkeyPatch) -> None:
    """A writer whose commit was not answered has lost, whatever the journal says."""
    _refuse(patch, lambda self, rejoin: not rejoin.was_committed)


def _refuse(
    patch: pytest.MonkeyPatch, is_unwanted: Callable[[Recovery, msg.RejoinMsg], bool]
) -> None:
    judge = Recovery._judge

    def refuse(
        self: Recovery, session: Any, rejoin: msg.RejoinMsg, now_ms: float
    ) -> list[ev.DeviceEffect]:
        if not is_unwanted(self, rejoin):
            return judge(self, session, rejoin, now_ms)
        session.move(ev.SessionRefused, now_ms)
        error = UnderstudyError("gms.not_committed", "not wanted")
        dropped = self.device.drop(session, error.message)
        return [ev.RefuseRequest(session.id, session.request_id, error), *dropped]

    patch.setattr(Recovery, "_judge", refuse)


def ask_only_one_survivor(patch: pytest.MonkeyPatch) -> None:
    """An offer that breaks off was the only one."""
    judge, asked = Recovery._judge, set[tuple[Recovery, str]]()

    def judge_once(
        self: Recovery, session: Any, rejoin: msg.RejoinMsg, now_ms: float
    ) -> list[ev.DeviceEffect]:
        is_broken_off = (self, rejoin.epoch) in asked and self.device.committed is None
        if is_broken_off and not any(
            s.state in HANDING_BACK for s in self.device.sessions.values()
        ):
            return []
        effects = judge(self, session, rejoin, now_ms)
        if any(is_wanted(effect) for effect in effects):
            asked.add((self, rejoin.epoch))
        return effects

    patch.setattr(Recovery, "_judge", judge_once)


def is_wanted(effect: ev.DeviceEffect) -> bool:
    return isinstance(effect, ev.SendMessage) and isinstance(effect.message, msg.WantedMsg)


def never_condemn(patch: pytest.MonkeyPatch) -> None:
    """A bad epoch stays in service."""
    patch.setattr(Upkeep, "condemn", lambda self, event, message, now_ms: [])


def never_evict(patch: pytest.MonkeyPatch) -> None:
    """A committed epoch is not freed to make room, even where no process maps it."""
    fit = capacity.fit

    def fit_beside(*args: Any, **facts: Any) -> Any:
        return fit(*args, **{**facts, "may_replace": False})

    patch.setattr(capacity, "fit", fit_beside)


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
    Rule("next-survivor", ask_only_one_survivor, CRASHES | Hazard.SESSIONS, f"session|{NO_END}"),
    Rule("condemn", never_condemn, Hazard.DEATHS | Hazard.BAD_PAGE, NO_END),
    Rule("evict", never_evict, CHANGES, NO_END, is_tight=True),
    Rule("content-identity", identity_of_structure_only, CHANGES, "mixed weights"),
]
