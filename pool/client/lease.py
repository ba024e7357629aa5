"""`understudy lease`: memory of a device for a neighbour, for as long as its processes live.

The neighbour's processes hold a file by flock, on two descriptors that children inherit: on 0, for
children of programs that close all others, and on one above 2, for background jobs of a shell, of
which it replaces 0. So a lease lasts as long as any of them. It costs the command its standard
input. Once the memory is booked, this process becomes the command.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from plumbing.errors import UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.pod.paths import pool_socket
from plumbing.service.clock import SystemClock
from plumbing.text import one_line, size
from plumbing.wire.blocking import BlockingClient
from pool.messages import CATALOGUE, LeaseGrantedMsg, LeaseMsg

RETRY_S = 0.2  # while the pool is away
PROGRAM_CHARS_MAX = 256
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells exit


def run_with_lease(
    directory: str,
    command: tuple[str, ...],
    *,
    device: str,
    size_bytes: int,
    priority: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> NoReturn:
    """Wait for the memory, and become `command`.

    Raises:
        UnderstudyError: refused, with who holds what; `pool.cannot_run`; WaitTimeoutError: not
            granted in time; UnreachableError: there is no pool.
    """
    lease = secrets.token_hex(8)
    path = os.path.join(directory, f"lease_{lease}")
    asked = LeaseMsg(
        lease=lease,
        device=device,
        size_bytes=size_bytes,
        since_ms=SystemClock().now_ms(),
        priority=priority,
        program=one_line(os.path.basename(command[0]))[:PROGRAM_CHARS_MAX],
    )
    fd = _create(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        say(f"waiting for {size(size_bytes)} of {device}; see `understudy pool status`")
        _wait(pool_socket(directory), asked, timeout_s, say)
        os.dup2(fd, 0)
        os.set_inheritable(fd, True)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores
        os.execvp(command[0], command)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the pool has removed it
            os.unlink(path)
        if not isinstance(error, OSError):
            raise
        why = f"cannot run {command[0]}: {error.strerror}"
        failed = UnderstudyError("pool.cannot_run", why)
        failed.exit_code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        raise failed from error


def _create(path: str) -> int:
    """
    Raises:
        UnreachableError: `pool.offline`, no pod was ever here; UnderstudyError:
            `pool.no_lease_file`, the disk is full, …
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, 0o600)
    except FileNotFoundError as error:
        why = f"no pool answers in {os.path.dirname(path)}: there is no such directory"
        raise UnreachableError("pool.offline", f"{why}; name the pod's with --dir") from error
    except OSError as error:
        why = f"cannot create {path}: {error.strerror}"
        raise UnderstudyError("pool.no_lease_file", f"{why}; free space on that disk") from error


def _wait(path: str, asked: LeaseMsg, timeout_s: float, say: Callable[[str], None]) -> None:
    """Until it is granted."""
    end_s, was_there = time.monotonic() + timeout_s, False
    while True:
        try:
            with BlockingClient(path, CATALOGUE) as client:
                was_there = True
                left_s = max(0.0, end_s - time.monotonic())
                answer = client.request(asked, timeout_s=left_s).message
                assert isinstance(answer, LeaseGrantedMsg), answer
                return
        except UnreachableError:
            if not was_there or time.monotonic() > end_s:
                raise
            say("the pool is restarting; the lease keeps its place")
            time.sleep(RETRY_S)
        except WaitTimeoutError as error:
            why = f"the pool could not free {asked.size_bytes} bytes of {asked.device} within"
            why += f" {timeout_s:g} s; see `understudy pool explain`"
            raise WaitTimeoutError("pool.lease_timeout", why) from error
