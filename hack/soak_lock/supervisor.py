"""A supervisor with a tree, forked by the soak: it waits, checks the old tree when it is granted,
and holds.

Before each kill every waiter is told what to check: the processes of the holder's tree, by pidfd,
and its witness. The one that is granted checks at once, in the same callback, and reports what of
the old tree still lives. So the fence is checked where it matters: by the new holder.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from lockserver import witness
from lockserver.client import LockCallbacks, LockClient
from plumbing.part.paths import lockserver_socket
from plumbing.service import procfs
from plumbing.service.process import die_with_parent

MIB = 1 << 20
TRIES, TRY_S = 50, 0.001  # the server may be preempted while it holds the witness


@dataclass(frozen=True)
class Plan:
    """One tree: `backends` processes beside the supervisor (0: it is its own backend), each with
    `dirty_mib` of written memory; `orphans`: they do not die with the supervisor."""

    engine: str
    backends: int
    dirty_mib: int
    orphans: bool


class Supervisor:
    """`commands` and `reports` are pipes of JSON lines."""

    def __init__(self, directory: str, plan: Plan, commands: int, reports: int) -> None:
        self.plan, self._commands, self._reports = plan, commands, reports
        self.incarnation = witness.new_incarnation(plan.engine)
        self.witness, fd = witness.create(directory, self.incarnation)
        os.close(fd)  # its processes join it
        self.pids = [self._fork() for _ in range(plan.backends)]
        if not self.pids:
            self._join()
        path = lockserver_socket(directory)
        self.client = LockClient(path, LockCallbacks(on_granted=self._granted), engine=plan.engine)
        self._watched: dict[int, int] = {}  # pid → pidfd
        self._watched_witness: int | None = None
        self._is_queued = self._is_holder = False

    # ------------------------------------------------------------------ its tree

    def _join(self) -> None:
        witness.join(self.witness)
        self._dirty = os.urandom(1) * (self.plan.dirty_mib * MIB)

    def _fork(self) -> int:
        """A backend: it holds the witness before this returns."""
        ready, report = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                if not self.plan.orphans:
                    die_with_parent(parent)
                self._join()
                os.write(report, b"x")
                os.closerange(3, 256)
                while True:
                    signal.pause()
            finally:
                os._exit(1)
        os.close(report)
        os.read(ready, 1)
        os.close(ready)
        return pid

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._commands, self._commanded)
        for pidfd in map(os.pidfd_open, self.pids):
            loop.add_reader(pidfd, self._reap, pidfd)
        self.client.set_want(self.incarnation, self.witness, ("active",))
        await self.client.run()

    def _reap(self, died: int) -> None:
        """A process of the tree has died: kill the rest, then release the lock."""
        asyncio.get_running_loop().remove_reader(died)
        pids, self.pids = self.pids, []
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        self.client.set_want(None, None)

    # ------------------------------------------------------------------ grants and commands

    def _granted(self, lock: str, incarnation: str, token: int) -> None:
        if lock != "active":
            return
        if incarnation != self.incarnation:
            if not self._is_queued:
                self._is_queued = True
                self._report(queued=True, pids=[os.getpid(), *self.pids])
            return
        alive, spent = self._check()
        held = self._watched_witness is not None and not _is_free(self._watched_witness)
        if not self._is_holder:
            self._is_holder = True
            self._report(
                token=token,
                mono_ms=time.monotonic() * 1000,
                watched=len(self._watched),
                alive=alive,
                spent_early=spent,
                witness_held=held,
                pids=[os.getpid(), *self.pids],
                witness=self.witness,
            )
        self.client.set_want(incarnation, self.witness, ("active",), {lock: token})

    def _check(self) -> tuple[list[int], list[int]]:
        """Processes of the old tree that live, and those dead ones whose pidfd does not show it."""
        not_ended = [pid for pid, pidfd in self._watched.items() if not _is_readable(pidfd)]
        alive = [pid for pid in not_ended if not procfs.is_spent(pid)]
        return alive, [pid for pid in not_ended if pid not in alive]

    def _commanded(self) -> None:
        text = os.read(self._commands, 65536)
        for line in text.splitlines():
            self._watch(**json.loads(line))

    def _watch(self, pids: Sequence[int], witness: str) -> None:
        for pidfd in self._watched.values():
            os.close(pidfd)
        if self._watched_witness is not None:
            os.close(self._watched_witness)
        self._watched = {pid: os.pidfd_open(pid) for pid in pids}
        self._watched_witness = os.open(witness, os.O_RDWR | os.O_CLOEXEC)
        self._report(watching=True)

    def _report(self, **line: Any) -> None:
        os.write(self._reports, json.dumps(line).encode() + b"\n")


def _is_readable(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _is_free(fd: int) -> bool:
    """Whether no process holds it. A few tries, because the server holds it while it removes it; a
    process of the old tree would hold it until it dies."""
    for _ in range(TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(TRY_S)
        else:
            fcntl.flock(fd, fcntl.LOCK_UN)
            return True
    return False


def live(directory: str, plan: Plan, commands: int, reports: int, parent: int) -> None:
    """Be a supervisor until killed, or until the soak closes the pipe; never returns."""
    try:
        die_with_parent(parent)
        uvloop.run(Supervisor(directory, plan, commands, reports).run())
    finally:
        os._exit(1)
