"""What our processes ask of the kernel at start: to die with their parent, and enough descriptors.

PR_SET_PDEATHSIG is sent when the *thread* that created this process ends, not the process
(prctl(2)), so children are started from a thread that lives as long as its process. A receiver at
its limit of descriptors gets no error: it silently loses passed descriptors (MSG_CTRUNC).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import resource
import signal

PARENT_PID_ENV = "UNDERSTUDY_PARENT_PID"

# 16 sessions attaching 250 slabs each at once, which is the most that this version plans for.
FDS_ADVISED = 4096

# What an engine's process opens: vLLM's have about 60, and a pool of KV memory brings up to 250.
FDS_EXPECTED = 512

# Doors that anybody may knock at: probes, the service address, and over TCP the lock's. Together
# they leave more than half of the descriptors for engines: to accept them, watch and lend to them.
STRANGERS_SHARE = 8

logger = logging.getLogger(__name__)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies.

    `parent_pid` is the parent's own pid: if that is no longer our parent, it died before the kernel
    was asked, and this process sends itself the signal now. Forked children do not inherit this;
    it survives exec.
    """
    _prctl("PR_SET_PDEATHSIG", 1, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Adopt every orphan below this process from now on; PID 1 does so by itself."""
    _prctl("PR_SET_CHILD_SUBREAPER", 36, 1)


def _prctl(name: str, option: int, value: int) -> None:
    """prctl(2); the numbers of options are from linux/prctl.h."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({name}): {os.strerror(number)}")


def arm_from_environment() -> bool:
    """`die_with_parent` if UNDERSTUDY_PARENT_PID asks for it; returns whether it did.

    The variable is removed from the environment: a grandchild that inherited it would believe that
    its parent is dead.
    """
    value = os.environ.pop(PARENT_PID_ENV, None)
    if value is None:
        return False
    die_with_parent(int(value))
    return True


def parent_environment() -> dict[str, str]:
    """What to add to a child's environment for its `arm_from_environment`."""
    return {PARENT_PID_ENV: str(os.getpid())}


def make_fd_room(count: int) -> None:
    """Raise RLIMIT_NOFILE by `count`, as far as allowed, for descriptors about to arrive.

    For processes that are not ours. The number of open descriptors is unknown, so the limit may be
    higher than needed; that only matters to `select`, and only beyond descriptor 1,023.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
    if soft not in (resource.RLIM_INFINITY, wanted):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def widen_fd_table(count: int = FDS_EXPECTED) -> None:
    """Make room for `count` descriptors in this process's table, best before it has threads.

    The table grows when it is full (at 64, 256, 512 … descriptors), and in a process with threads
    the kernel then waits for all CPUs to take notice: 10 to 20 ms, in a wake if they open there
    what they borrow. It never shrinks, and a child begins with a small one.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = count if soft == resource.RLIM_INFINITY else min(count, soft)
    with contextlib.suppress(OSError):  # without descriptors, or memory: it grows when it must
        placeholder = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.close(fcntl.fcntl(placeholder, fcntl.F_DUPFD_CLOEXEC, highest - 1))
        finally:
            os.close(placeholder)


def strangers_max(at_most: int) -> int:
    """How many connections one door may hold that anybody may knock at, `at_most` or fewer."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share = at_most if soft == resource.RLIM_INFINITY else soft // STRANGERS_SHARE
    return max(2, min(at_most, share))  # never 0: a probe, and a caller before it


def raise_fd_limit() -> int:
    """Raise RLIMIT_NOFILE to its hard limit and return that; warn if it is below FDS_ADVISED."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # a hard limit above fs.nr_open, seen in containers
            hard = soft
    unlimited = hard == resource.RLIM_INFINITY
    if not unlimited and hard < FDS_ADVISED:
        logger.warning(
            "this process may open %d descriptors; %d are advised: raise `ulimit -Hn` or the "
            "container's nofile limit",
            hard,
            FDS_ADVISED,
        )
    return hard
