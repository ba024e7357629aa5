"""Offload and restage under random schedules: two servers, two engines and a keeper that die at
every step; and for each rule the proof that the simulation would see it missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gms.core import upkeep
from gms.core.upkeep import Upkeep
from gms.core.weights import WeightsMachine
from tests.sim.kit import replayable, seeds
from tests.sim.offload_world import OffloadWorld

STEPS, FAULT_RATE = 400, 0.03


def run(seed: int) -> OffloadWorld:
    world = OffloadWorld(seed)
    with replayable(seed, lambda: world.trace):
        for _ in range(STEPS):
            world.step(FAULT_RATE)
        world.settle()
    return world


def test_no_schedule_loses_offloaded_weights_or_brings_condemned_ones_back():
    """Goal: what is offloaded comes back with its bytes, is never loaded while its copy is held,
    and "free" is true. Method: random deaths of every process, and bad pages."""
    worlds = [run(seed) for seed in seeds(40)]
    assert sum(world.offloads for world in worlds) > len(worlds)
    assert sum(world.restages for world in worlds) > len(worlds)


def any_copy_will_do(patch: pytest.MonkeyPatch) -> None:
    """Whatever is committed in host memory stands for the weights."""
    real = upkeep.checked_copy

    def unchecked(copy: Any, epoch: Any) -> Any:
        return real(copy and epoch.digest and replace(copy, digest=epoch.digest), epoch) and copy

    patch.setattr(upkeep, "checked_copy", unchecked)


def mapped_weights_are_freed(patch: pytest.MonkeyPatch) -> None:
    """A process that maps them need not be waited for."""
    patch.setattr(Upkeep, "_check_unmapped", lambda self, epoch, fix, *, is_mapped: None)
    patch.setattr(upkeep, "HELD", ())


def given_up_is_free(patch: pytest.MonkeyPatch) -> None:
    """The answer does not wait for the kernel."""
    patch.setattr(upkeep, "HELD", ())


def the_link_ends_with_the_grant(patch: pytest.MonkeyPatch) -> None:
    """The writer has been told of the copy: that is the end of it."""
    real = WeightsMachine._epoch_opened

    def opened(self: WeightsMachine, session: Any) -> None:
        real(self, session)
        self.offloaded = None

    patch.setattr(WeightsMachine, "_epoch_opened", opened)


def the_link_outlives_the_commit(patch: pytest.MonkeyPatch) -> None:
    """A condemned epoch's copy stands for it again."""
    real, kept = WeightsMachine.journal, {}

    def journal(self: WeightsMachine) -> None:
        if self.offloaded is not None:
            kept[self] = self.offloaded
        elif self.committed is None:
            self.offloaded = kept.get(self)
        real(self)

    patch.setattr(WeightsMachine, "journal", journal)


def lost_weights_are_loaded_again(patch: pytest.MonkeyPatch) -> None:
    """A server died while they left: its successor knows of no copy."""
    real = WeightsMachine._journalled_is_gone

    def gone(self: WeightsMachine, record: Any, copy: Any) -> None:
        real(self, record, None)

    patch.setattr(WeightsMachine, "_journalled_is_gone", gone)


@pytest.mark.parametrize(
    ("leave_out", "caught"),
    [
        (any_copy_will_do, "its bytes are not those of its digest|condemned bytes are back"),
        (mapped_weights_are_freed, "is not free"),
        (given_up_is_free, "is not free"),
        (the_link_ends_with_the_grant, "although a copy stands for them"),
        (the_link_outlives_the_commit, "condemned bytes are back"),
        (lost_weights_are_loaded_again, "although a copy stands for them"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_rule_of_offloading_that_is_left_out_is_caught(
    leave_out: Callable[[pytest.MonkeyPatch], None], caught: str, monkeypatch: pytest.MonkeyPatch
):
    """Goal: every rule is needed, and the simulation can fail. Method: leave one out."""
    leave_out(monkeypatch)

    def search() -> None:
        for seed in range(300):
            run(seed)

    with pytest.raises(AssertionError, match=caught):
        search()
