"""Busy loops beside a pod: real processes, which end with the drill in every case."""

from __future__ import annotations

import os
import subprocess
import sys

from plumbing.service import procfs
from tests.helpers import until
from understudy.drill.run import busy_loops

CPUS = len(os.sched_getaffinity(0))


def cpu_ticks(pid: int) -> int:
    """User time of `pid`."""
    with open(f"/proc/{pid}/stat") as stream:
        return int(stream.read().rpartition(")")[2].split()[11])


def test_loops_burn_each_for_itself_and_at_our_priority():
    """Goal: other work, not less important than the pod's. Method: what the kernel says."""
    before = frozenset(procfs.children(os.getpid()))
    with busy_loops(2):
        loops = {*procfs.children(os.getpid())} - before
        assert len(loops) == 2 * CPUS
        for loop in loops:
            until(lambda pid=loop: cpu_ticks(pid) > 0, "a loop to use CPU time")
            assert os.getsid(loop) == loop
            assert os.getpriority(os.PRIO_PROCESS, loop) == os.getpriority(os.PRIO_PROCESS, 0)
    assert not loops & {*procfs.children(os.getpid())}


def test_loops_end_with_a_drill_that_is_killed():
    """Goal: nothing burns on. Method: SIGKILL to a process that has started loops."""
    program = (
        "import signal\nfrom understudy.drill.run import busy_loops\n"
        "with busy_loops(1):\n    print('burning', flush=True)\n    signal.pause()"
    )
    drill = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert drill.stdout is not None
    with drill.stdout:
        assert drill.stdout.readline() == b"burning\n"
    burning = procfs.children(drill.pid)
    assert len(burning) == CPUS
    drill.kill()
    drill.wait()
    for loop in burning:
        until(lambda pid=loop: not procfs.is_alive(pid), "a loop to end with its drill")
