"""One process that waits for a lock, holds it, and is killed.

    python -m hack.lock_holder CONTENDER DIR NAME

Prints lines of JSON: `{"waiting": 1}` once it is queued, `{"granted_ns": …}` with CLOCK_MONOTONIC
when it knows that it holds the lock, `{"backends": [pid, …]}` if it has any.

On SIGUSR1, sent just before the kill, a holder without backends becomes `sleep` with all that it
holds: the bench must not measure how long Python takes to die.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import uvloop

from lockserver import witness
from lockserver.client.client import LockCallbacks, LockClient
from plumbing.pod.paths import lockserver_socket
from plumbing.service.process import arm_from_environment, die_with_parent

BACKEND = ("sleep", "infinity")


def report(key: str, value: int | list[int]) -> None:
    print(f'{{"{key}": {value}}}', flush=True)


def shrink_on_signal() -> None:
    """On SIGUSR1 this process keeps its descriptors and its pid, and a twentieth of its size."""

    def become_sleep(*_: object) -> None:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}"):
                os.set_inheritable(int(name), True)
        os.execv("/bin/sleep", ["sleep", "3600"])

    signal.signal(signal.SIGUSR1, become_sleep)


class Supervisor:
    """Wants `active` for one incarnation, with the client and the loop of `engine run`."""

    def __init__(self, directory: str, name: str) -> None:
        self.incarnation = witness.new_incarnation(name)
        self.witness, self.held = witness.create(directory, self.incarnation)
        path = lockserver_socket(directory)
        self.client = LockClient(path, LockCallbacks(on_granted=self._granted), engine=name)

    def _granted(self, lock: str, incarnation: str, token: int) -> None:
        if lock == "active" and incarnation == self.incarnation:
            report("granted_ns", time.monotonic_ns())
            self.client.set_want(incarnation, self.witness, ("active",), {lock: token})
        elif lock == "active":
            report("waiting", 1)

    async def run(self) -> None:
        self.client.set_want(self.incarnation, self.witness, ("active",))
        await self.client.run()

    def launch(self) -> int:
        """A backend process with the witness on descriptor 0; its pid."""
        parent = os.getpid()
        with open(self.witness, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return subprocess.Popen(
                BACKEND, stdin=file, preexec_fn=lambda: die_with_parent(parent)
            ).pid


def alone(directory: str, name: str) -> None:
    """A supervisor that is its own backend."""
    supervisor = Supervisor(directory, name)
    witness.join(supervisor.witness)
    os.close(supervisor.held)
    shrink_on_signal()
    uvloop.run(supervisor.run())


def tree(directory: str, name: str) -> None:
    """With two backend processes."""
    supervisor = Supervisor(directory, name)
    pids = [supervisor.launch() for _ in range(2)]
    os.close(supervisor.held)  # its processes hold it
    report("backends", pids)
    uvloop.run(supervisor.run())


HOLDERS: dict[str, Callable[[str, str], None]] = {
    "unix": alone,
    "unix_tree": tree,
}

if __name__ == "__main__":
    arm_from_environment()
    HOLDERS[sys.argv[1]](sys.argv[2], sys.argv[3])
