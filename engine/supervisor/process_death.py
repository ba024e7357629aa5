"""The end of one process of a backend, as its supervisor saw it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessDeath:
    """A process that must live has ended. `status` is its wait status where it was our child."""

    pid: int
    name: str
    status: int | None

    @property
    def signal(self) -> int | None:
        status = self.status
        return os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None

    @property
    def exit_code(self) -> int | None:
        status = self.status
        return os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None

    def describe(self) -> str:
        """`http (pid 12) was killed by SIGKILL`."""
        how = "has ended"
        if self.signal is not None:
            how = f"was killed by {signal.Signals(self.signal).name}"
        elif self.exit_code is not None:
            how = f"exited with code {self.exit_code}"
        return f"{self.name} (pid {self.pid}) {how}"
