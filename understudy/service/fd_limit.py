"""The limit on open descriptors, raised to what the machine allows at start.

A receiver at its limit does not get an error: it silently loses passed descriptors (MSG_CTRUNC).
"""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

# 16 sessions attaching 250 slabs each at once, which is the most that this version plans for.
FDS_ADVISED = 4096


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
