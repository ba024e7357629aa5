"""The file of an epoch, or of a KV region: every process that maps the memory holds a shared flock
on it, taken first.

So the kernel, not the sessions, shows whether any process maps an epoch. The server opens the file
anew for each check: a flock through a holder's descriptor would convert the holder's own lock. It
unlinks the file while it holds the exclusive lock, so a process that locks too late finds its file
without a name and must not map.

The file of a KV region also says how much memory the region has, so every process that shares the
directory knows what KV memory takes, even if its server does not answer: the weights' server counts
it without a connection. Size and mark are the file's length, which takes no space: an engine must
wake also on a full disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from gms import names
from plumbing.errors import UnderstudyError
from plumbing.wire.fds import OwnedFd


def create(path: str, size_bytes: int = 0) -> None:
    """Create the file of a new region, before its memory; `size_bytes`: of KV memory, in whole
    units."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        os.truncate(path, 2 * (size_bytes // UNIT_BYTES))
    except OSError:
        os.unlink(path)
        raise


def join(path: str, placeholder: OwnedFd) -> OwnedFd:
    """Hold the epoch: a descriptor with a shared flock, to be kept while it is mapped.

    A dying process closes its highest descriptors first, so the flock should be below the memory's:
    `placeholder` (taken) was opened before those arrived, and the result has its number. Fails with
    `gms.stale_epoch` if the server has already given this epoch up.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(placeholder)
        try:
            held = stack.enter_context(OwnedFd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
        except FileNotFoundError:
            raise _stale(path) from None
        fcntl.flock(held.fileno(), fcntl.LOCK_SH)  # waits at most for one try of the server
        if os.fstat(held.fileno()).st_nlink == 0:
            raise _stale(path)
        os.dup2(held.fileno(), placeholder.fileno(), inheritable=False)
        return OwnedFd(placeholder.detach())


def is_held(path: str) -> bool:
    """Whether any process holds the epoch; a missing file is not held."""
    with _exclusive(path) as is_free:
        return not is_free


def is_free(path: str) -> bool:
    return not is_held(path)


def remove_if_free(path: str) -> bool:
    """Unlink the file if no process holds the epoch; returns whether it is gone now."""
    with _exclusive(path) as is_free:
        if is_free:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return is_free


@contextlib.contextmanager
def _exclusive(path: str) -> Iterator[bool]:
    """Try to lock the file exclusively; whether it was free, as a missing file is."""
    try:
        file = OwnedFd(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        yield True
        return
    with file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _stale(path: str) -> UnderstudyError:
    return UnderstudyError(
        "gms.stale_epoch",
        f"the epoch of {os.path.basename(path)} was given up before this process could map it; "
        "attach again",
    )


# The length is twice the number of these, and one more once the pool is discarded. A file as long
# as the pool would be too long for some file systems, and for programs that copy the directory.
UNIT_BYTES = 4096


def mark_retired(path: str) -> None:
    """Mark the region as out of service, so that no restarted server grants it again, whatever its
    journal says. A missing file needs no mark.
    """
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, os.stat(path).st_size | 1)


def is_retired(path: str) -> bool:
    return _length(path) % 2 == 1


def _length(path: str) -> int:
    """0 for a missing file."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def kv_bytes(directory: str, device: str) -> int:
    """Memory of the KV pools of `device`. What cannot be seen is not counted."""
    total = 0
    with contextlib.suppress(OSError):
        for pool in names.regions_on_disk(directory, device, names.KV):
            path = names.region_path(directory, device, names.KV, pool)
            with contextlib.suppress(OSError):
                total += _length(path) // 2 * UNIT_BYTES
    return total
