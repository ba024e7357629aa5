"""Names in shared memory and of sockets: which ones processes hold, and who else does.

Owns the reading of /proc for it. Must not know whose processes they are or when they end.

Three surprising things. A semaphore is mapped under a name that it never keeps: glibc makes
`sem.XXXXXX`, links it to its real name and unlinks the first, so /proc shows `(deleted)`. Files
are therefore known by their inode, and named by looking through the directory. A socket's file is
found by the socket's number in /proc/net/unix, not by the file's own. And where processes have
PID namespaces of their own, nobody here sees who else holds a name: what was there before the
processes started is left alone, whoever maps it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from plumbing.service import procfs

SHM = "/dev/shm"  # where shm_open(3) and sem_open(3) keep their names, in no subdirectory


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """A file as it was seen: another one that has taken its path since is not it."""

    path: str
    dev: int
    ino: int


def there_now(directory: str = SHM) -> frozenset[Name]:
    """The regular files of this uid in `directory`; nothing where there is none."""
    found = set()
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            name = name_of(entry.path)
            if name is not None:
                found.add(name)
    return frozenset(found)


def name_of(path: str) -> Name | None:
    """The regular file or the socket at `path`, if there is one and it is this uid's."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    is_kind = stat.S_ISREG(found.st_mode) or stat.S_ISSOCK(found.st_mode)
    if not is_kind or found.st_uid != os.geteuid():
        return None
    return Name(path, found.st_dev, found.st_ino)


def held_by(pids: Iterable[int], directory: str = SHM) -> set[Name]:
    """The names in `directory` that `pids` have mapped or open, and those of their sockets.

    A process that is gone, or that may not be looked at, holds nothing here.
    """
    inodes: set[int] = set()
    sockets: set[str] = set()
    device = _device(directory)
    for pid in pids:
        inodes |= _mapped(pid, device)
        files, numbers = _open(pid, directory)
        inodes |= files
        sockets |= numbers
    held = {name for name in there_now(directory) if name.ino in inodes}
    for number, path in _bound_sockets():
        name = name_of(path) if number in sockets else None
        if name is not None:
            held.add(name)
    return held


def still_held(names: Iterable[Name], directory: str = SHM) -> set[Name]:
    """Those of `names` that any process has which is visible from here."""
    wanted = set(names)
    device = _device(directory)
    inodes: set[int] = set()
    for pid in procfs.pids():
        inodes |= _mapped(pid, device) | _open(pid, directory)[0]
    bound = {path for _, path in _bound_sockets()}
    is_here = os.path.join(directory, "")
    return {
        name
        for name in wanted
        if name.path in bound or (name.path.startswith(is_here) and name.ino in inodes)
    }


def remove(name: Name) -> int | None:
    """Unlink `name`: the bytes that it took, or None if it was not there any more.

    Raises:
        OSError: it may not be removed.
    """
    if name_of(name.path) != name:
        return None
    size = os.lstat(name.path).st_blocks * 512  # the unit of st_blocks, whatever the file system
    os.unlink(name.path)
    return size


def _mapped(pid: int, device: str | None) -> set[int]:
    """The inodes on `device` (as /proc writes it) that `pid` has mapped."""
    found: set[int] = set()
    if device is None:
        return found
    mark = f" {device} "
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as lines:
        for line in lines:
            if mark in line:
                fields = line.split(None, 5)  # address, access, offset, device, inode, path
                if fields[3] == device:
                    found.add(int(fields[4]))
    return found


def _open(pid: int, directory: str) -> tuple[set[int], set[str]]:
    """The inodes in `directory` that `pid` has open, and the numbers of its sockets."""
    files: set[int] = set()
    sockets: set[str] = set()
    base = f"/proc/{pid}/fd"
    is_here = os.path.join(directory, "")
    try:
        numbers = os.listdir(base)
    except OSError:
        return files, sockets
    for number in numbers:
        with contextlib.suppress(OSError):
            target = os.readlink(f"{base}/{number}")
            if target.startswith("socket:["):
                sockets.add(target.removeprefix("socket:[").removesuffix("]"))
            elif target.startswith(is_here):
                files.add(os.stat(f"{base}/{number}").st_ino)
    return files, sockets


def _bound_sockets() -> list[tuple[str, str]]:
    """Number and path of every Unix socket that has a file."""
    found = []
    with contextlib.suppress(OSError), open("/proc/net/unix", errors="replace") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(None, 7)
            if len(fields) == 8 and fields[7].startswith("/"):
                found.append((fields[6], fields[7]))
    return found


def _device(directory: str) -> str | None:
    """The device of `directory` as /proc/PID/maps writes it, `00:1f`."""
    try:
        device = os.stat(directory).st_dev
    except OSError:
        return None
    return f"{os.major(device):02x}:{os.minor(device):02x}"
