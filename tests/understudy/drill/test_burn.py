"""Busy loops beside a pod: real processes, which end with the drill in every case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from plumbing.service import procfs
from tests.helpers import until
from understudy.drill.machine import Burn

CPUS = len(os.sched_getaffinity(0))


@pytest.fixture
def loops():
    """The loops of this process: its children, without those of earlier tests."""
    before = frozenset(procfs.children(os.getpid()))
    return lambda: [pid for pid in procfs.children(os.getpid()) if pid not in before]


def cpu_ticks(pid: int) -> int:
    """User time of `pid`."""
    with open(f"/proc/{pid}/stat") as stream:
        return int(stream.read().rpartition(")")[2].split()[11])


def test_loops_burn_each_for_itself_and_at_our_priority(loops):
    """Goal: other work, not less important than the pod's. Method: what the kernel says; one that
    is killed is counted, so that a machine that was not busy is not taken for a busy one."""
    burn = Burn(2)
    burn.start()
    try:
        assert len(loops()) == burn.use.processes == 2 * CPUS
        for loop in loops():
            until(lambda pid=loop: cpu_ticks(pid) > 0, "a loop to use CPU time")
            assert os.getsid(loop) == loop
            assert os.getpriority(os.PRIO_PROCESS, loop) == os.getpriority(os.PRIO_PROCESS, 0)
            assert os.sched_getscheduler(loop) == os.sched_getscheduler(0)
        os.kill(loop, signal.SIGKILL)
        until(lambda: not procfs.is_alive(loop), "the loop to end")
    finally:
        burn.stop()
    assert loops() == []
    assert burn.use.cpu_s > 0
    assert burn.use.ended == 1


def test_loops_end_with_a_drill_that_is_killed():
    """Goal: nothing burns on. Method: SIGKILL to a process that has started loops."""
    program = (
        "import signal\nfrom understudy.drill.machine import Burn\n"
        "burn = Burn(2)\nburn.start()\nprint('burning', flush=True)\nsignal.pause()"
    )
    drill = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert drill.stdout is not None
    with drill.stdout:
        assert drill.stdout.readline() == b"burning\n"
    burning = procfs.children(drill.pid)
    assert len(burning) == 2 * CPUS
    drill.kill()
    drill.wait()
    for loop in burning:
        until(lambda pid=loop: not procfs.is_alive(pid), "a loop to end with its drill")
