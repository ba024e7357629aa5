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
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from engine.supervisor.hub import Background, shortage
from plumbing.errors import UnderstudyError
from plumbing.service import procfs
from plumbing.service.events import EventLog
from plumbing.service.files import read_json, write_atomic

TICKS_BETWEEN_LOOKS = 30  # once a tree is prepared: a look takes 10 ms of a core
NAMES_MAX = 4096  # a tree of 8 ranks has some 60; beyond this something else is wrong

SHM = "/dev/shm"  # where shm_open(3) and sem_open(3) keep their names, in no subdirectory
PREFIX = f"{SHM}/"


class Name(NamedTuple):
    """A file as it was seen: another one that has taken its path since is not it."""

    path: str
    dev: int
    ino: int


class Leftovers:
    """The names of one engine. What follows from a method's call happens on the thread."""

    def __init__(self, directory: str, engine: str, log: EventLog) -> None:
        """The list is neither read nor written before `start`."""
        self.problem: str | None = None  # why the last piece of work failed
        self._path = os.path.join(directory, f"leftovers_{engine}.json")
        self._log = log
        self._thread = Background("leftovers")
        self._ticks = 0  # since the tree is prepared
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
        self._before = there_now()

    def tick(self, pids: Iterable[int], *, is_prepared: bool) -> None:
        """Once a second: learn what `pids`, processes of the tree, hold. A tree that is being
        prepared changes; later it hardly does. No look is put behind one that hangs."""
        self._ticks = self._ticks + 1 if is_prepared else 0
        is_turn = self._ticks == 1 or self._ticks % TICKS_BETWEEN_LOOKS == 0
        if (is_turn or self.problem is not None) and self._thread.is_idle:
            self._do(self._look, tuple(pids))

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
                self.problem = shortage("look for files that dead processes have left", error)

        self._thread.put(run)

    def _look(self, pids: tuple[int, ...]) -> None:
        self._learn(held_by(pids))
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
            self._thread.call(lambda: self._log.record("engine.leftovers", text, data=data))

    def _save(self) -> None:
        names = self._living | self._dead
        if names == self._on_disk:
            return
        # A full disk only costs a successor its list.
        with contextlib.suppress(OSError):
            document = json.dumps({"names": sorted(names)})
            write_atomic(self._path, document, survives_power_cut=False)
            self._on_disk = names


def _load(path: str) -> set[Name]:
    """The names that `path` lists; none where it is missing or broken.

    Raises:
        OSError: there is no descriptor or memory to read it.
    """
    with _what_is_there(), contextlib.suppress(UnderstudyError, msgspec.ValidationError):
        return msgspec.convert((read_json(path) or {}).get("names", []), set[Name])
    return set()


def there_now() -> frozenset[Name]:
    """The regular files of this uid in shared memory; none where there is no such directory."""
    found: list[Name | None] = []
    with _what_is_there(), os.scandir(SHM) as entries:
        found = [name_of(entry.path) for entry in entries]
    return frozenset(name for name in found if name is not None)


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
    inodes, sockets = _open(pids)
    bound = [name_of(path) for number, path in _bound_sockets() if number in sockets]
    return {
        *(name for name in there_now() if name.ino in inodes),
        *(name for name in bound if name is not None),
    }


def still_held(names: Iterable[Name]) -> set[Name]:
    """Those of `names` that some process holds, as far as this one can see."""
    inodes, _ = _open(procfs.pids())
    bound = {path for _, path in _bound_sockets()}
    return {
        name
        for name in names
        if name_of(name.path) == name  # or its path is a successor's
        and (name.path in bound or (name.path.startswith(PREFIX) and name.ino in inodes))
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


def _open(pids: Iterable[int]) -> tuple[set[int], set[str]]:
    """The inodes in shared memory that `pids` have mapped or open, and their sockets' numbers."""
    inodes: set[int] = set()
    sockets: set[str] = set()
    mark = f" {_device()} "
    for pid in pids:
        with _what_is_there(), open(f"/proc/{pid}/maps", errors="replace") as lines:
            # Address, access, offset, device, inode, path.
            fields = [line.split(None, 5) for line in lines if mark in line]
            inodes |= {int(field[4]) for field in fields if field[3] == mark.strip()}
        base = f"/proc/{pid}/fd"
        numbers: list[str] = []
        with _what_is_there():
            numbers = os.listdir(base)
        for number in numbers:
            with _what_is_there():
                target = os.readlink(f"{base}/{number}")
                if target.startswith("socket:["):
                    sockets.add(target.removeprefix("socket:[").removesuffix("]"))
                elif target.startswith(PREFIX):
                    inodes.add(os.stat(f"{base}/{number}").st_ino)
    return inodes, sockets


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
