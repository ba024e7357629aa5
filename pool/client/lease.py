"""`understudy lease`: memory of a device for a neighbour, for as long as its processes live.

The neighbour's processes hold a file by flock, on two descriptors that children inherit: on 0, for
children of programs that close all others, and on one above 2, for background jobs of a shell, of
which it replaces 0. So a lease lasts as long as any of them. It costs the command its standard
input.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

from plumbing.errors import UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.pod.paths import pool_socket
from plumbing.service.clock import SystemClock
from plumbing.text import one_line
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Message
from pool.messages import CATALOGUE, LeaseGrantedMsg, LeaseMsg, LeaseWaitingMsg

RETRY_S = 0.2  # while the pool is away
PROGRAM_CHARS_MAX = 256
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells exit
FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def run_with_lease(
    directory: str,
    command: Sequence[str],
    *,
    device: str,
    size_bytes: int,
    priority: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> int:
    """Wait for the memory, run `command`, and return its exit code (128 + n for a signal n).

    Raises:
        UnderstudyError: refused, with who holds what; WaitTimeoutError: not granted in time;
        UnreachableError: there is no pool.
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
    is_granted = False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        with _granted(pool_socket(directory), asked, timeout_s, say):
            is_granted = True
            return _run(command, fd)
    finally:
        if not is_granted:
            with contextlib.suppress(OSError):
                os.unlink(path)
        os.close(fd)


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


@contextlib.contextmanager
def _granted(
    path: str, asked: LeaseMsg, timeout_s: float, say: Callable[[str], None]
) -> Iterator[None]:
    """Until the block ends, the pool knows that somebody is there; it looks at once afterwards."""
    end_s, was_there = time.monotonic() + timeout_s, False
    try:
        while True:
            try:
                with BlockingClient(path, CATALOGUE) as client:
                    was_there = True
                    client.notify(asked, request_id=1)
                    while not isinstance(answer := _next(client, end_s), LeaseGrantedMsg):
                        if isinstance(answer, LeaseWaitingMsg):
                            say(f"waiting: {answer.why}")
                    yield
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


def _next(client: BlockingClient, end_s: float) -> Message:
    return client.receive(timeout_s=max(0.0, end_s - time.monotonic())).message


def _run(command: Sequence[str], witness: int) -> int:
    """Run it to its end. Ctrl-C reaches it from the terminal; what this process gets is passed on.

    Raises:
        UnderstudyError: `pool.cannot_run`.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = subprocess.Popen(
            list(command),
            stdin=witness,
            pass_fds=(witness,),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    except OSError as error:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        failed = UnderstudyError("pool.cannot_run", f"cannot run {command[0]}: {error.strerror}")
        failed.exit_code = code
        raise failed from error
    for signum in FORWARDED:
        signal.signal(signum, lambda number, _: child.send_signal(number))
    try:
        code = child.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code
