"""What /proc says of single processes beyond `plumbing.service.procfs`: limits, sockets, slabs.

As there, a process that is gone or hidden is left out, and never an error.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from plumbing.service import procfs
from understudy.drill.physical import BLOCK_BYTES, MEMFD

UNLIMITED = 2**31  # stands for "unlimited": no kernel lets a process open so many
_SOCKET = "socket:["


def socket_owners(inodes: Collection[str]) -> dict[str, int]:
    """The process that has each of these sockets open, by the socket's inode."""
    found: dict[str, int] = {}
    for pid in procfs.pids() if inodes else ():
        for target in descriptors(pid):
            inode = target.removeprefix(_SOCKET).rstrip("]") if target.startswith(_SOCKET) else ""
            if inode in inodes:
                found.setdefault(inode, pid)
    return found


def listening_ports() -> set[int]:
    """Every TCP port that somebody of this network namespace listens on, whoever that is."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue  # a kernel without IPv6
        found |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == procfs.TCP_LISTEN}
    return found


def descriptors(pid: int) -> list[str]:
    """What each open descriptor of `pid` points at."""
    return [target for _, target in _links(pid)]


def fd_limits(pid: int) -> tuple[int, int] | None:
    """RLIMIT_NOFILE of `pid`, soft and hard."""
    try:
        with open(f"/proc/{pid}/limits", encoding="ascii") as table:
            rows = [line for line in table if line.startswith("Max open files")]
    except OSError:
        return None
    words = rows[0].split()[3:5] if rows else ["unlimited", "unlimited"]
    soft, hard = (UNLIMITED if word == "unlimited" else int(word) for word in words)
    return soft, hard


def slab_bytes(pid: int, epochs: Collection[str]) -> int:
    """The host memory that `pid` holds of the slabs of these epochs, open or mapped.

    `epochs` are the eight digits with which a slab's name begins. What is mapped and not open is
    counted by its mapping, which may be a little too much.
    """
    sizes: dict[str, int] = {}  # by the slab's name, which no two of an epoch share
    for path, target in _links(pid):
        if _is_of(target, epochs):
            try:
                sizes[target] = os.stat(path).st_blocks * BLOCK_BYTES
            except OSError:
                continue  # closed meanwhile
    for target, size_bytes in _mapped(pid):
        if _is_of(target, epochs):
            sizes.setdefault(target, size_bytes)
    return sum(sizes.values())


def _is_of(target: str, epochs: Collection[str]) -> bool:
    return target.startswith(MEMFD) and target.removeprefix(MEMFD)[:8] in epochs


def _links(pid: int) -> Iterator[tuple[str, str]]:
    """The path of each descriptor in /proc, and what it points at."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        path = f"/proc/{pid}/fd/{name}"
        try:
            yield path, os.readlink(path)
        except OSError:
            continue  # closed meanwhile


def _mapped(pid: int) -> Iterator[tuple[str, int]]:
    """The file and the bytes of each mapping."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as table:
            for line in table:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) == 6:
                    start, _, end = fields[0].partition("-")
                    yield fields[5], int(end, 16) - int(start, 16)
    except OSError:
        return
