"""The owner of KV memory under random schedules: no two engines in it, no two pools, nobody stale.

Method: `kv_world`, from one seed each, which a failure prints; then the rules of the machine left
out one by one, which the same schedules must catch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gms.core import events as ev
from gms.core.kv import KvMachine, Pool
from gms.core.region import RegionPhase
from plumbing.errors import UnderstudyError
from tests.sim.kit import replayable, seeds
from tests.sim.kv_world import KvWorld

STEPS = 300


def test_no_schedule_lends_memory_to_two_engines_or_makes_it_twice():
    """Goal: one incarnation in the memory, one pool, the newest token, fresh means zero, discarded
    is never lent, and in the end the next engine gets it."""
    worlds = []
    for seed in seeds(400):
        world = KvWorld(seed)
        worlds.append(world)
        with replayable(seed, lambda world=world: world.trace):
            world.run(STEPS)
    # Else the schedules prove nothing.
    assert sum(each.takeovers for each in worlds) > 20
    assert sum(each.lent for each in worlds) > 400
    assert sum(each.handed_over for each in worlds) > 20
    assert sum(each.freed for each in worlds) > 5
    assert sum(each.dropped for each in worlds) > 5


def no_look_at_the_file(patch: pytest.MonkeyPatch) -> None:
    """The end of the last session counts as the end of its process."""
    judge = KvMachine._judge

    def judged(self, session):
        for pool in self.regions.values():
            pool.is_free = not self.is_held(pool)
        judge(self, session)

    patch.setattr(KvMachine, "_judge", judged)


def no_look_at_the_sessions(patch: pytest.MonkeyPatch) -> None:
    """A free file counts, although a session was granted the pool and has not locked it yet."""
    patch.setattr(KvMachine, "holders", lambda self, region: [])


def stale_tokens_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvMachine, "stale", lambda self, who: None)


def tokens_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    init = KvMachine.__init__

    def without(self, *, newest=(), **more):
        init(self, **more)

    patch.setattr(KvMachine, "__init__", without)


def orphans_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    init = KvMachine.__init__

    def without(self, *, orphans=None, **more):
        init(self, **more)

    patch.setattr(KvMachine, "__init__", without)


def discards_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """One that a server was told and the survivors do not repeat."""
    patch.setattr(KvWorld, "is_marking", False)


def unknown_zeroes_are_believed(patch: pytest.MonkeyPatch) -> None:
    """Memory that came back without a mark counts as never written."""
    recovered = KvMachine._recovered

    def back(self, pool, offer, tensors):
        pool.has_begun, pool.is_certain = pool.is_certain, True
        recovered(self, pool, offer, tensors)

    patch.setattr(KvMachine, "_recovered", back)


def any_size_fits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pool, "fits", lambda self, claim: True)


def stale_tokens_free(patch: pytest.MonkeyPatch) -> None:
    """Whoever was lent the pool may give it up."""
    give_up = KvMachine._give_up

    def given_up(self, event, message):
        with pytest.MonkeyPatch.context() as unchecked:
            unchecked.setattr(KvMachine, "_check_token", lambda self, who: None)
            give_up(self, event, message)

    patch.setattr(KvMachine, "_give_up", given_up)


def given_up_is_free(patch: pytest.MonkeyPatch) -> None:
    """The word of one process is taken for that of its engine."""
    give_up = KvMachine.give_up

    def given_up(self, pool, by):
        was = pool.phase
        give_up(self, pool, by)
        if pool.phase is not was:
            pool.turn("free")
            self.do(ev.Release(pool.id))

    patch.setattr(KvMachine, "give_up", given_up)


def given_up_is_kept(patch: pytest.MonkeyPatch) -> None:
    """The next engine is lent what was to be freed."""
    patch.setattr(KvMachine, "give_up", lambda self, pool, by: None)


def drops_are_not_judged(patch: pytest.MonkeyPatch) -> None:
    """An operator's word counts, whoever has the memory."""

    def drop(self, event):
        pool = self.current
        if pool is None or pool.phase is not RegionPhase.SERVED:
            raise UnderstudyError("gms.no_kv_pool", "there is none")
        self.discard(pool, "an operator dropped it")

    patch.setattr(KvMachine, "_drop", drop)


RULES: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (no_look_at_the_file, "beside|same time"),
    (no_look_at_the_sessions, "beside|same time|second pool|two pools|mapped pool"),
    (stale_tokens_wait, "had claimed"),
    (tokens_are_forgotten, "had claimed"),
    (orphans_are_not_waited_for, "beside|same time|second pool|two pools"),
    (discards_are_forgotten, "discarded pool"),
    (unknown_zeroes_are_believed, "written before"),
    (any_size_fits, "another size"),
    (stale_tokens_free, "freed what"),
    (given_up_is_free, "mapped pool"),
    (given_up_is_kept, "discarded pool"),
    (drops_are_not_judged, "was dropped that"),
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
