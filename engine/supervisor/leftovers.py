"""What a dead incarnation left in shared memory: learned while it lived, removed once it is reaped.

Owns the list of an engine's names, in `leftovers_<id>.json`, so that the successor of a killed
supervisor cleans up, too. (Python's resource tracker dies with its tree.) A name is removed only if
a process of the tree held it, it was not there before the tree, and no visible process still holds
it. Looking can hang where the kernel has locked a process's memory, so a thread does it, and
nothing waits for that thread but, for a moment, the supervisor's exit.

/proc shows a semaphore under a name that glibc unlinked (it makes `sem.XXXXXX` and links that to
the real name), so files are known by inode and named by listing the directory. A socket's file is
found by the socket's number in /proc/net/unix. Functions that look raise an OSError if this process
has no descriptor or memory left; what is gone or hidden is left out.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.supervisor.hub import Background
from plumbing.errors import UnderstudyError
from plumbing.service import procfs
from plumbing.service.events import EventLog
from plumbing.service.files import read_json, write_atomic
from plumbing.wire.sockets import no_descriptors

TICKS_BETWEEN_LOOKS = 30  # once a tree is prepared: a look takes 10 ms of a core
NAMES_MAX = 4096  # a tree of 8 ranks has some 60; beyond this something else is wrong


class Leftovers:
    """The names of one engine. Every method but `start` and `close` only queues work for the
    thread."""

    def __init__(self, directory: str, engine: str, log: EventLog) -> None:
        """The list is neither read nor written before `start`."""
        self.problem: str | None = None  # why the last piece of work failed
        self._path = os.path.join(directory, f"leftovers_{engine}.json")
        self._log = log
        self._thread = Background("leftovers")
        self._ticks = 0
        self._is_due = False
        self._before: frozenset[Name] = frozenset()
        self._living: set[Name] = set()
        self._dead: set[Name] = set()
        self._on_disk: set[Name] = set()

    def start(self) -> None:
        """Begin with the names on the list: they are a predecessor's, and removed once no process
        holds them. Only once it is certain that no other supervisor of this engine runs."""
        self._dead = _load(self._path)
        self._on_disk = set(self._dead)
        self._thread.start()
        self._do(self._remove)

    async def close(self) -> None:
        """Wait a moment for the queued work."""
        await self._thread.close()

    # ------------------------------------------------------------------ what happens to the tree

    def starting(self) -> None:
        """A tree is about to start: names that exist now are not its own.

        Raises:
            OSError: they cannot be listed at present.
        """
        self._do(self._start, there_now())

    def look(self, pids: Iterable[int]) -> None:
        """Learn what `pids`, processes of the tree, hold; with the next tick if an earlier look has
        not ended yet, since it may hang."""
        self._is_due = not self._thread.is_idle
        if not self._is_due:
            self._do(self._look, tuple(pids))

    def tick(self, pids: Iterable[int], *, is_prepared: bool) -> None:
        """Once a second. A tree that is being prepared changes; later it hardly does."""
        self._ticks += 1
        is_turn = self._ticks % TICKS_BETWEEN_LOOKS == 0 or self.problem is not None
        if (is_turn or self._is_due or not is_prepared) and self._thread.is_idle:
            self._is_due = False
            self._do(self._look, tuple(pids), is_turn)

    def reported(self, path: str) -> None:
        """A process of the tree reports that it uses the file `path`, but does not keep it open."""
        name = name_of(path) if os.path.isabs(path) else None
        if name is not None:
            self._do(self._learn, {name})

    def reaped(self) -> None:
        """No process of the tree is left."""
        self._do(self._bury)

    # ------------------------------------------------------------------ on the thread

    def _do(self, job: Callable[..., None], *arguments: Any) -> None:
        """What fails for lack of descriptors is done again: see `tick`."""

        def run() -> None:
            try:
                job(*arguments)
                self.problem = None
            except OSError as error:
                what = "look for files that dead processes have left"
                self.problem = no_descriptors(what, error).message

        self._thread.put(run)

    def _start(self, before: frozenset[Name]) -> None:
        self._before = before

    def _look(self, pids: tuple[int, ...], retries: bool = False) -> None:
        """`retries`: also try again to remove names that were still held."""
        self._learn(held_by(pids))
        if retries:
            self._remove()

    def _learn(self, held: set[Name]) -> None:
        new = held - self._before - self._living
        self._living |= set(sorted(new)[: NAMES_MAX - len(self._living)])
        self._save()

    def _bury(self) -> None:
        self._dead |= self._living
        self._living = set()
        self._remove()

    def _remove(self) -> None:
        removed: list[str] = []
        size = 0
        for name in sorted(self._dead - still_held(self._dead)) if self._dead else ():
            with contextlib.suppress(OSError):  # then it is kept on the list, and retried
                freed = remove(name)
                self._dead.discard(name)
                if freed is not None:
                    removed.append(name.path)
                    size += freed
        self._save()
        if removed:
            text = f"removed {len(removed)} files left by dead processes ({size} bytes of memory)"
            data = {"paths": removed, "bytes": size}
            record = functools.partial(self._log.record, "engine.leftovers", text, data=data)
            self._thread.call(record)

    def _save(self) -> None:
        names = self._living | self._dead
        if names == self._on_disk:
            return
        document = {"names": [[each.path, each.dev, each.ino] for each in sorted(names)]}
        # A full disk only costs a successor its list.
        with contextlib.suppress(OSError):
            write_atomic(self._path, json.dumps(document), survives_power_cut=False)
            self._on_disk = names


def _load(path: str) -> set[Name]:
    """The names that `path` lists; none where it is missing or broken.

    Raises:
        OSError: there is no descriptor or memory to read it.
    """
    try:
        document = read_json(path) or {}
        return {Name(str(path), int(dev), int(ino)) for path, dev, ino in document["names"]}
    except OSError as error:
        procfs.raise_shortage(error)
    except (UnderstudyError, KeyError, TypeError, ValueError):
        pass
    return set()


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
