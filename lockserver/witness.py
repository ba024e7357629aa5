"""The witness: one file per incarnation on which every process of a backend tree holds a flock.

It imports only names and errors, because every backend process runs it before anything else.

The surprising things:

- A process holds its witness **on descriptor 0**. A dying process closes its highest descriptors
  first; on 60 the witness was seen free 360 ms before the process was gone.
- The descriptor is inheritable on purpose: a child that forgets to join still holds it, so no
  process that a backend starts can outlive the evidence.
- The server looks at it as `flocks` says, and seals what it finds free.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from lockserver import flocks
from lockserver.core.names import PREFIX as PREFIX
from lockserver.core.names import WitnessFile
from lockserver.core.names import WitnessState as WitnessState
from lockserver.core.names import name_of as name_of
from lockserver.core.names import new_incarnation as new_incarnation
from plumbing.errors import UnderstudyError

UNBORN_PREFIX = "unborn_"  # until it is held; never scanned
STDIN = 0
SEALED_BYTES = 1  # an unsealed witness is empty; any length says "this incarnation has ended"


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


def identify(path: str) -> tuple[WitnessFile | None, WitnessState]:
    """Which file is at `path`, and whether a process holds it. Changes nothing.

    A sealed witness is never HELD: a process that has it open is about to exit, and proves nothing.
    """
    try:
        with flocks.opened(path) as fd:
            if fd is None:
                return _named(path), WitnessState.UNPROVEN
            found = os.fstat(fd)
            file = WitnessFile(os.path.basename(path), found.st_dev, found.st_ino)
            if found.st_size:
                return file, WitnessState.UNPROVEN
            return file, WitnessState.FREE if flocks.try_lock(fd) else WitnessState.HELD
    except OSError as error:
        flocks.check_shortage(error)
        return _named(path), WitnessState.UNSEEN


def _named(path: str) -> WitnessFile | None:
    """The file at `path` without opening it, for which no descriptor is needed."""
    found, name = flocks.stat_file(path), os.path.basename(path)
    return None if found is None else WitnessFile(name, found.st_dev, found.st_ino)


def probe(path: str, dev: int, ino: int, *, seal: bool = True) -> WitnessState:
    """Try the witness filed as (`dev`, `ino`); found free, it is sealed before it is unlocked."""
    return flocks.probe(path, dev, ino, SEALED_BYTES if seal else 0)


def discard(path: str, dev: int, ino: int) -> bool:
    """Seal and remove an ended incarnation's witness if it is free; return whether it is gone."""
    return flocks.discard(path, dev, ino, SEALED_BYTES)


def scan(directory: str, *, seal: bool = False, keep: frozenset[str] = frozenset()) -> set[str]:
    """The names of all witnesses in `directory` that are held or cannot be tried. `seal`: the free
    ones, except those named in `keep`.

    Raises:
        OSError: the directory cannot be read.
    """
    return flocks.scan(directory, PREFIX, SEALED_BYTES if seal else 0, keep)[0]
