"""Supervisors as `engine run` has them, the same client on the same loop: alone, or with a tree."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import uvloop

from lockserver import witness
from lockserver.client import LockCallbacks, LockClient
from plumbing.service.parent import die_with_parent
from tests.helpers import free_witness

Tell = Callable[[str, Any], None]


class Supervisor:
    """Wants `active` for one incarnation, and says when it is in line and when it is granted."""

    def __init__(self, address: str, name: str, tell: Tell) -> None:
        """`address`: the directory, or tcp://HOST:PORT, where a lease stands for the witness."""
        self._tell = tell
        self.is_remote = address.startswith("tcp://")
        self.incarnation = witness.new_incarnation(name)
        self.witness = witness.name_of(self.incarnation)
        if not self.is_remote:
            self.witness = free_witness(address, self.incarnation)
            address = os.path.join(address, "lockserver.sock")
        self.client = LockClient(address, LockCallbacks(on_granted=self._heard), engine=name)

    def _heard(self, lock: str, incarnation: str, token: int) -> None:
        if lock == "active" and incarnation == self.incarnation:
            self._tell("granted_ns", time.monotonic_ns())
            self.client.set_want(incarnation, self.witness, ("active",), {lock: token})
        elif lock == "active":
            self._tell("waiting", 1)

    async def run(self) -> None:
        self.client.set_want(self.incarnation, self.witness, ("active",))
        await self.client.run()

    def launch(self) -> subprocess.Popen[bytes]:
        """A backend process with the witness on descriptor 0, as small as they come."""
        path = os.devnull if self.is_remote else self.witness
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if not self.is_remote:
            fcntl.flock(fd, fcntl.LOCK_SH)
        parent = os.getpid()
        try:
            return subprocess.Popen(
                ["sleep", "infinity"], stdin=fd, preexec_fn=lambda: die_with_parent(parent)
            )
        finally:
            os.close(fd)


def alone(address: str, name: str, tell: Tell) -> None:
    """It is its own backend."""
    supervisor = Supervisor(address, name, tell)
    if not supervisor.is_remote:
        witness.join(supervisor.witness)
    uvloop.run(supervisor.run())


def tree(address: str, name: str, tell: Tell) -> None:
    """With two backend processes."""
    supervisor = Supervisor(address, name, tell)
    tell("backends", [supervisor.launch().pid for _ in range(2)])
    uvloop.run(supervisor.run())


def handback(address: str, name: str, tell: Tell) -> None:
    """With one backend process, which it reaps when that dies; then it gives the lock up."""
    supervisor = Supervisor(address, name, tell)
    backend = supervisor.launch()
    tell("backends", [backend.pid])

    async def main() -> None:
        pidfd = os.pidfd_open(backend.pid)
        loop = asyncio.get_running_loop()

        def reap() -> None:
            loop.remove_reader(pidfd)
            backend.wait()
            supervisor.client.set_want(None, None)

        loop.add_reader(pidfd, reap)
        await supervisor.run()

    uvloop.run(main())
