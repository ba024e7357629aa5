"""What a dead incarnation left in shared memory: learned while it lived, removed once it is reaped.

Owns the list of an engine's names, in `leftovers_<id>.json`, so that the successor of a killed
supervisor cleans up, too. (Python's resource tracker dies with its tree.) Only names are removed
that a process of the tree held, that were not there before the tree, whoever maps them, and that no
visible process holds any more. Looking can hang where the kernel has locked a process's memory, so
it is done on a thread, on which nothing waits but, for a moment, the supervisor's exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

from engine.supervisor.held_files import Name, held_by, name_of, remove, still_held, there_now
from plumbing.errors import InvariantError, UnderstudyError
from plumbing.service import procfs
from plumbing.service.events import EventLog
from plumbing.service.files import read_json, write_atomic
from plumbing.wire.sockets import no_descriptors

CLOSE_DEADLINE_S = 2.0  # at the end of the supervisor: a look that hangs must not keep it
TICKS_BETWEEN_LOOKS = 30  # once a tree is prepared: a look takes 10 ms of a core
NAMES_MAX = 4096  # a tree of 8 ranks has some 60; beyond this something else is wrong


def path_of(directory: str, engine: str) -> str:
    return os.path.join(directory, f"leftovers_{engine}.json")


class Leftovers:
    """The names of one engine. Every method but `start` and `close` only queues work for the
    thread."""

    def __init__(self, path: str, log: EventLog) -> None:
        """`path` is the list; it is neither read nor written before `start`."""
        self.problem: str | None = None  # why the last piece of work failed
        self._path = path
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_done = asyncio.Event()
        self._ticks = 0
        self._is_due = False
        self._before: frozenset[Name] = frozenset()
        self._living: set[Name] = set()
        self._dead: set[Name] = set()
        self._on_disk: set[Name] = set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin with the names on the list: they are a predecessor's, and removed once no process
        holds them. Only once it is certain that no other supervisor of this engine runs."""
        self._dead = _load(self._path)
        self._on_disk = set(self._dead)
        self._thread = threading.Thread(target=self._run, name="leftovers", daemon=True)
        self._thread.start()
        self._jobs.put(self._remove)

    # ------------------------------------------------------------------ what happens to the tree

    def starting(self) -> None:
        """A tree is about to start: names that exist now are not its own.

        Raises:
            OSError: they cannot be listed at present.
        """
        before = there_now()
        self._jobs.put(lambda: self._start(before))

    def look(self, pids: Iterable[int]) -> None:
        """Learn what `pids`, processes of the tree, hold; with the next tick if an earlier look has
        not ended yet, since it may hang."""
        self._is_due = not self._jobs.empty()
        if not self._is_due:
            self._jobs.put(functools.partial(self._look, tuple(pids)))

    def tick(self, pids: Iterable[int], *, is_prepared: bool) -> None:
        """Once a second. A tree that is being prepared changes; later it hardly does."""
        self._ticks += 1
        is_turn = self._ticks % TICKS_BETWEEN_LOOKS == 0 or self.problem is not None
        if (is_turn or self._is_due or not is_prepared) and self._jobs.empty():
            self._is_due = False
            self._jobs.put(functools.partial(self._look, tuple(pids), retries=is_turn))

    def reported(self, path: str) -> None:
        """A process of the tree reports that it uses the file `path`, but does not keep it open."""
        name = name_of(path) if os.path.isabs(path) else None
        if name is not None:
            self._jobs.put(lambda: self._learn({name}))

    def reaped(self) -> None:
        """No process of the tree is left."""
        self._jobs.put(self._bury)

    async def close(self) -> None:
        """Wait a moment for the queued work."""
        if self._thread is None:
            return
        self._jobs.put(None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_done.wait(), CLOSE_DEADLINE_S)

    # ------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._do(job)
        except Exception as error:  # our own fault, which must not stay on this thread
            self._call(functools.partial(_raise, error))
        self._call(self._is_done.set)

    def _do(self, job: Callable[[], None]) -> None:
        """What fails for lack of descriptors is done again: see `tick`."""
        try:
            job()
            self.problem = None
        except OSError as error:
            what = "look for files that dead processes have left"
            self.problem = no_descriptors(what, error).message

    def _start(self, before: frozenset[Name]) -> None:
        self._before = before

    def _look(self, pids: tuple[int, ...], *, retries: bool = False) -> None:
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
        if not self._dead:
            return
        held = still_held(self._dead)
        removed: list[str] = []
        size = 0
        for name in sorted(self._dead - held):
            try:
                freed = remove(name)
            except OSError:
                continue  # kept on the list, and retried
            self._dead.discard(name)
            if freed is not None:
                removed.append(name.path)
                size += freed
        self._save()
        if removed:
            self._record(removed, size)

    def _record(self, removed: list[str], size: int) -> None:
        text = f"removed {len(removed)} files left by dead processes ({size} bytes of memory)"
        data: dict[str, Any] = {"paths": removed, "bytes": size}
        self._call(lambda: self._log.record("engine.leftovers", text, data=data))

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(function)

    def _save(self) -> None:
        names = self._living | self._dead
        if names == self._on_disk:
            return
        document = {"names": [[each.path, each.dev, each.ino] for each in sorted(names)]}
        # A full disk only costs a successor its list.
        with contextlib.suppress(OSError):
            write_atomic(self._path, json.dumps(document), survives_power_cut=False)
            self._on_disk = names


def _raise(error: Exception) -> None:
    raise InvariantError(f"the work on leftovers failed: {error}") from error


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
