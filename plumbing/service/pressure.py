"""CPU pressure: the share of time in which a process that could run had to wait for a CPU.

Read from the kernel's pressure stall information (Documentation/accounting/psi.rst): that of this
process's own control group where there is one, which sees its CPU limit too, otherwise the
machine's. Where there is neither, the pressure is None. Never raises, and never blocks: the file is
kept open, so a process without descriptors can read it, too.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Sequence

CGROUP_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")  # the second: beside version 1
MACHINE = "/proc/pressure/cpu"
FILE_BYTES_MAX = 4096

# The pressure is the larger one of these two: the short one sees at once that a machine has become
# busy, and the long one remembers it for longer than any budget that it stretches.
WINDOWS_MS = (2_000.0, 10_000.0)
SAMPLE_MS = 200.0  # between two samples at least, which limits how many are kept

_TOTAL = re.compile(rb"^some .*\btotal=(\d+)", re.MULTILINE)


class CpuPressure:
    """The pressure of the last seconds, from samples that the owner takes."""

    def __init__(self, paths: Sequence[str] | None = None) -> None:
        """`paths`: candidates, the best one first."""
        self.path: str | None = None
        self.share: float | None = None  # 0 to 1; None: unknown
        self._fd = -1
        self._samples: deque[tuple[float, int]] = deque()
        for path in candidates() if paths is None else paths:
            if self._open(path):
                break

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def sample(self, now_ms: float) -> float | None:
        """Read the file, unless that was a moment ago; the pressure."""
        samples = self._samples
        if self._fd < 0 or (samples and now_ms - samples[-1][0] < SAMPLE_MS):
            return self.share
        total_us = self._read()
        if total_us is None or (samples and total_us < samples[-1][1]):
            samples.clear()  # unreadable, or a counter that began again
            self.share = None
        if total_us is not None:
            samples.append((now_ms, total_us))
            while len(samples) > 2 and samples[1][0] <= now_ms - max(WINDOWS_MS):
                samples.popleft()
            if len(samples) > 1:
                self.share = max(self._over(window_ms) for window_ms in WINDOWS_MS)
        return self.share

    def _over(self, window_ms: float) -> float:
        now_ms, total_us = self._samples[-1]
        before = [each for each in self._samples if each[0] <= now_ms - window_ms]
        first_ms, first_us = before[-1] if before else self._samples[0]
        return min(1.0, (total_us - first_us) / 1000 / (now_ms - first_ms))

    def _open(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if self._read() is not None:
                self.path = path
                return True
        self.close()
        return False

    def _read(self) -> int | None:
        try:
            found = _TOTAL.search(os.pread(self._fd, FILE_BYTES_MAX, 0))
        except OSError:  # the kernel was started without it (psi=0), or the control group is gone
            return None
        return int(found[1]) if found else None


def candidates(membership: str = "/proc/self/cgroup") -> list[str]:
    """Where this process's pressure may be found, the best place first."""
    own: list[str] = []
    with contextlib.suppress(OSError, UnicodeDecodeError), open(membership) as lines:
        paths = [line.rstrip("\n")[3:] for line in lines if line.startswith("0::/")]
        own = [f"{root}{path}/cpu.pressure" for path in paths for root in CGROUP_ROOTS]
    return [*(os.path.normpath(path) for path in own), MACHINE]
