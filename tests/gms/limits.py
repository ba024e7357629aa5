"""Taking the room for descriptors away from a process, and giving it back."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
from collections.abc import Iterator

from tests.helpers import open_fds, steady_fds

STANDARD_FDS = 3


@contextlib.contextmanager
def at_limit(pid: int, count: int = 0) -> Iterator[None]:
    """Process `pid` may open only `count` more: every other number that is free is too high."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = _limit(pid, count) if count else STANDARD_FDS
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process may open `count` more, and not one beyond."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_limit(os.getpid(), count), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _limit(pid: int, count: int) -> int:
    """The lowest limit that leaves `count` numbers free."""
    used = open_fds(pid) if pid == os.getpid() else steady_fds(pid)
    free = (number for number in itertools.count() if number not in used)
    return next(itertools.islice(free, count, None))
