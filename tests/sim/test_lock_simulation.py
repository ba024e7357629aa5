"""Random schedules of a pod around the pure lock machine; the seed is in the failure's message."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.lock_runs import SETTLED_EVERY, STEPS, run
from tests.sim.seeds import seeds

SCHEDULES = 100_000
PARTS = 5  # one after the other: a test that takes two minutes is taken for one that hangs
EVERYTHING = """
    connect hear launch join start_helper end_helper
    die die_on_the_way reap give_up see_eof receive probe scan see_exit
    replace restart kill_process kill_supervisor stop go_on stray end_stray twin cut lie
    kill_server let_die_after_write stall_server lose_slot fail_disk repair_disk wait
    run_short end_shortage look_again
    obey begin_serving hand_over hand_on probe_serving
    pretend skip fork wake_late replace_file repeat_grant kill_worker
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_lock_simulation_no_schedule_breaks_a_promise(part):
    """Goal: the promises of docs/lock.md, under deaths, stops, cuts, late and overtaking messages,
    restarts (also between write and send), a failing disk, lost state, wrong tokens, twins, strays,
    helpers without the witness, and a server that can look at no witness. Every fifth pod hands
    over in place, with late orders, false words, forks, processes that never join, and serving
    files that are replaced.
    Method: the law is checked after every step; every 50th schedule goes on without faults until
    an engine serves."""
    every = seeds(SCHEDULES)
    runs = every[len(every) * part // PARTS : len(every) * (part + 1) // PARTS]
    grants, happened = 0, Counter[str]()
    for seed in runs:
        world = run(seed, is_settled=seed % SETTLED_EVERY == 0)
        assert len(world.trace) >= STEPS
        grants += len(world.law.sent)
        if seed % 37 == 0:  # counting all of them would cost more than running them
            happened.update(line.partition(" ")[0] for line in world.story())
    if len(every) >= SCHEDULES:
        assert grants > len(runs)  # the schedules did something
        assert all(happened[kind] for kind in EVERYTHING.split()), happened
