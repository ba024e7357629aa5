"""Files in shared memory and of sockets: their names, and which processes hold them.

Every function raises an OSError where this process has no descriptor or memory left to look; what
is gone or hidden is left out.

Surprising: /proc shows a semaphore under a name that glibc unlinked (it makes `sem.XXXXXX` and
links that to the real name), so files are known by inode and named by listing the directory. A
socket's file is found by the socket's number in /proc/net/unix.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from plumbing.service import procfs

SHM = "/dev/shm"  # where shm_open(3) and sem_open(3) keep their names, in no subdirectory
PREFIX = f"{SHM}/"


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """A file as it was seen: another one that has taken its path since is not it."""

    path: str
    dev: int
    ino: int


def there_now() -> frozenset[Name]:
    """The regular files of this uid in shared memory; none where there is no such directory."""
    found = set()
    with _what_is_there(), os.scandir(SHM) as entries:
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


def held_by(pids: Iterable[int]) -> set[Name]:
    """The names in shared memory that `pids` have mapped or open, and those of their sockets.

    A process that is gone, or that may not be inspected, holds nothing here.
    """
    inodes: set[int] = set()
    sockets: set[str] = set()
    device = _device()
    for pid in pids:
        inodes |= _mapped(pid, device)
        files, numbers = _open(pid)
        inodes |= files
        sockets |= numbers
    held = {name for name in there_now() if name.ino in inodes}
    for number, path in _bound_sockets():
        name = name_of(path) if number in sockets else None
        if name is not None:
            held.add(name)
    return held


def still_held(names: Iterable[Name]) -> set[Name]:
    """Those of `names` that some process holds, as far as this one can see."""
    wanted = set(names)
    device = _device()
    inodes: set[int] = set()
    for pid in procfs.pids():
        inodes |= _mapped(pid, device) | _open(pid)[0]
    bound = {path for _, path in _bound_sockets()}
    return {
        name
        for name in wanted
        if name.path in bound or (name.path.startswith(PREFIX) and name.ino in inodes)
    }


def remove(name: Name) -> int | None:
    """Unlink `name`: the bytes that it occupied, or None if it was gone already.

    Raises:
        OSError: it may not be removed.
    """
    if name_of(name.path) != name:
        return None
    size = os.lstat(name.path).st_blocks * 512  # the unit of st_blocks, on every file system
    os.unlink(name.path)
    return size


def _mapped(pid: int, device: str | None) -> set[int]:
    """The inodes on `device` (as /proc writes it) that `pid` has mapped."""
    found: set[int] = set()
    if device is None:
        return found
    mark = f" {device} "
    with _what_is_there(), open(f"/proc/{pid}/maps", errors="replace") as lines:
        for line in lines:
            if mark in line:
                fields = line.split(None, 5)  # address, access, offset, device, inode, path
                if fields[3] == device:
                    found.add(int(fields[4]))
    return found


def _open(pid: int) -> tuple[set[int], set[str]]:
    """The inodes in shared memory that `pid` has open, and the numbers of its sockets."""
    files: set[int] = set()
    sockets: set[str] = set()
    base = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(base)
    except OSError as error:
        procfs.raise_shortage(error)
        return files, sockets
    for number in numbers:
        with _what_is_there():
            target = os.readlink(f"{base}/{number}")
            if target.startswith("socket:["):
                sockets.add(target.removeprefix("socket:[").removesuffix("]"))
            elif target.startswith(PREFIX):
                files.add(os.stat(f"{base}/{number}").st_ino)
    return files, sockets


def _bound_sockets() -> list[tuple[str, str]]:
    """Number and path of every Unix socket that has a file."""
    found = []
    with _what_is_there(), open("/proc/net/unix", errors="replace") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(None, 7)
            if len(fields) == 8 and fields[7].startswith("/"):
                found.append((fields[6], fields[7]))
    return found


@contextlib.contextmanager
def _what_is_there() -> Iterator[None]:
    """Leave out what is gone or hidden."""
    try:
        yield
    except OSError as error:
        procfs.raise_shortage(error)


def _device() -> str | None:
    """The device of shared memory as /proc/PID/maps writes it, `00:1f`."""
    try:
        device = os.stat(SHM).st_dev
    except OSError:
        return None
    return f"{os.major(device):02x}:{os.minor(device):02x}"
