"""The witness: one file per incarnation on which every process of a backend tree holds a flock.

It imports only names and errors, because every backend process runs it before anything else.

The surprising things:

- A process holds its witness **on descriptor 0**. A dying process closes its highest descriptors
  first; on 60 the witness was seen free 360 ms before the process was gone.
- The descriptor is inheritable on purpose: a child that forgets to join still holds it, so no
  process that a backend starts can outlive the evidence.
- The server always opens the file itself: a flock tried through a received descriptor would
  convert the holder's own lock.
- Sealing sets the file's length instead of writing a byte, so that a full disk cannot prevent it.
- A look needs a descriptor and the kernel a little memory. Without them the answer is `UNSEEN`,
  which is neither free, nor held, nor gone.
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


def shown(name: str) -> str:
    """A file's name as printable text: it may be any bytes, even a newline."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in name
    )


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
    """Try the witness filed as (`dev`, `ino`); found free, it is sealed before it is unlocked.

    Returns UNPROVEN if the file is missing or another one, and also if it cannot be sealed: a free
    witness that could be joined a moment later would prove nothing.
    """
    try:
        with flocks.opened(path) as fd:
            if fd is None:
                return WitnessState.UNPROVEN
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) != (dev, ino):
                return WitnessState.UNPROVEN
            if not flocks.try_lock(fd):
                return WitnessState.HELD
            if seal and not found.st_size:
                try:
                    os.ftruncate(fd, SEALED_BYTES)
                except OSError:
                    return WitnessState.UNPROVEN
            return WitnessState.FREE
    except OSError as error:
        flocks.check_shortage(error)
        return WitnessState.UNSEEN


def discard(path: str, dev: int, ino: int) -> bool:
    """Seal and remove an ended incarnation's witness if it is free; return whether it is gone."""
    if probe(path, dev, ino) is WitnessState.FREE:
        with suppress(OSError):  # a directory that cannot be written to: it stays
            os.unlink(path)
    return flocks.is_missing(path)


def scan(directory: str, *, seal: bool = False, keep: frozenset[str] = frozenset()) -> set[str]:
    """The names of all witnesses in `directory` that are held or cannot be tried.

    Args:
        seal: seal the free ones, except those named in `keep`.

    Raises:
        OSError: the directory cannot be read.
    """
    held = set()
    for name in sorted(os.listdir(directory)):
        if not name.startswith(PREFIX):
            continue
        path = os.path.join(directory, name)
        try:
            with flocks.opened(path) as fd:
                found = None if fd is None else os.fstat(fd)
        except OSError as error:
            flocks.check_shortage(error)
            held.add(name)
            continue
        result = WitnessState.UNPROVEN
        if found is not None:
            result = probe(path, found.st_dev, found.st_ino, seal=seal and name not in keep)
        is_free = result is WitnessState.FREE
        # What exists but cannot be tried may be held: assume the worst.
        if not is_free and not (result is WitnessState.UNPROVEN and flocks.is_missing(path)):
            held.add(name)
    return held
