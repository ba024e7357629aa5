"""Every fault that can interrupt a switchover of a pod of real processes, under load.

A stopped model process holds a drain open, so that faults can be injected in the middle of a
switchover.
"""

from __future__ import annotations

import pytest

from tests.e2e.pods import CLIENTS, Pod, PodHome
from tests.e2e.processes import Processes, kill
from tests.e2e.switching import (
    REFUSED,
    UNREACHABLE,
    draining,
    is_held_by,
    nothing_lost,
    until_so,
)


@pytest.mark.slow
def test_holder_killed_in_the_middle_is_an_ordinary_failover(home: PodHome):
    """Goal: a death during a switchover is an ordinary failover. Method: SIGKILL the supervisor of
    the draining engine: the standby is granted the lock once the tree is dead, and the requester is
    told."""

    async def scenario(pod: Pod) -> None:
        async with pod.load() as load:
            async with draining(pod, load) as (before, command):
                with Processes(pod.tree(before.engine)) as old:
                    async with pod.grants(old) as grants:
                        kill(pod.pid(before.engine))
                        code, error = await command.end()
                    assert [each.alive for each in grants.made] == [frozenset()]
            assert (code, error["code"]) == (REFUSED, "lock.switchover_failed")
            assert (
                f"{before.engine} ended before it handed the active lock over" in error["message"]
            )
            after = await pod.whole_after(before.token)
            assert after.engine in before.standbys
            await load.answers()
            assert not load.refused()
            assert len(load.lost()) <= CLIENTS

    home.run(scenario)


@pytest.mark.slow
def test_lock_server_killed_in_the_middle_forgets_it_and_the_holder_hands_over(home: PodHome):
    """Goal: a restart forgets the switchover, and loses nothing. Method: SIGKILL the lock server
    while the holder drains: the command reports that the outcome is unknown, and the standby is
    granted the lock."""

    async def scenario(pod: Pod) -> None:
        async with pod.load() as load:
            restarts = pod.runner.restarts()["lockserver"]
            async with draining(pod, load) as (before, command):
                kill(pod.pid("lockserver"))
                code, error = await command.end()
                assert (code, error["code"]) == (UNREACHABLE, "lock.switchover_forgotten")
                await pod.restarted("lockserver", restarts)
                await until_so(lambda: is_held_by(pod, before.engine), "the holder to be heard")
                assert (await pod.lock())["switchover"] is None
            after = await pod.whole_after(before.token)
            assert after.engine in before.standbys
            await load.answers()
            nothing_lost(load)

    home.run(scenario)
