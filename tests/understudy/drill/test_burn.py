"""Busy loops beside a pod: real processes, which end with the drill in every case."""

from __future__ import annotations

import os
import subprocess
import sys

from plumbing.service import procfs
from tests.helpers import until

CPUS = len(os.sched_getaffinity(0))


def test_loops_end_with_a_drill_that_is_killed():
    """Goal: other work, as important as the pod's, that never burns on. Method: SIGKILL to a
    process that has started loops."""
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
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, loop) for loop in burning} == {ours}
    drill.kill()
    drill.wait()
    for loop in burning:
        until(lambda pid=loop: not procfs.is_alive(pid), "a loop to end with its drill")
