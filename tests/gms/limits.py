"""Taking the room for descriptors away from a process, and giving it back."""

from __future__ import annotations

import contextlib
import itertools
import resource
from collections.abc import Iterator

from tests.helpers import open_fds

STANDARD_FDS = 3


@contextlib.contextmanager
def at_limit(pid: int) -> Iterator[None]:
    """Process `pid` may open nothing: every number that is free is beyond its limit."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (STANDARD_FDS, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process may open `count` more, and not one beyond."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = open_fds()
    free = (number for number in itertools.count() if number not in used)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (next(itertools.islice(free, count, None)), limits[1])
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
