"""Processes, descriptors and ports for tests of a whole pod: signals by pid, proofs by pidfd."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence

from gateway.server.upstream import IDLE_S
from tests.helpers import auntil, is_running, open_fds

SETTLED_AFTER = 25  # equal readings in a row
SETTLED_S = IDLE_S + 1.5  # a gateway looks once a second which of its connections are too old


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


def fd_counts(pids: Iterable[int]) -> dict[int, int]:
    return {pid: len(open_fds(pid)) for pid in pids}


async def settled_fds(pids: Sequence[int]) -> dict[int, int]:
    """How many descriptors each has, once the connections of the last requests are closed.

    A process that has something to do waits for a CPU, however long: only looks at one that sleeps
    count."""
    seen: dict[int, list[int]] = {pid: [] for pid in pids}
    changed_s = dict.fromkeys(pids, time.monotonic())

    def look(pid: int) -> bool:
        counts = seen[pid]
        if not is_running(pid):
            counts.append(len(open_fds(pid)))
            if counts[-1:] != counts[-2:-1]:
                changed_s[pid] = time.monotonic()
        latest = counts[-SETTLED_AFTER:]
        is_same = len(latest) == SETTLED_AFTER and len(set(latest)) == 1
        return is_same and time.monotonic() - changed_s[pid] > SETTLED_S

    def is_settled() -> bool:
        looks = [look(pid) for pid in pids]
        return all(looks)

    await auntil(is_settled, "the descriptors to stay the same")
    return {pid: counts[-1] for pid, counts in seen.items()}


async def same_fds(before: dict[int, int]) -> None:
    """Wait until every process of `before` has as many descriptors as it had then."""
    try:
        await auntil(lambda: fd_counts(before) == before, "the descriptors to be as before")
    except AssertionError:
        changed = {
            pid: sorted(open_fds(pid).values())
            for pid, count in fd_counts(before).items()
            if count != before[pid]
        }
        raise AssertionError(f"before {before}, and now {changed}") from None
