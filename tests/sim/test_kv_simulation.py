"""The owner of KV memory under random schedules: no two engines in it, no two pools, nobody stale.

Method: `kv_world`, from one seed each, which a failure prints; then the rules of the machine left
out one by one, which the same schedules must catch.
"""

from __future__ import annotations

import pytest

from gms.core import events as ev
from gms.core.kv import KvMachine, Pool
from gms.core.region import RegionPhase
from plumbing.errors import UnderstudyError
from tests.sim.kit import PlantedRule, PlantedRules, replayable, seeds
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


RULES = PlantedRules()


@RULES.instead("look at the file", "beside|same time", KvMachine, "_judge")
def no_look_at_the_file(judge, self, session):
    """The end of the last session counts as the end of its process."""
    for pool in self.regions.values():
        pool.is_free = not self.is_held(pool)
    judge(self, session)


@RULES.instead("newest tokens on disk", "had claimed", KvMachine, "__init__")
def tokens_are_forgotten(init, self, *, newest=(), **more):
    init(self, **more)


@RULES.instead("wait for orphans", "beside|same time|second pool|two pools", KvMachine, "__init__")
def orphans_are_not_waited_for(init, self, *, orphans=None, **more):
    init(self, **more)


@RULES.instead("uncertain zeroes", "written before", KvMachine, "_recovered")
def unknown_zeroes_are_believed(recovered, self, pool, offer, tensors):
    """Memory that came back without a mark counts as never written."""
    pool.has_begun, pool.is_certain = pool.is_certain, True
    recovered(self, pool, offer, tensors)


@RULES.instead("a rest needs the newest token", "freed what", KvMachine, "on_give_up")
def stale_tokens_free(give_up, self, event, message):
    """Whoever was lent the pool may give it up."""
    with pytest.MonkeyPatch.context() as unchecked:
        unchecked.setattr(KvMachine, "_check_token", lambda self, who: None)
        give_up(self, event, message)


@RULES.instead("a rest waits for every process", "mapped pool", KvMachine, "give_up")
def given_up_is_free(give_up, self, pool, by):
    """The word of one process is taken for that of its engine."""
    was = pool.phase
    give_up(self, pool, by)
    if pool.phase is not was:
        pool.turn("free")
        self.do(ev.Release(pool.id))


@RULES.instead("drops are judged", "was dropped that", KvMachine, "on_drop")
def drops_are_not_judged(_, self, event, message):
    """An operator's word counts, whoever has the memory."""
    pool = self.current
    if pool is None or pool.phase is not RegionPhase.SERVED:
        raise UnderstudyError("gms.no_kv_pool", "there is none")
    self.discard(pool, "an operator dropped it")


# A free file counts, although a session was granted the pool and has not locked it yet.
GRANTED = "beside|same time|second pool|two pools|mapped pool"
RULES.put("look at the sessions", GRANTED, KvMachine, "holders", lambda self, region: [])
RULES.put("refuse stale tokens", "had claimed", KvMachine, "stale", lambda self, who: None)
# One that a server was told and the survivors do not repeat.
RULES.put("mark what is discarded", "discarded pool", KvWorld, "is_marking", False)
RULES.put("compare sizes", "another size", Pool, "fits", lambda self, claim: True)
# The next engine is lent what was to be freed.
RULES.put("free at a rest", "discarded pool", KvMachine, "give_up", lambda self, pool, by: None)


@RULES.parametrized()
def test_each_rule_is_needed(monkeypatch: pytest.MonkeyPatch, rule: PlantedRule):
    """Goal: the schedules reach what the rules are for. Method: without the rule, one of them fails
    as expected."""
    rule.is_caught(monkeypatch, lambda seed: KvWorld(seed).run(STEPS), range(1, 401))
