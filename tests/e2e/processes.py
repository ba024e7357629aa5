"""Processes for tests of a whole pod: signals by pid, proofs by pidfd."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable


class Processes:
    """Processes held by pidfds, which stay unambiguous even if pids are reused."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pidfds = {pid: os.pidfd_open(pid) for pid in pids}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)

    def signal(self, number: int) -> None:
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):  # an earlier kill ended it
                signal.pidfd_send_signal(pidfd, number)

    def alive(self) -> set[int]:
        """The pids of those that have not ended at this instant."""
        poll = select.poll()
        for pidfd in self._pidfds.values():
            poll.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, _ in poll.poll(0)}
        return {pid for pid, pidfd in self._pidfds.items() if pidfd not in ended}


def kill(*pids: int) -> None:
    """SIGKILL to each that is left: the first death may have ended the others."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def continue_all(pids: Iterable[int]) -> None:
    """SIGCONT to each that is left: a stopped process would outlive its test."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
