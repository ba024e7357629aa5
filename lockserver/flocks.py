"""Looking at a file that processes hold by flock: opened anew, tried alone, never waited for.

The server always opens such a file itself: a flock tried through a received descriptor would
convert the holder's own lock. A file that is found free is sealed before it is unlocked: its
length says what is over, and nobody joins it for that again. A length needs no space, so a full
disk cannot prevent it, and a seal is never taken back.

A look needs a descriptor and the kernel a little memory. Without them the answer is `UNSEEN`, which
is neither free, nor held, nor gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from lockserver.core.names import WitnessState
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


def probe(path: str, dev: int, ino: int, seal_at: int) -> WitnessState:
    """Try the file (`dev`, `ino`); found free, it is sealed at this length.

    Returns UNPROVEN if the file is missing or another one, and also if it cannot be sealed: a free
    file that could be joined a moment later would prove nothing.
    """
    try:
        with opened(path) as fd:
            found = None if fd is None else os.fstat(fd)
            if fd is None or found is None or (found.st_dev, found.st_ino) != (dev, ino):
                return WitnessState.UNPROVEN
            return _try(fd, seal_at)
    except OSError as error:
        check_shortage(error)
        return WitnessState.UNSEEN


def _try(fd: int, seal_at: int) -> WitnessState:
    if not try_lock(fd):
        return WitnessState.HELD
    if os.fstat(fd).st_size < seal_at:
        try:
            os.ftruncate(fd, seal_at)
        except OSError:
            return WitnessState.UNPROVEN
    return WitnessState.FREE


def scan(
    directory: str, prefix: str, seal_at: int = 0, keep: Collection[str] = ()
) -> tuple[set[str], int]:
    """The names of the files that are held or cannot be tried, and the largest length.

    Args:
        seal_at: seal the free ones at this length, but those named in `keep`.

    Raises:
        OSError: the directory cannot be read.
    """
    held, longest = set(), 0
    for name in sorted(os.listdir(directory)):
        if not name.startswith(prefix):
            continue
        path, state = os.path.join(directory, name), WitnessState.UNPROVEN
        try:
            with opened(path) as fd:
                if fd is not None:
                    longest = max(longest, os.fstat(fd).st_size)
                    state = _try(fd, 0 if name in keep else seal_at)
        except OSError as error:
            check_shortage(error)
        if state is not WitnessState.FREE and not _is_missing(path):
            held.add(name)  # what exists but cannot be tried may be held: assume the worst
    return held, longest


def discard(path: str, dev: int, ino: int, seal_at: int) -> bool:
    """Seal and remove the file if it is free; return whether it is gone."""
    if probe(path, dev, ino, seal_at) is WitnessState.FREE:
        try:
            os.unlink(path)
        except OSError:  # a directory that cannot be written to: it stays
            return False
    return _is_missing(path)


def _is_missing(path: str) -> bool:
    """Whether it is certain that no file has this name."""
    try:
        os.lstat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False
