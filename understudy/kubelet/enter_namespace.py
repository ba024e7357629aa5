"""The process between the runner and a container with a PID namespace of its own.

    python -I -S enter_namespace.py RUNNER_PID COMMAND…

Creates the namespace, starts the command in it as pid 1, waits, and exits as the command did. If
the runner dies, this process and the command die too, even before PDEATHSIG is set. `unshare` of
util-linux does not check for that, and 2.38 does not report a death by signal. It lives as long as
the container, so it imports nothing of ours and little else.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import NoReturn

CLONE_NEWNS, CLONE_NEWPID = 0x0002_0000, 0x2000_0000  # linux/sched.h
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8  # linux/mount.h
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
PR_SET_PDEATHSIG = 1  # linux/prctl.h
NOT_FOUND = 127  # the shell's code for a command that cannot be run
NOT_POSSIBLE = 126

libc = ctypes.CDLL(None, use_errno=True)


def main(runner: int, command: list[str]) -> NoReturn:
    """Run `command` for the runner with the pid `runner`."""
    _die_with_parent()
    if os.getppid() != runner:
        os._exit(NOT_POSSIBLE)  # the runner died before PDEATHSIG was set
    _call("unshare", libc.unshare(CLONE_NEWNS | CLONE_NEWPID))
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        _become_first(read_end, command)
    os.close(read_end)
    _, status = os.waitpid(pid, 0)
    _end_as(status)


def _become_first(parent_pipe: int, command: list[str]) -> NoReturn:
    """Inside the namespace: become the command. `parent_pipe` ends when our parent dies, whose
    pid means nothing here."""
    _die_with_parent()
    os.set_blocking(parent_pipe, False)
    try:
        os.read(parent_pipe, 1)
        os._exit(NOT_POSSIBLE)
    except BlockingIOError:
        pass
    # Private mounts first, or the machine would lose its /proc.
    _call("mount /", libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    _call("mount /proc", libc.mount(b"proc", b"/proc", b"proc", flags, None))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python; exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: {command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        os._exit(NOT_FOUND)


def _end_as(status: int) -> NoReturn:
    """Exit with the code, or die by the signal, of another process."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its own core
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _die_with_parent() -> None:
    _call("prctl", libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0))


def _call(what: str, result: int) -> None:
    if result != 0:
        print(f"error: {what}: {os.strerror(ctypes.get_errno())}", file=sys.stderr, flush=True)
        os._exit(NOT_POSSIBLE)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
