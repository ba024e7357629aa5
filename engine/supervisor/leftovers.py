"""What a dead incarnation left in shared memory: learned while it lived, removed once it is reaped.

Owns the list of an engine's names, over its incarnations and its supervisors: it is kept in
`leftovers_<id>.json`, so that the successor of a supervisor that was killed cleans up after it.
Must not know what the files are for. No pattern says what may be removed: only what a process of
the tree held, that was not there before the tree, and that nobody visible holds any more.

Python's resource tracker would do the same, but it dies with the tree when its container does or
when a whole tree is killed. Looking takes milliseconds, or for ever where a process's memory is
locked by the kernel: it is done on a thread of its own, which nothing waits for but, a moment, the
end of the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

from engine.supervisor import shared_names
from engine.supervisor.shared_names import Name
from plumbing.errors import UnderstudyError
from plumbing.service.events import EventLog
from plumbing.service.files import read_json, write_atomic

CLOSE_DEADLINE_S = 2.0  # at the end of the supervisor: a look that hangs must not keep it
TICKS_BETWEEN_LOOKS = 30  # once a tree is prepared: a look takes 10 ms of a core
NAMES_MAX = 4096  # a tree of 8 ranks has some 60; beyond this something else is wrong


def path_of(directory: str, engine: str) -> str:
    return os.path.join(directory, f"leftovers_{engine}.json")


class Leftovers:
    """The names of one engine. Every method but `close` only leaves work for the thread."""

    def __init__(self, path: str, log: EventLog, *, directory: str = shared_names.SHM) -> None:
        """Those that `path` lists are a predecessor's, and removed once nobody holds them."""
        self._path = path
        self._log = log
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_done = asyncio.Event()
        self._ticks = 0
        self._before: frozenset[Name] = frozenset()
        self._living: set[Name] = set()
        self._dead: set[Name] = _load(path)
        self._on_disk: set[Name] = set(self._dead)
        threading.Thread(target=self._run, name="leftovers", daemon=True).start()
        self._retry()

    # ------------------------------------------------------------------ what happens to the tree

    def starting(self) -> None:
        """A tree is about to start: what is there now is not its."""
        before = shared_names.there_now(self._directory)
        self._jobs.put(lambda: self._start(before))

    def look(self, pids: Iterable[int]) -> None:
        """See what `pids`, processes of the tree, hold; not while an earlier look hangs."""
        seen = tuple(pids)
        if self._jobs.empty():
            self._jobs.put(lambda: self._learn(shared_names.held_by(seen, self._directory)))

    def tick(self, pids: Iterable[int], *, is_prepared: bool) -> None:
        """Once a second. A tree that is being prepared changes; later it hardly does."""
        self._ticks += 1
        if self._ticks % TICKS_BETWEEN_LOOKS == 0:
            self.look(pids)
            self._retry()
        elif not is_prepared:
            self.look(pids)

    def told(self, path: str) -> None:
        """A process of the tree says that it uses the file `path`, which it does not keep open."""
        name = shared_names.name_of(path) if os.path.isabs(path) else None
        if name is not None:
            self._jobs.put(lambda: self._learn({name}))

    def reaped(self) -> None:
        """No process of the tree is left."""
        self._jobs.put(self._bury)

    def _retry(self) -> None:
        """Try again to remove what others still held."""
        if self._dead and self._jobs.empty():
            self._jobs.put(self._remove)

    async def close(self) -> None:
        """Wait a moment for what is still to do."""
        self._jobs.put(None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_done.wait(), CLOSE_DEADLINE_S)

    # ------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self._call(self._is_done.set)

    def _start(self, before: frozenset[Name]) -> None:
        self._before = before

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
        held = shared_names.still_held(self._dead, self._directory)
        removed: list[str] = []
        size = 0
        for name in sorted(self._dead - held):
            try:
                freed = shared_names.remove(name)
            except OSError:
                continue  # kept on the list: `retry` comes
            self._dead.discard(name)
            if freed is not None:
                removed.append(name.path)
                size += freed
        self._save()
        if removed:
            self._tell(removed, size)

    def _tell(self, removed: list[str], size: int) -> None:
        text = f"removed {len(removed)} files that dead processes left ({size} bytes of memory)"
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
        # A disk that is full costs a successor its list, nothing else.
        with contextlib.suppress(OSError):
            write_atomic(self._path, json.dumps(document), survives_power_cut=False)
            self._on_disk = names


def _load(path: str) -> set[Name]:
    """What `path` lists; nothing where it is missing or broken."""
    try:
        document = read_json(path) or {}
        return {Name(str(path), int(dev), int(ino)) for path, dev, ino in document["names"]}
    except (UnderstudyError, OSError, KeyError, TypeError, ValueError):
        return set()
