"""Supervisors like those of `engine run`, with the same client on the same loop: alone, or with
backend processes. Apart from `holder.py`, because this imports much more."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import uvloop

from lockserver import witness
from lockserver.client import LockCallbacks, LockClient
from plumbing.part.paths import lockserver_socket
from plumbing.service.process import die_with_parent

Report = Callable[[str, Any], None]

LARGE_MIB = 256  # enough that a process visibly takes longer to die than the grant takes
SMALL_BACKEND = ("sleep", "infinity")
# Says so once its memory is written: descriptor 1 is a pipe to the supervisor.
LARGE_BACKEND = "import signal, sys; held = b'x' * (int(sys.argv[1]) << 20); print(flush=True); "
LARGE_BACKEND += "signal.pause()"


class Supervisor:
    """Wants `active` for one incarnation, and reports when it is queued and when it is granted."""

    def __init__(self, address: str, name: str, report: Report) -> None:
        """`address`: the directory, or tcp://HOST:PORT, where a lease stands for the witness."""
        self._report = report
        self.is_remote = address.startswith("tcp://")
        self.incarnation = witness.new_incarnation(name)
        self.witness = witness.name_of(self.incarnation)
        if not self.is_remote:
            self.witness, fd = witness.create(address, self.incarnation)
            os.close(fd)  # its processes hold it, not the supervisor
            address = lockserver_socket(address)
        self.client = LockClient(address, LockCallbacks(on_granted=self._granted), engine=name)

    def _granted(self, lock: str, incarnation: str, token: int) -> None:
        if lock == "active" and incarnation == self.incarnation:
            self._report("granted_ns", time.monotonic_ns())
            self.client.set_want(incarnation, self.witness, ("active",), {lock: token})
        elif lock == "active":
            self._report("waiting", 1)

    async def run(self) -> None:
        self.client.set_want(self.incarnation, self.witness, ("active",))
        await self.client.run()

    def launch(self, dirty_mib: int = 0) -> subprocess.Popen[bytes]:
        """A backend process with the witness on descriptor 0, which has written `dirty_mib`."""
        path = os.devnull if self.is_remote else self.witness
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if not self.is_remote:
            fcntl.flock(fd, fcntl.LOCK_SH)
        parent = os.getpid()
        large = (sys.executable, "-S", "-c", LARGE_BACKEND, str(dirty_mib))
        try:
            backend = subprocess.Popen(
                large if dirty_mib else SMALL_BACKEND,
                stdin=fd,
                stdout=subprocess.PIPE,
                preexec_fn=lambda: die_with_parent(parent),
            )
        finally:
            os.close(fd)
        if dirty_mib:
            assert backend.stdout is not None
            backend.stdout.readline()
        return backend


def alone(address: str, name: str, report: Report) -> None:
    """It is its own backend."""
    supervisor = Supervisor(address, name, report)
    if not supervisor.is_remote:
        witness.join(supervisor.witness)
    uvloop.run(supervisor.run())


def tree(address: str, name: str, report: Report, dirty_mib: int = 0) -> None:
    """With two backend processes."""
    supervisor = Supervisor(address, name, report)
    backends = [supervisor.launch(dirty_mib) for _ in range(2)]
    report("backends", [backend.pid for backend in backends])
    uvloop.run(supervisor.run())


def handback(address: str, name: str, report: Report) -> None:
    """With one backend process; when that dies, it reaps it and gives the lock up."""
    supervisor = Supervisor(address, name, report)
    backend = supervisor.launch()
    report("backends", [backend.pid])

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
