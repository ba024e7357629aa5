"""The owner of KV memory under random schedules: no two engines in it, no two pools, nobody stale.

Method: `kv_world`, from one seed each, which a failure prints; then the rules of the machine left
out one by one, which the same schedules must catch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gms.kv.core.borrowers import Borrowers
from gms.kv.core.machine import KvMachine
from gms.kv.core.pools import Pools
from gms.kv.core.state import Pool
from tests.sim.kv_world import KvWorld
from tests.sim.seeds import replayable, seeds

STEPS = 300


def test_no_schedule_lends_memory_to_two_engines_or_makes_it_twice():
    """Goal: one incarnation in the memory, one pool, the newest token, fresh means zero, discarded
    is never lent, and in the end the next engine gets it."""
    takeovers = lent = 0
    for seed in seeds(400):
        world = KvWorld(seed)
        with replayable(seed, lambda world=world: world.trace):
            world.run(STEPS)
        takeovers, lent = takeovers + world.takeovers, lent + world.lent
    assert takeovers > 20  # else the schedules prove nothing
    assert lent > 400


def no_look_at_the_file(patch: pytest.MonkeyPatch) -> None:
    """The end of the last session counts as the end of its process."""
    judge = KvMachine._judge

    def judged(self, session, now_ms):
        for pool in self.pools.by_id.values():
            pool.is_free = not self.borrowers.holders_of(pool.id)
        return judge(self, session, now_ms)

    patch.setattr(KvMachine, "_judge", judged)


def no_look_at_the_sessions(patch: pytest.MonkeyPatch) -> None:
    """A free file counts, although a session was granted the pool and has not locked it yet."""
    patch.setattr(Borrowers, "holders", property(lambda self: []))


def stale_tokens_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Borrowers, "_stale", lambda self, claimant: None)


def tokens_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    init = Borrowers.__init__
    patch.setattr(Borrowers, "__init__", lambda self, newest: init(self, ()))


def orphans_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    init = KvMachine.__init__

    def without(self, *, new_pool_id, orphans=None, newest=()):
        init(self, new_pool_id=new_pool_id, newest=newest)

    patch.setattr(KvMachine, "__init__", without)


def discards_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """One that a server was told and the survivors do not repeat."""
    patch.setattr(KvWorld, "is_marking", False)


def unknown_zeroes_are_believed(patch: pytest.MonkeyPatch) -> None:
    """Memory that came back without a mark counts as never written."""
    taken_back = Pools.taken_back

    def back(self, pool):
        pool.has_begun, pool.is_certain = pool.is_certain, True
        return taken_back(self, pool)

    patch.setattr(Pools, "taken_back", back)


def any_size_fits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pool, "fits", lambda self, claim: True)


RULES: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (no_look_at_the_file, "beside|same time"),
    (no_look_at_the_sessions, "beside|same time|second pool|two pools|mapped pool"),
    (stale_tokens_wait, "had claimed"),
    (tokens_are_forgotten, "had claimed"),
    (orphans_are_not_waited_for, "beside|same time|second pool|two pools"),
    (discards_are_forgotten, "discarded pool"),
    (unknown_zeroes_are_believed, "written before"),
    (any_size_fits, "another size"),
]


@pytest.mark.parametrize(
    ("leave_out", "caught"), RULES, ids=lambda each: getattr(each, "__name__", "")
)
def test_each_rule_is_needed(monkeypatch: pytest.MonkeyPatch, leave_out, caught: str):
    """Goal: the schedules reach what the rules are for. Method: without the rule, one of them fails
    as expected."""
    leave_out(monkeypatch)
    with pytest.raises(AssertionError, match=caught):
        run_all()


def run_all() -> None:
    for seed in range(1, 401):
        KvWorld(seed).run(STEPS)
