"""Probes the shared directory, its sockets, and who else listens on these paths.

Thin: each function asks the kernel one thing; what it means is up to the checks. Changes nothing;
flock is tried on an unnamed temporary file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Collection, Iterable

from plumbing.service import procfs
from understudy.doctor.facts import Directory, FileId, Process, SocketFile, SocketListener
from understudy.host import descriptors

UNIX_LISTENS = 1 << 16  # __SO_ACCEPTCON, the flag of a listening socket (linux/net.h)
_UCRED = struct.Struct("iII")  # struct ucred: pid, uid, gid (man 7 unix)


def look_at_directory(path: str) -> Directory:
    """The directory itself, and whether flock works in it."""
    our_uid = os.geteuid()
    try:
        found = os.lstat(path)
    except OSError:
        above = os.path.dirname(path)
        can_be_made = os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK)
        return Directory(path, "missing", can_be_made, our_uid=our_uid)
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a directory"
        return Directory(path, kind, our_uid=our_uid)
    filesystem, is_mounted = _mount_of(path)
    return Directory(
        path,
        owner_uid=found.st_uid,
        our_uid=our_uid,
        mode=stat.S_IMODE(found.st_mode),
        identity=(found.st_dev, found.st_ino),
        filesystem=filesystem,
        is_mounted=is_mounted,
        flock_problem=_try_flock(path),
    )


def look_at_sockets(directory: str) -> list[SocketFile]:
    """Every socket in the directory."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return []
    paths = [
        each.path for each in entries if stat.S_ISSOCK(each.stat(follow_symlinks=False).st_mode)
    ]
    return [look_at_socket(path) for path in paths]


def look_at_socket(path: str) -> SocketFile:
    """Whether a process listens there, and which, where that is visible."""
    name, mode = os.path.basename(path), _mode_of(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # EAGAIN means a full backlog: it listens
        try:
            probe.connect(path)
        except BlockingIOError:
            return SocketFile(name, is_answered=True, mode=mode)
        except OSError as error:
            # Only ECONNREFUSED proves that there is no listener; EACCES does not.
            is_answered = error.errno != errno.ECONNREFUSED
            return SocketFile(name, is_answered=is_answered, mode=mode)
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid = _UCRED.unpack(raw)[0]
    return SocketFile(name, is_answered=True, pid=pid or None, mode=mode)


def _mode_of(path: str) -> int | None:
    try:
        return stat.S_IMODE(os.lstat(path).st_mode)
    except OSError:  # its engine has just removed it
        return None


def listeners(directory: str) -> list[SocketListener]:
    """All listeners on paths in `directory`, in this network namespace (man 5 proc)."""
    found: dict[str, str] = {}  # path by inode
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
        for line in table:
            fields = line.rstrip("\n").split(maxsplit=7)
            if len(fields) < 8 or os.path.dirname(fields[7]) != directory:
                continue
            if int(fields[3], 16) & UNIX_LISTENS:
                found[fields[6]] = fields[7]
    owners = _socket_owners(found)
    return [_listener(path, owners.get(inode)) for inode, path in found.items()]


def _listener(path: str, pid: int | None) -> SocketListener:
    name = os.path.basename(path)
    if pid is None:
        return SocketListener(name)
    seen = _seen_by(pid, os.path.dirname(path))
    return SocketListener(name, Process(pid, procfs.name(pid)), seen)


def _socket_owners(inodes: Collection[str]) -> dict[str, int]:
    """The process that has each of these sockets open, by the socket's inode."""
    found: dict[str, int] = {}
    for pid in procfs.pids() if inodes else ():
        for _, target in descriptors(pid):
            inode = target.removeprefix("socket:[").rstrip("]")
            if target.startswith("socket:[") and inode in inodes:
                found.setdefault(inode, pid)
    return found


def _seen_by(pid: int, directory: str) -> FileId | None:
    """What `directory` is for the process `pid`, whose mounts and root may differ from ours."""
    try:
        found = os.stat(f"/proc/{pid}/root{directory}")
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _mount_of(path: str) -> tuple[str, bool]:
    """The type of the file system that `path` is on, and whether it is another one than /."""
    kinds: dict[str, str] = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
        for line in table:
            before, _, after = line.partition(" - ")
            kinds[before.split()[4]] = after.split()[0]  # a later mount hides an earlier one
    above = max((each for each in _with_parents(path) if each in kinds), key=len, default="/")
    return kinds.get(above, ""), above != "/"


def _with_parents(path: str) -> Iterable[str]:
    yield path
    while path != "/":
        path = os.path.dirname(path)
        yield path


def _try_flock(directory: str) -> str | None:
    """Why flock does not exclude in `directory`; None if it does."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            finally:
                os.close(other)
    except OSError as error:
        return os.strerror(error.errno or 0)
    return "two descriptors held one exclusive lock at once"
