"""A pod below its inits: stopped programs cost no container, and standstill costs nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from plumbing.service.procfs import parent
from tests.e2e.pods import Load, Pod, home_with, in_pod
from tests.e2e.processes import Processes
from tests.freezer import Throttle, freezer_of
from tests.helpers import auntil

STANDSTILL_S = 8.0
THROTTLED_S = 15.0
SHARE = 0.05
home = home_with(has_inits=True)


def init_of(pod: Pod, name: str) -> int:
    first = parent(pod.pid(name))
    assert first is not None
    return first


@contextmanager
def inits_live(pod: Pod) -> Iterator[None]:
    """No container restarts: every init of the pod lives on."""
    inits = [init_of(pod, name) for name in pod.runner.pids()]
    with Processes(inits) as held:
        yield
        assert held.alive() == set(inits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lockserver", "gms", "gateway", "active", "standby"])
@in_pod
async def test_stopped_program_is_replaced_in_its_container(pod: Pod, name: str):
    """Goal: the watchdog of each program works. Method: SIGSTOP under load."""
    before = await pod.whole()
    engines = {"active": before.engine, "standby": before.standbys[0]}
    stopped = engines.get(name, name)
    with inits_live(pod):
        async with pod.load() as load:
            await load.answers()
            pid = pod.pid(stopped)
            os.kill(pid, signal.SIGSTOP)
            await auntil(lambda: pod.runner.pids().get(stopped, pid) != pid, "its next life")
            await pod.whole()
            await load.answers()
            assert not load.refused()


async def nothing_was_lost(pod: Pod, load: Load, token: int, old: Processes, pids: set[int]):
    await load.answers()
    load.lost_nothing(token)
    assert old.alive() == pids


@pytest.mark.slow
@in_pod
async def test_pod_that_is_frozen_for_eight_seconds_loses_nothing(pod: Pod):
    """Goal: silence of a whole pod is nobody's hang. Method: the freezer's cgroup around all of its
    processes, inits too, under load."""
    before, everybody = await pod.whole(), all_processes(pod)
    with Processes(everybody) as old, freezer_of(everybody) as freezer:
        async with pod.load() as load:
            await load.answers()
            freezer.freeze()
            await asyncio.sleep(STANDSTILL_S)  # what is tested is that time passes
            freezer.thaw()
            await nothing_was_lost(pod, load, before.token, old, everybody)


@pytest.mark.slow
@in_pod
async def test_pod_that_is_throttled_loses_nothing(pod: Pod):
    """Goal: a pod that gets a twentieth of a CPU is slow, and restarts nobody. Method: a cgroup's
    quota for all of its processes, under load."""
    before, everybody = await pod.whole(), all_processes(pod)
    with Processes(everybody) as old, ExitStack() as undo:
        throttle = Throttle(everybody)
        undo.callback(throttle.close)
        async with pod.load() as load:
            await load.answers()
            throttle.set(SHARE)
            await asyncio.sleep(THROTTLED_S)  # what is tested is that time passes
            throttle.set(1.0)
            await nothing_was_lost(pod, load, before.token, old, everybody)


def all_processes(pod: Pod) -> set[int]:
    return {*pod.processes(), *(init_of(pod, name) for name in pod.runner.pids())}
