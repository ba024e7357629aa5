"""The limit on open descriptors, raised to what the machine allows at start.

A receiver at its limit does not get an error: it silently loses passed descriptors (MSG_CTRUNC).
"""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

# 16 sessions attaching 250 slabs each at once, which is the most that this version plans for.
FDS_ADVISED = 4096


def make_fd_room(count: int) -> None:
    """Raise RLIMIT_NOFILE by `count`, as far as is allowed: in a process that is not ours, for
    descriptors that are about to arrive. There is no telling how many are open, so it may be more
    than needed; `select` alone minds, and only for descriptors beyond 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
    if soft not in (resource.RLIM_INFINITY, wanted):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def raise_fd_limit(advised: int = FDS_ADVISED) -> int:
    """Raise RLIMIT_NOFILE to its hard limit and return it; says so where that is short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # a hard limit above fs.nr_open, seen in containers
            hard = soft
    unlimited = hard == resource.RLIM_INFINITY
    if not unlimited and hard < advised:
        logger.warning(
            "this process may open %d descriptors; %d are advised: raise `ulimit -Hn` or the "
            "container's nofile limit",
            hard,
            advised,
        )
    return hard
