"""The lock: from the SIGKILL of the holder until the next waiter knows that it holds the lock.

    python -m hack.bench_lock [--kills 150] [--json]

The waiter reads the clock when it knows that it holds the lock, the killer just before the kill:
both are CLOCK_MONOTONIC of one machine. docs/benchmarks.md has other locks beside it, measured
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from hack import rig
from hack.processes import LockServer, ProcessError, until
from plumbing.service.process import parent_environment

MEMORY = "/dev/shm"
SETTLE_S = 0.05  # a process that reports that it waits may not block yet
PHASE_S = 0.1  # kills are spread evenly over this
READY_S, GRANT_S = 60.0, 120.0


class Holder:
    """A process of `lock_holder`, which prints lines of JSON; it dies with this process."""

    def __init__(self, directory: str, name: str) -> None:
        self.name, self._rest = name, b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hack.lock_holder", directory, name],
            cwd=rig.ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, **parent_environment()},
        )

    def wait_for(self, key: str, deadline_s: float) -> Any:
        """The value of the next line that has `key`.

        Raises:
            ProcessError: it ended, there is no such line in time, or it was granted a held lock.
        """
        end = time.monotonic() + deadline_s
        while key not in (found := self._next_line(end)):
            if "granted_ns" in found:
                raise ProcessError(f"{self.name} was granted the lock while another held it")
        return found[key]

    def _next_line(self, end: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while b"\n" not in self._rest:
            ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
            data = os.read(fd, 4096) if ready else b""
            if not data:
                raise ProcessError(f"{self.name} {'ended' if ready else 'was silent'}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def shrink(self) -> None:
        """Make it `sleep`, with all that it holds."""
        name = Path(f"/proc/{self.process.pid}/comm")
        os.kill(self.process.pid, signal.SIGUSR1)
        until(lambda: name.read_text() == "sleep\n", f"`sleep` as pid {self.process.pid}")


def race(kills: int) -> rig.Figures:
    """Kill the holder; the waiter is the next one's holder."""
    took_ms, draw = list[float](), random.Random(0)
    # A directory like the pod's shared volume, which is an emptyDir of medium Memory.
    base = MEMORY if os.path.isdir(MEMORY) else None
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="lock-", dir=base))
        server = stack.enter_context(contextlib.closing(LockServer(directory)))
        server.start()

        def launch(number: int) -> Holder:
            made = Holder(directory, f"unix-{number}")
            stack.callback(made.close)
            return made

        holder = launch(0)
        holder.wait_for("granted_ns", READY_S)
        for number in range(kills):
            waiter = launch(number + 1)
            waiter.wait_for("waiting", READY_S)
            holder.shrink()  # it sends no more heartbeats, and is dead long before that matters
            time.sleep(SETTLE_S + draw.uniform(0, PHASE_S))
            began_ns = time.monotonic_ns()
            os.kill(holder.process.pid, signal.SIGKILL)
            took_ms.append((waiter.wait_for("granted_ns", GRANT_S) - began_ns) / 1e6)
            holder = waiter
        rss_mib = server.rss_mib
    return {"kills": kills, "kill_to_grant_ms": rig.spread(took_ms), "server_rss_mib": rss_mib}


async def measure(kills: int, base: Path) -> rig.Figures:
    return rig.document(await asyncio.to_thread(race, kills), [])


def main() -> None:
    parser = rig.arguments("bench_lock", "from a holder's death until the next one has the lock")
    parser.add_argument("--kills", type=int, default=150)
    flags = parser.parse_args()
    kills = 5 if flags.quick else flags.kills
    rig.finish(rig.run("bench-lock-", partial(measure, kills)), is_json=flags.json)


if __name__ == "__main__":
    main()
