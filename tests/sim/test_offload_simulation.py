"""Offload and restage under random schedules: two servers, two engines and a keeper that die at
every step; and for each rule the proof that the simulation would see it missing."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gms.core import upkeep
from gms.core.upkeep import Upkeep
from gms.core.weights import WeightsMachine
from tests.sim.kit import PlantedRule, PlantedRules, replayable, seeds
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


RULES = PlantedRules()
LOADED = "although a copy stands for them"


@RULES.instead(
    "the copy has the same bytes",
    "its bytes are not those of its digest|condemned bytes are back",
    upkeep,
    "checked_copy",
)
def any_copy_will_do(real: Any, copy: Any, epoch: Any) -> Any:
    """Whatever is committed in host memory stands for the weights."""
    return real(copy and epoch.digest and replace(copy, digest=epoch.digest), epoch) and copy


@RULES.rule("nobody maps what is freed", "is not free")
def mapped_weights_are_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Upkeep, "_check_unmapped", lambda self, epoch, fix, *, is_mapped: None)
    patch.setattr(upkeep, "HELD", ())


@RULES.instead("the link outlives the grant", LOADED, WeightsMachine, "_grant_write")
def the_link_ends_with_the_grant(real: Any, self: Any, session: Any) -> None:
    """The writer has been told of the copy: that is the end of it."""
    real(self, session)
    self.offloaded = None


@RULES.rule("the link ends with the commit", "condemned bytes are back")
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


@RULES.instead("a lost epoch's copy is found", LOADED, WeightsMachine, "_journalled_is_gone")
def lost_weights_are_loaded_again(real: Any, self: Any, record: Any, copy: Any) -> None:
    """A server died while they left: its successor knows of no copy."""
    real(self, record, None)


RULES.put("the answer waits for the kernel", "is not free", upkeep, "HELD", ())


@RULES.parametrized()
def test_a_rule_of_offloading_that_is_left_out_is_caught(
    rule: PlantedRule, monkeypatch: pytest.MonkeyPatch
):
    """Goal: every rule is needed, and the simulation can fail. Method: leave one out."""
    rule.is_caught(monkeypatch, run, range(300))
