"""How long a server has owed an answer, not counting the time in which it could not run.

Pure. On a busy machine a healthy server answers late: it waits for a CPU, and so may the process
that listens for its answer. Killing it would not help, so neither counts as silence. A server that
is stopped, blocked or in an endless loop could run and does not answer: that is a hang.
"""

from __future__ import annotations

from msgspec import Struct

# Between two looks: if more has passed, we were the ones who could not run or listen.
LOOK_MS_MAX = 2_000.0


class CpuTimes(Struct, frozen=True):
    """What the kernel has counted for a thread so far."""

    is_runnable: bool  # runs, or waits for a CPU
    ran_ms: float
    waited_ms: float  # for a CPU


class Silence:
    """Counts `ms`; `answered` starts anew."""

    def __init__(self) -> None:
        self.ms = 0.0
        self._last: CpuTimes | None = None

    def answered(self) -> None:
        self.ms = 0.0

    def look(self, elapsed_ms: float, cpu: CpuTimes | None) -> None:
        """`elapsed_ms` have passed since the last look; `cpu` is the server's, None if unknown."""
        last, self._last = self._last, cpu
        could_not_run_ms = 0.0
        if last is not None and cpu is not None:
            could_not_run_ms = cpu.waited_ms - last.waited_ms
            if cpu.is_runnable and cpu.ran_ms == last.ran_ms:
                could_not_run_ms = elapsed_ms  # a wait is only counted when it ends
        self.ms += max(0.0, min(elapsed_ms, LOOK_MS_MAX) - could_not_run_ms)
