"""The witness: one file per incarnation on which every process of a backend tree holds a flock; and
how the server looks at a file that processes hold by flock, a witness or a serving file.

It imports only names and errors, because every backend process runs it before anything else.

The surprising things:

- A process holds its witness **on descriptor 0**. A dying process closes its highest descriptors
  first; on 60 the witness was seen free 360 ms before the process was gone.
- The descriptor is inheritable on purpose: a child that forgets to join still holds it, so no
  process that a backend starts can outlive the evidence.
- The server opens a file anew to look at it, tries it alone, and never waits: a flock tried through
  a received descriptor would convert the holder's own lock.
- A file that is found free is sealed before it is unlocked: its length says what is over, and
  none joins it for that again. A length needs no space, so a full disk cannot prevent it, and a
  seal is never taken back.
- A look needs a descriptor and the kernel a little memory. Without them the answer is `UNSEEN`,
  which is neither free, nor held, nor gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from lockserver.core.names import PREFIX as PREFIX
from lockserver.core.names import SEALED_BYTES as SEALED_BYTES
from lockserver.core.names import WitnessFile as WitnessFile
from lockserver.core.names import WitnessState as WitnessState
from lockserver.core.names import name_of as name_of
from lockserver.core.names import new_incarnation as new_incarnation
from plumbing.errors import UnderstudyError, is_shortage

UNBORN_PREFIX = "unborn_"  # until it is held; never scanned
STDIN = 0


def create(directory: str, incarnation: str) -> tuple[str, int]:
    """Create the witness of a new incarnation, mode 0600, and hold it; its path and descriptor.

    The caller owns the descriptor, which must become the first process's descriptor 0. A server
    without its state seals every witness that it finds free, so a witness must never be visible
    before it is held.

    Raises:
        OSError: the directory is missing or cannot be written.
    """
    path = os.path.join(directory, name_of(incarnation))
    unborn = os.path.join(directory, f"{UNBORN_PREFIX}{incarnation}")
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(unborn, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.rename(unborn, path)  # 64 random bits: there is nothing to replace
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            os.unlink(unborn)
        raise
    return path, fd


def join(path: str) -> None:
    """Hold the witness on descriptor 0 for the rest of this process's life.

    Must be called before the device is opened. The order matters: lock first, then check the seal;
    the server seals while it holds the lock alone, so no process can slip in between.

    Raises:
        UnderstudyError: `witness.sealed` or `witness.replaced`; the caller must exit at once.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise _replaced(path) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # waits out the server's try, which takes microseconds
        found = os.fstat(fd)
        if found.st_size:
            raise UnderstudyError(
                "witness.sealed",
                f"the witness {path} is sealed: this incarnation has been declared dead",
                path=path,
            )
        try:
            named = os.stat(path, follow_symlinks=False)
        except FileNotFoundError as error:
            raise _replaced(path) from error
        if (named.st_dev, named.st_ino) != (found.st_dev, found.st_ino):
            raise _replaced(path)
        if fd != STDIN:
            os.dup2(fd, STDIN, inheritable=True)
        else:
            os.set_inheritable(STDIN, True)
    except BaseException:
        os.close(fd)
        raise
    if fd != STDIN:
        os.close(fd)  # descriptor 0 is the same open file: the lock stays


def _replaced(path: str) -> UnderstudyError:
    return UnderstudyError(
        "witness.replaced",
        f"the witness {path} was removed or replaced: this incarnation has been declared dead",
        path=path,
    )


def stat_file(path: str) -> os.stat_result | None:
    """The regular file at `path`, without opening it."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


@contextmanager
def _opened(path: str) -> Iterator[int | None]:
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


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_shortage(error: OSError) -> None:
    """Raise `error` unless it means that there was nothing to look with."""
    if not (is_shortage(error) or error.errno == errno.ENOLCK):  # no memory for another lock
        raise error


def identify(path: str) -> tuple[WitnessFile | None, WitnessState]:
    """Which file is at `path`, and whether a process holds it. Changes nothing.

    A sealed witness is never HELD: a process that has it open is about to exit, and proves nothing.
    """
    named, name = stat_file(path), os.path.basename(path)  # for which no descriptor is needed
    file = None if named is None else WitnessFile(name, named.st_dev, named.st_ino)
    try:
        with _opened(path) as fd:
            if fd is None:
                return file, WitnessState.UNPROVEN
            found = os.fstat(fd)
            file = WitnessFile(name, found.st_dev, found.st_ino)
            if found.st_size:
                return file, WitnessState.UNPROVEN
            return file, WitnessState.FREE if _try_lock(fd) else WitnessState.HELD
    except OSError as error:
        _check_shortage(error)
        return file, WitnessState.UNSEEN


def probe(path: str, dev: int, ino: int, seal_at: int = SEALED_BYTES) -> WitnessState:
    """Try the file (`dev`, `ino`); found free, it is sealed at this length.

    Returns UNPROVEN if the file is missing or another one, and also if it cannot be sealed: a free
    file that could be joined a moment later would prove nothing.
    """
    try:
        with _opened(path) as fd:
            found = None if fd is None else os.fstat(fd)
            if fd is None or found is None or (found.st_dev, found.st_ino) != (dev, ino):
                return WitnessState.UNPROVEN
            return _try(fd, seal_at)
    except OSError as error:
        _check_shortage(error)
        return WitnessState.UNSEEN


def _try(fd: int, seal_at: int) -> WitnessState:
    if not _try_lock(fd):
        return WitnessState.HELD
    if os.fstat(fd).st_size < seal_at:
        try:
            os.ftruncate(fd, seal_at)
        except OSError:
            return WitnessState.UNPROVEN
    return WitnessState.FREE


def scan(
    directory: str, prefix: str = PREFIX, seal_at: int = 0, keep: Collection[str] = ()
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
            with _opened(path) as fd:
                if fd is not None:
                    longest = max(longest, os.fstat(fd).st_size)
                    state = _try(fd, 0 if name in keep else seal_at)
        except OSError as error:
            _check_shortage(error)
        if state is not WitnessState.FREE and not _is_missing(path):
            held.add(name)  # what exists but cannot be tried may be held: assume the worst
    return held, longest


def discard(path: str, dev: int, ino: int) -> bool:
    """Seal and remove an ended incarnation's witness if it is free; return whether it is gone."""
    if probe(path, dev, ino) is WitnessState.FREE:
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
