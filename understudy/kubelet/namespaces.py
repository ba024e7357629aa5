"""A PID namespace for each container, where this machine allows it.

The runner then starts `enter_namespace.py`, which waits outside; its only child is the container's
process, pid 1 inside. Signals go to that child by pidfd: it is not ours to reap, so its pid could
be recycled. Where the runner itself is pid 1, this module also reaps orphans.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

from plumbing.errors import UsageError
from plumbing.service.procfs import children, is_alive, parent
from understudy.host import output_of
from understudy.kubelet import enter_namespace

# Isolated and without site-packages: it starts in half the time.
MAKE = (sys.executable, "-I", "-S", str(Path(enter_namespace.__file__)))

TRY_DEADLINE_S = 10.0  # it takes milliseconds


def inside(command: tuple[str, ...]) -> tuple[str, ...]:
    """`command` as the first process of a PID namespace."""
    return (*MAKE, str(os.getpid()), *command)


async def wanted(choice: str) -> bool:
    """Whether containers get namespaces: `yes`, `no`, or `auto` where possible.

    Raises:
        UsageError: `pod.no_pid_namespaces`, they are required and not possible.
    """
    if choice == "no":
        return False
    problem = await _problem()
    if problem and choice == "yes":
        raise UsageError(
            "pod.no_pid_namespaces",
            f"cannot create a PID namespace: {problem}; run as root, or leave out "
            "--pid-namespaces yes",
        )
    return problem is None


def first_process(waiting: int) -> int | None:
    """The container's process, a child of the process `waiting` outside, if it exists."""
    return next(iter(children(waiting)), None)


def signal_first(waiting: int, number: int) -> None:
    """Signal the container's process under `waiting`, an unreaped child of the caller. If there is
    no such process, not yet or no longer, kill `waiting`."""
    pid = first_process(waiting)
    if pid is None:
        os.kill(waiting, signal.SIGKILL)
        return
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if parent(pid) == waiting:  # else it exited and its pid was recycled
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def accepts_signal(pid: int, number: int) -> bool:
    """Whether a signal to the first process of a namespace would reach it: the kernel drops signals
    that it neither handles nor blocks. True if it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            masks = dict(line.split(":", 1) for line in file)
    except OSError:
        return True
    return any(int(masks[name], 16) >> (number - 1) & 1 for name in ("SigCgt", "SigBlk"))


def reap_zombies(exclude: Collection[int | None]) -> None:
    """Reap the exited children of this process, except those in `exclude`."""
    for pid in children(os.getpid()):
        if pid not in exclude and not is_alive(pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


async def _problem() -> str | None:
    """Why no namespace can be created here; None if one can."""
    try:
        code, _, errors = await output_of(*inside(("true",)), timeout_s=TRY_DEADLINE_S)
    except TimeoutError:
        return f"the attempt timed out after {TRY_DEADLINE_S:g} s"
    except OSError as error:
        return f"{MAKE[0]}: {error.strerror}"
    if code == 0:
        return None
    return errors.strip().removeprefix("error: ") or f"the attempt exited with code {code}"
