"""The file of an epoch: whoever maps the epoch holds a shared flock on it from before it maps.

So whether anybody maps an epoch is asked of the kernel, not of sessions. The server opens the file
itself for every question: a flock tried through a descriptor that came from the holder would
convert the holder's own lock. It unlinks the file while it holds it exclusively, so a process that
locks late finds that its file has no name any more and must not map.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os

from plumbing.errors import UnderstudyError
from plumbing.wire.fds import OwnedFd


def create(path: str) -> None:
    """Make the file of a new epoch.

    Raises:
        OSError: no room, no permission.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def join(path: str, placeholder: OwnedFd | None = None) -> OwnedFd:
    """Hold the epoch: a descriptor with a shared flock, to be kept for as long as it is mapped.

    A dying process lets go of its highest descriptors first, so the flock should be below the
    memory's: `placeholder` (taken) is a descriptor that was opened before those came, and the
    answer has its number.

    Raises:
        UnderstudyError: `gms.stale_epoch`, the server has given this epoch up already.
    """
    try:
        held = OwnedFd(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        if placeholder is not None:
            placeholder.close()
        raise _stale(path) from None
    fcntl.flock(held.fileno(), fcntl.LOCK_SH)  # waits at most for one try of the server
    if placeholder is not None:
        with held:
            number = placeholder.detach()
            os.dup2(held.fileno(), number, inheritable=False)
        held = OwnedFd(number)
    if os.fstat(held.fileno()).st_nlink == 0:
        held.close()
        raise _stale(path)
    return held


def mark_history(path: str) -> None:
    """Say on disk that this epoch is out of service: a journal that is lost, or that could not be
    written, must not bring it back. By its length, which takes no room; a file that is gone needs
    no mark.

    Raises:
        OSError: it cannot be marked.
    """
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, 1)


def is_history(path: str) -> bool:
    """Whether the epoch was taken out of service."""
    try:
        return os.stat(path).st_size > 0
    except FileNotFoundError:
        return False


def is_held(path: str) -> bool:
    """Whether any process holds the epoch; a file that is gone is held by nobody."""
    with contextlib.ExitStack() as stack:
        fd = _try_lock(path, stack)
        return fd is not None and fd < 0


def remove_if_free(path: str) -> bool:
    """Unlink the file if nobody holds the epoch; whether it is gone now."""
    with contextlib.ExitStack() as stack:
        fd = _try_lock(path, stack)
        if fd is not None and fd < 0:
            return False
        if fd is not None:
            os.unlink(path)
        return True


def _try_lock(path: str, stack: contextlib.ExitStack) -> int | None:
    """A descriptor with the exclusive lock, -1 where somebody else has one, None: no file."""
    try:
        fd = stack.enter_context(OwnedFd(os.open(path, os.O_RDWR | os.O_CLOEXEC))).fileno()
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        return -1
    return fd


def _stale(path: str) -> UnderstudyError:
    return UnderstudyError(
        "gms.stale_epoch",
        f"the epoch of {os.path.basename(path)} was given up before this process could map it; "
        "attach again",
    )
