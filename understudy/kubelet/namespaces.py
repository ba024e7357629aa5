"""A PID namespace for each container, where this machine lets us make one.

Owns the command that makes one and how to reach what runs in it. What the runner starts then is
`enter_namespace.py`, which waits outside; the container's own process is its only child, pid 1 in
there. Signals go to that child, by pidfd: it is not ours to reap, and its number may be somebody
else's by the time the signal is sent. And it owns what being pid 1 asks of ourselves, where the
runner is that: reaping orphans.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Collection
from pathlib import Path

from plumbing.errors import UsageError
from plumbing.service.procfs import children, is_alive, parent
from understudy.kubelet import enter_namespace

# Isolated and without site-packages: it needs neither, and starts in half the time.
MAKE = (sys.executable, "-I", "-S", str(Path(enter_namespace.__file__)))

TRY_DEADLINE_S = 10.0  # it takes milliseconds


def inside(command: tuple[str, ...]) -> tuple[str, ...]:
    """`command` as the first process of a PID namespace."""
    return (*MAKE, str(os.getpid()), *command)


async def wanted(choice: str) -> bool:
    """Whether containers get namespaces, by `yes`, `no` or `auto`: where it is possible.

    Raises:
        UsageError: `pod.no_pid_namespaces`, they were asked for and cannot be had.
    """
    if choice == "no":
        return False
    problem = await _problem()
    if problem and choice == "yes":
        raise UsageError(
            "pod.no_pid_namespaces",
            f"this machine lets us make no PID namespace: {problem}; run as root, or leave out "
            "--pid-namespaces yes",
        )
    return problem is None


def first_process(waiting: int) -> int | None:
    """The container's process, a child of the one that waits outside; None: there is none."""
    return next(iter(children(waiting)), None)


def signal_first(waiting: int, number: int) -> None:
    """Send a signal to the container's process under the one that waits outside, which is the
    caller's and not reaped. Where there is none yet, or any more, that one ends."""
    pid = first_process(waiting)
    if pid is None:
        os.kill(waiting, signal.SIGKILL)
        return
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if parent(pid) == waiting:  # else it ended, and the number is somebody else's
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def is_heeded(pid: int, number: int) -> bool:
    """Whether a signal to the first process of a namespace would reach it: the kernel drops what it
    has neither a handler for nor blocked. One that is gone is to be told nothing more."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            masks = dict(line.split(":", 1) for line in file)
    except OSError:
        return True
    return any(int(masks[name], 16) >> (number - 1) & 1 for name in ("SigCgt", "SigBlk"))


def reap_zombies(exclude: Collection[int | None]) -> None:
    """Reap the children of this process that have ended, but for those somebody waits for."""
    for pid in children(os.getpid()):
        if pid not in exclude and not is_alive(pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


async def _problem() -> str | None:
    """Why no namespace can be made here; None if one was."""
    try:
        process = await asyncio.create_subprocess_exec(
            *inside(("true",)), stdin=DEVNULL, stdout=DEVNULL, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return f"{MAKE[0]}: {error.strerror}"
    try:
        async with asyncio.timeout(TRY_DEADLINE_S):
            _, said = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"trying did not end within {TRY_DEADLINE_S:g} s"
    if process.returncode == 0:
        return None
    why = said.decode(errors="replace").strip().removeprefix("error: ")
    return why or f"trying ended with {process.returncode}"
