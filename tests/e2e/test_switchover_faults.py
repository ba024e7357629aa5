"""Every fault that can interrupt a switchover of a pod of real processes, under load.

A stopped model process holds a drain open, so that faults can be injected in the middle of a
switchover.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.pods import CLIENTS, Pod, PodHome
from tests.e2e.processes import Processes, kill
from tests.e2e.switching import (
    OK,
    REFUSED,
    TIMEOUT,
    UNREACHABLE,
    draining,
    is_held_by,
    nothing_lost,
    switch,
    until_not_waiting,
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
def test_target_killed_in_the_middle_leaves_the_lock_to_the_first_waiter(home: PodHome):
    """Goal: the lock does not wait for a dead target. Method: SIGKILL the standby's tree while the
    holder drains, then let it drain: the first engine on standby is granted the lock, and nothing
    is lost."""

    async def scenario(pod: Pod) -> None:
        async with pod.load() as load:
            async with draining(pod, load) as (before, command):
                (other,) = before.standbys
                kill(*pod.tree(other))
                await until_not_waiting(pod, other)
            code, document = await command.end()
            after = await pod.whole_after(before.token)
            came_back = after.engine == before.engine
            assert code == (REFUSED if came_back else OK)
            assert document.get("code", "") == ("lock.switchover_failed" if came_back else "")
            await load.answers()
            nothing_lost(load)

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


@pytest.mark.slow
def test_timeout_ends_only_the_wait_and_a_second_request_is_refused(
    home: PodHome,
):
    """Goal: the command's wait has a timeout, the switchover does not. Method: a drain that cannot
    finish: status shows it; another request is refused; past the deadline the command exits with
    its code, and status shows it overdue; then the drain finishes and the standby is granted the
    lock."""

    async def scenario(pod: Pod) -> None:
        async with pod.load() as load:
            async with draining(pod, load, "--timeout=8") as (before, command):
                under_way = (await pod.lock())["switchover"]
                assert (under_way["from"], under_way["to"]) == (before.engine, *before.standbys)
                assert (under_way["pid"], under_way["overdue"]) == (command.pid, False)
                code, error = await switch(pod)
                assert (code, error["code"]) == (REFUSED, "lock.switchover_busy")
                assert f"pid {command.pid}" in error["message"]
                code, error = await command.end()
                assert (code, error["code"]) == (TIMEOUT, "lock.switchover_failed")
                assert error["details"]["reason"] == "timeout"
                lock = await pod.lock()
                assert (lock["state"], lock["switchover"]["overdue"]) == ("held", True)
            after = await pod.whole_after(before.token)
            assert after.engine in before.standbys
            assert (await pod.lock())["switchover"] is None
            await load.answers()
            nothing_lost(load)

    home.run(scenario)


@pytest.mark.slow
def test_holder_exits_on_sigterm_in_the_middle_once_it_has_drained(home: PodHome):
    """Goal: a terminated holder exits and loses nothing on the way. Method: SIGTERM to a supervisor
    that drains for a switchover; its container exits and is restarted."""

    async def scenario(pod: Pod) -> None:
        async with pod.load() as load:
            async with draining(pod, load) as (before, command):
                restarts = pod.runner.restarts()[before.engine]
                os.kill(pod.pid(before.engine), signal.SIGTERM)
            code, document = await command.end()
            assert (code, document["engine"]) == (OK, *before.standbys)
            await pod.restarted(before.engine, restarts)
            after = await pod.whole_after(before.token)
            assert after.standbys == (before.engine,)
            await load.answers()
            nothing_lost(load)

    home.run(scenario)
