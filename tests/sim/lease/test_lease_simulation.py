"""Random schedules of engines on several nodes; the seed is in the failure's message."""

from __future__ import annotations

import pytest

from lockserver.client.lease import LeaseKeeper
from lockserver.core.leases import Leases
from lockserver.core.supervisors import SupervisorRecord
from tests.sim.kit import replayable, seeds
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


class LateKills(LeaseWorld):
    """The kernel kills when the lease is over instead of before, and the server adds no margin."""

    kill_fraction = 1.0
    margin_ms = 0


class CountsFromReceipt(LeaseWorld):
    """Engines count a lease from when the answer came instead of when they asked."""

    class keeper_type(LeaseKeeper):
        def renewed(self, progress, lease_ms):
            is_new = super().renewed(progress, lease_ms)
            if is_new:
                self.sent_ms, self.lease_ms = self._clock(), lease_ms
            return is_new


class RenewsByMereSending(LeaseWorld):
    """A message that was sent renews a lease, whether or not it is answered."""

    class keeper_type(LeaseKeeper):
        def sent(self, progress):
            super().sent(progress)
            if self.lease_ms is not None:
                self.sent_ms = self._clock()


class ActsOnOldGrants(LeaseWorld):
    """A grant renews the lease, however long it was on its way."""

    class keeper_type(LeaseKeeper):
        def may_act(self):
            if self.lease_ms is not None:
                self.sent_ms = self._clock()
            return self.lease_ms is not None


class ForgetsAtRestart(LeaseWorld):
    """A restarted server believes that who is on file is gone."""

    class leases_type(Leases):
        def presume(self, holder, now_ms):
            pass


class ChangesItsLength(LeaseWorld):
    """No broken rule: the server is started with another length."""

    leases_ms = (20_000, 5000)


class ForgetsTheLength(ChangesItsLength):
    """A restarted server waits for as long as its own leases last."""

    class leases_type(Leases):
        def _add(self, engine, supervisor, incarnation, lease_ms, now_ms):
            super()._add(engine, supervisor, incarnation, self.lease_ms, now_ms)


class SilenceFrees(LeaseWorld):
    """An engine is taken for dead when it is silent, or no longer known."""

    class leases_type(Leases):
        def is_gone(self, holder):
            return True


class LostStateIsFree(LeaseWorld):
    """With the state lost, nobody waits for engines that have not been heard of yet."""

    class leases_type(Leases):
        def __init__(self, now_ms, **options):
            super().__init__(now_ms, **options | {"listens": False})


class AnybodyVouches(LeaseWorld):
    """Any supervisor of an engine may say that an earlier one's processes are reaped."""

    class leases_type(Leases):
        def refuse(self, want, now_ms):
            others = [k for k in self.valid.values() if k.engine == want.msg.engine]
            for lease in others:
                if lease.supervisor != want.msg.supervisor:
                    del self.valid[lease.incarnation]
            return


BROKEN = [
    *(LateKills, CountsFromReceipt, RenewsByMereSending, ActsOnOldGrants, ForgetsAtRestart),
    *(ForgetsTheLength, SilenceFrees, LostStateIsFree, AnybodyVouches),
]


def run(world: type[LeaseWorld], schedules: int = 10 * SCHEDULES) -> None:
    for seed in range(schedules):
        broken = world(seed)
        for _ in range(STEPS):
            broken.step(FAULT_RATE)


@pytest.mark.slow
@pytest.mark.parametrize("world", BROKEN)
def test_lease_simulation_planted_bugs_are_caught(world):
    """Goal: the simulation can see two owners over TCP. Method: plant one bug in each world."""
    with pytest.raises(AssertionError, match=r"granted to|two grants"):
        run(world)


@pytest.mark.slow
def test_lease_simulation_catches_a_message_that_counts_although_it_was_overtaken(monkeypatch):
    """Goal: what was sent before on another connection says nothing. Method: let it count."""
    monkeypatch.setattr(SupervisorRecord, "has_outrun", lambda self, want: False)
    with pytest.raises(AssertionError, match=r"granted to|two grants"):
        run(LeaseWorld)


@pytest.mark.slow
def test_lease_simulation_of_a_server_whose_length_changes():
    """Goal: a lease keeps the length that its engine was told. Method: another at each start."""
    run(ChangesItsLength, SCHEDULES)
