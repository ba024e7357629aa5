"""Busy loops beside a drilled pod.

The loops run at the pod's own priority. Each dies with the drill, however that ends
(PR_SET_PDEATHSIG), and has a session of its own: where the kernel shares CPUs out by session
(sched_autogroup), loops that shared one would count as a single program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from plumbing.errors import UnderstudyError
from plumbing.service.process import parent_environment
from understudy.drill.schema import DrillBurn

LOOP = """
from plumbing.service.process import arm_from_environment
arm_from_environment()
while True:
    pass
"""
END_S = 10.0  # SIGKILL to a process without memory to free


class Burn:
    """`per_core` busy loops for each CPU of this process, from `start` to `stop`."""

    def __init__(self, per_core: int) -> None:
        self.use = DrillBurn(per_core, len(os.sched_getaffinity(0)), 0, 0.0, 0)
        self._loops: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Call it on the main thread: a loop dies with the thread that started it.

        Raises:
            UnderstudyError: `drill.cannot_burn`.
        """
        command = [sys.executable, "-c", LOOP]
        environ = {**os.environ, **parent_environment()}
        try:
            while len(self._loops) < self.use.per_core * self.use.cpus:
                loop = subprocess.Popen(
                    command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True
                )
                self._loops.append(loop)
        except OSError as error:
            self.stop()
            raise UnderstudyError(
                "drill.cannot_burn", f"cannot start a busy loop: {error.strerror}; lower --burn"
            ) from error
        self.use.processes = len(self._loops)

    def stop(self) -> None:
        """Kill the loops, and note what they used; those that ended by themselves are counted."""
        self.use.ended += sum(loop.poll() is not None for loop in self._loops)
        for loop in self._loops:
            loop.send_signal(signal.SIGKILL)  # not to a pid that was reaped: Popen knows
        end = time.monotonic() + END_S
        before = _children_cpu_s()
        for loop in self._loops:
            with contextlib.suppress(subprocess.TimeoutExpired):
                loop.wait(max(0.0, end - time.monotonic()))
        self.use.cpu_s = round(self.use.cpu_s + _children_cpu_s() - before, 3)
        self._loops.clear()


def _children_cpu_s() -> float:
    """CPU time of all children that were waited for."""
    times = os.times()
    return times.children_user + times.children_system
