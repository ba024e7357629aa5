"""Dying with the parent: PR_SET_PDEATHSIG, and the check that closes its race.

The surprising thing: the signal comes when the *thread* that made this process ends, not the
process (prctl(2)). So children are started from a thread that lives as long as the process does.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PARENT_PID_ENV = "UNDERSTUDY_PARENT_PID"


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when its parent dies.

    `parent_pid` is what the parent said of itself: where it is no longer our parent, it died
    before the kernel was asked, and this process sends itself the signal now. Forked children do
    not inherit this; it stays across exec.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signum), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def arm_from_environment() -> bool:
    """`die_with_parent` if the parent asked for it in UNDERSTUDY_PARENT_PID; says whether.

    The variable is taken out of the environment: it is about this process, and a grandchild that
    inherited it would believe its parent dead.
    """
    value = os.environ.pop(PARENT_PID_ENV, None)
    if value is None:
        return False
    die_with_parent(int(value))
    return True


def environment() -> dict[str, str]:
    """What to add to a child's environment so that it arms itself."""
    return {PARENT_PID_ENV: str(os.getpid())}
