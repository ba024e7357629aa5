"""One process that waits for a lock, holds it, and is killed.

    python -m hack.lock_holder DIR NAME

A supervisor that is its own backend. Prints lines of JSON: `{"waiting": 1}` once it is queued, and
`{"granted_ns": …}` with CLOCK_MONOTONIC when it knows that it holds the lock.

On SIGUSR1, sent just before the kill, it becomes `sleep` with all that it holds: the bench must not
measure how long Python takes to die.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import uvloop

from lockserver import witness
from lockserver.client.client import LockClient
from plumbing.pod.paths import lockserver_socket
from plumbing.service.process import arm_from_environment


def report(key: str, value: int) -> None:
    print(f'{{"{key}": {value}}}', flush=True)


def shrink_on_signal() -> None:
    """On SIGUSR1 this process keeps its descriptors and its pid, and a twentieth of its size."""

    def become_sleep(*_: object) -> None:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}"):
                os.set_inheritable(int(name), True)
        os.execv("/bin/sleep", ["sleep", "3600"])

    signal.signal(signal.SIGUSR1, become_sleep)


class Supervisor(LockClient):
    """Wants `active` for one incarnation, with the client and the loop of `engine run`."""

    def __init__(self, directory: str, name: str) -> None:
        self.incarnation = witness.new_incarnation(name)
        self.witness, self.held = witness.create(directory, self.incarnation)
        super().__init__(lockserver_socket(directory), engine=name)

    def granted(self, incarnation: str, token: int) -> None:
        if incarnation == self.incarnation:
            report("granted_ns", time.monotonic_ns())
            self.set_want(incarnation, is_wanted=True, token=token)
        else:
            report("waiting", 1)

    async def run(self) -> None:
        self.set_want(self.incarnation, is_wanted=True)
        await super().run()


if __name__ == "__main__":
    arm_from_environment()
    supervisor = Supervisor(*sys.argv[1:3])
    witness.join(supervisor.witness)
    os.close(supervisor.held)
    shrink_on_signal()
    uvloop.run(supervisor.run())
