"""Random schedules of engines on several nodes; the seed is in the failure's message."""

from __future__ import annotations

from typing import Any

import pytest

from lockserver.client.lease import LeaseKeeper
from lockserver.core.events import Wanted
from lockserver.core.leases import Leases
from lockserver.core.supervisors import SupervisorRecord
from tests.sim.kit import Patch, PlantedRule, PlantedRules, replayable, seeds
from tests.sim.lease.world import LeaseWorld

SCHEDULES = 60
STEPS = 800
FAULT_RATE = 0.02


@pytest.mark.slow
@pytest.mark.parametrize("engines", [1, 2, 4])
def test_lease_simulation_random_faults_never_two_grants_served_and_service_returns(engines):
    """Goal: over TCP, too, one owner, and no schedule that ends for ever. Method: clocks, network,
    kernels, server and disk misbehave in a seeded order; who is cut off for good is replaced."""
    granted = woken = 0
    for seed in seeds(SCHEDULES):
        world = LeaseWorld(seed, engines=engines)
        with replayable(seed, lambda w=world: w.trace):
            for _ in range(STEPS):
                world.step(FAULT_RATE)
            assert world.settle(), "no engine serves although every fault has ended"
        granted += len(world.promises.granted)
        woken += world.woken
    assert granted > 2 * len(seeds(SCHEDULES))  # the schedules did something
    assert woken > len(seeds(SCHEDULES))


def run(seed: int) -> None:
    world = LeaseWorld(seed)
    with replayable(seed, lambda: world.trace):
        for _ in range(STEPS):
            world.step(FAULT_RATE)


RULES = PlantedRules()
CAUGHT = r"granted to|two grants"
LENGTHS_MS = (20_000, 5000)  # one at each start of the server


@RULES.rule("killed-before-its-end", CAUGHT)
def late_kills(patch: Patch) -> None:
    """The kernel kills when the lease is over instead of before, and the server adds no margin."""
    patch.setattr(LeaseWorld, "kill_fraction", 1.0)
    patch.setattr(LeaseWorld, "margin_ms", 0)


@RULES.instead("counted-from-sending", CAUGHT, LeaseKeeper, "renewed")
def counts_from_receipt(real: Any, self: LeaseKeeper, progress: int, lease_ms: int) -> bool:
    """Engines count a lease from when the answer came instead of when they asked."""
    is_new = real(self, progress, lease_ms)
    if is_new:
        self.sent_ms = self._clock()
    return is_new


@RULES.instead("renewed-by-answers", CAUGHT, LeaseKeeper, "sent")
def renews_by_mere_sending(real: Any, self: LeaseKeeper, progress: int) -> None:
    """A message that was sent renews a lease, whether or not it is answered."""
    real(self, progress)
    if self.lease_ms is not None:
        self.sent_ms = self._clock()


@RULES.instead("old-grants-are-dropped", CAUGHT, LeaseKeeper, "may_act")
def acts_on_old_grants(real: Any, self: LeaseKeeper) -> bool:
    """A grant renews the lease, however long it was on its way."""
    if self.lease_ms is not None:
        self.sent_ms = self._clock()
    return self.lease_ms is not None


# A restarted server believes that who is on file is gone.
RULES.put("presumed-at-restart", CAUGHT, Leases, "presume", lambda self, holder, now_ms: None)


@RULES.rule("keeps-its-length", CAUGHT)
def forgets_the_length(patch: Patch) -> None:
    """A restarted server waits for as long as its own leases last."""
    add = Leases._add
    patch.setattr(LeaseWorld, "leases_ms", LENGTHS_MS)
    patch.setattr(Leases, "_add", lambda self, *who: add(self, *who[:3], self.lease_ms, who[4]))


# An engine is taken for dead when it is silent, or no longer known.
RULES.put("silence-frees-nothing", CAUGHT, Leases, "is_gone", lambda self, holder: True)


@RULES.instead("strangers-are-awaited", CAUGHT, Leases, "__init__")
def lost_state_is_free(real: Any, self: Leases, now_ms: float, **options: Any) -> None:
    """With the state lost, nobody waits for engines that have not been heard of yet."""
    real(self, now_ms, **options | {"listens": False})


@RULES.instead("vouches-for-itself", CAUGHT, Leases, "refuse")
def anybody_vouches(real: Any, self: Leases, want: Wanted, now_ms: float) -> None:
    """Any supervisor of an engine may say that an earlier one's processes are reaped."""
    for lease in tuple(self.valid.values()):
        if lease.engine == want.msg.engine and lease.supervisor != want.msg.supervisor:
            del self.valid[lease.incarnation]


# What was sent before on another connection counts, although it was overtaken.
RULES.put("newest-message", CAUGHT, SupervisorRecord, "has_outrun", lambda self, want: False)


@pytest.mark.slow
@RULES.parametrized()
def test_lease_simulation_planted_bugs_are_caught(rule: PlantedRule, monkeypatch: Patch):
    """Goal: the simulation can see two owners over TCP. Method: leave one rule out."""
    rule.is_caught(monkeypatch, run, range(10 * SCHEDULES))


@pytest.mark.slow
def test_lease_simulation_of_a_server_whose_length_changes(monkeypatch: Patch):
    """Goal: a lease keeps the length that its engine was told. Method: another at each start."""
    monkeypatch.setattr(LeaseWorld, "leases_ms", LENGTHS_MS)
    for seed in range(SCHEDULES):
        run(seed)
