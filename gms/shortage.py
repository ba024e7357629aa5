"""Shortages of a memory server: found in an error's causes, reported to whoever asked, and retried
by the supervisor if the server could not start."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from plumbing.errors import UnderstudyError, explain_shortage, is_disk_fault
from plumbing.pod.supervision import SHORTAGE_EXIT_CODE, SHORTAGES

# What a server opens until it serves (14), and a first writer. With less, libuv aborts the process
# and uvloop raises what nobody can read, so the room is checked before.
FDS_TO_START = 24
FDS_OF_PLACE = 8  # sockets, their locks, the journal, the supervisor's connections
CAUSES_MAX = 8  # that are looked at: an error may even be its own cause
NO_THREAD = "can't start new thread"  # Python's RuntimeError, which has no errno


class StartShortageError(UnderstudyError):
    """A server could not start for lack of something; its supervisor tries again."""

    exit_code = SHORTAGE_EXIT_CODE


def shortage_in(error: BaseException | None) -> int | None:
    """The errno of the shortage that caused `error`; None if it has another cause."""
    for _ in range(CAUSES_MAX):
        if error is None:
            break
        # EAGAIN has many meanings; that of a lock which another process has is the common one.
        if isinstance(error, OSError) and error.errno in SHORTAGES - {errno.EAGAIN}:
            return error.errno
        if isinstance(error, MemoryError):
            return errno.ENOMEM
        if isinstance(error, RuntimeError) and str(error) == NO_THREAD:
            return errno.EAGAIN
        error = error.__cause__
    return None


def exhausted(error: UnderstudyError) -> UnderstudyError:
    """`error` as `gms.server_exhausted`, if a shortage in this server caused it. A device that is
    full is not one: its memory is what the service is about."""
    number = shortage_in(error.__cause__)
    if number is None or error.code == "gms.device_full":
        return error
    why = explain_shortage(number, "the memory service")
    return UnderstudyError("gms.server_exhausted", f"{why}. It failed at: {error.message}")


def check_room(fds: int) -> None:
    """Check that this process may open that many more descriptors.

    Raises:
        OSError: it may not.
    """
    with contextlib.ExitStack() as stack:
        for _ in range(fds):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def open_fds() -> int:
    """The number of open descriptors; the limit, if none is left to look with."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # less the listing's own
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@contextlib.contextmanager
def reported_at_start() -> Iterator[None]:
    """Within this block, any error that a shortage or a disk caused becomes a
    `StartShortageError`."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError, UnderstudyError) as error:
        number = shortage_in(error)
        if number is None and not is_disk_fault(error):
            raise
        why = getattr(error, "message", str(error)) if number is None else explain_shortage(number)
        raise StartShortageError(
            "gms.server_exhausted", f"this server cannot start: {why}"
        ) from error
