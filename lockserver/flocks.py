"""Looking at a file that processes hold by flock: opened anew, tried alone, never waited for.

The server always opens such a file itself: a flock tried through a received descriptor would
convert the holder's own lock. A look needs a descriptor and the kernel a little memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from plumbing.errors import is_shortage


def stat_file(path: str) -> os.stat_result | None:
    """The regular file at `path`, without opening it."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


@contextmanager
def opened(path: str) -> Iterator[int | None]:
    """The server's own open file, or None where there is no regular file to open.

    Raises:
        OSError: there is no descriptor or memory to open it with.
    """
    try:
        # O_NONBLOCK: a foreign fifo of that name must not block the server.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if is_shortage(error):
            raise
        yield None
        return
    try:
        yield fd if stat.S_ISREG(os.fstat(fd).st_mode) else None
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_shortage(error: OSError) -> None:
    """Raise `error` unless it means that there was nothing to look with."""
    if not (is_shortage(error) or error.errno == errno.ENOLCK):  # no memory for another lock
        raise error


def is_missing(path: str) -> bool:
    """Whether it is certain that no file has this name."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
