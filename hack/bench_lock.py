"""The lock: from the SIGKILL of the holder until the next waiter knows that it holds the lock.

    python -m hack.bench_lock [--kills 150] [--cycles 1000] [--only unix,unix_tree] [--json]

All contenders run side by side and take turns: in each round every one's holder is killed once. The
waiter reads the clock when it knows that it holds the lock, the killer just before the kill: both
are CLOCK_MONOTONIC of one machine. Then an uncontended lock, and the server's memory.
docs/benchmarks.md describes each contender.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from hack import rig
from hack.lock_holder import HOLDERS
from hack.processes import LockServer, ProcessError, ReportingProcess, until
from lockserver import witness
from lockserver.client.client import LockCallbacks, LockClient
from plumbing.pod.paths import lockserver_socket
from plumbing.service.files import SlotFile, SlotFormat

MEMORY = "/dev/shm"
SHRINKING = "unix"  # its holders become `sleep` first
SETTLE_S = 0.05  # a process that reports that it waits may not block yet
PHASE_S = 0.1  # kills are spread evenly over this
READY_S, GRANT_S = 60.0, 120.0
RECORD = b"{%s}" % (b" " * 600)  # as long as the lock server's own with two holders


class Holder(ReportingProcess):
    """A process of `lock_holder`."""

    def __init__(self, contender: str, directory: str, name: str) -> None:
        super().__init__(name, "hack.lock_holder", contender, directory, name)

    def wait_for(self, key: str, deadline_s: float) -> Any:
        """The value of the next line that has `key`.

        Raises:
            ProcessError: it ended, there is no such line in time, or it was granted a held lock.
        """
        end = time.monotonic() + deadline_s
        while key not in (found := self.next_line(end)):
            if "granted_ns" in found:
                raise ProcessError(f"{self.name} was granted the lock while another held it")
        return found[key]

    @property
    def backends(self) -> list[int]:
        return [pid for line in self.lines for pid in line.get("backends", ())]

    def shrink(self) -> None:
        """Make it `sleep`, with all that it holds."""
        name = Path(f"/proc/{self.process.pid}/comm")
        os.kill(self.process.pid, signal.SIGUSR1)
        until(lambda: name.read_text() == "sleep\n", f"`sleep` as pid {self.process.pid}")


class Lane:
    """One lock of one contender: its holder, and the waiter that is the next round's holder."""

    def __init__(self, contender: str, directory: str) -> None:
        self.contender, self._directory = contender, directory
        self.took_ms: list[float] = []
        self._count = 0
        self._random = random.Random(contender)
        self._holders: list[Holder] = []

    def launch(self) -> None:
        """Start one more process; `wait_queued` returns when it waits."""
        self._count += 1
        name = f"{self.contender.replace('_', '-')}-{self._count}"
        self._holders.append(Holder(self.contender, self._directory, name))

    def wait_held(self) -> None:
        self._holders[0].wait_for("granted_ns", READY_S)

    def wait_queued(self) -> None:
        self._holders[-1].wait_for("waiting", READY_S)

    def kill(self) -> None:
        """Kill the holder; notes how long until the waiter knew (ms)."""
        holder, waiter = self._holders[:2]
        if self.contender == SHRINKING:
            holder.shrink()  # it sends no more heartbeats, and is dead long before that matters
        time.sleep(SETTLE_S + self._random.uniform(0, PHASE_S))
        began_ns = time.monotonic_ns()
        for pid in (holder.process.pid, *holder.backends):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # the bench's own, not reaped yet, or its child
        granted_ns = waiter.wait_for("granted_ns", GRANT_S)
        self.took_ms.append((granted_ns - began_ns) / 1e6)
        self._holders.pop(0).close()

    def close(self) -> None:
        for holder in self._holders:
            holder.close()
        self._holders.clear()


def in_memory() -> tempfile.TemporaryDirectory[str]:
    """A directory like the pod's shared volume, which is an emptyDir of medium Memory."""
    base = MEMORY if os.path.isdir(MEMORY) else None
    return tempfile.TemporaryDirectory(prefix="lock-", dir=base)


def race(contenders: Sequence[str], kills: int) -> rig.Figures:
    """Kill the holder of every contender `kills` times, in turns."""
    with ExitStack() as stack:
        lanes, servers = [], dict[str, LockServer]()
        for name in contenders:
            directory = stack.enter_context(in_memory())
            servers[name] = LockServer(directory)
            stack.callback(servers[name].close)
            servers[name].start()
            lanes.append(Lane(name, directory))
            stack.callback(lanes[-1].close)
        for lane in lanes:
            lane.launch()
        for lane in lanes:
            lane.wait_held()
        for number in range(kills):
            for lane in lanes:
                lane.launch()
            for lane in lanes:
                lane.wait_queued()
            for lane in rig.turns(number, lanes):
                lane.kill()
        return {
            "kills": kills,
            "kill_to_grant_ms": {each.contender: rig.spread(each.took_ms) for each in lanes},
            "server_rss_mib": {name: server.rss_mib for name, server in servers.items()},
        }


async def uncontended(directory: str, cycles: int) -> rig.Figures:
    """A lock that nobody else wants, beside a durable write of a record of the same size.

    Raises:
        TimeoutError: a lock was not granted within `GRANT_S`.
    """
    granted, incarnation = asyncio.Event(), ""

    def on_granted(lock: str, granted_to: str, token: int) -> None:
        if granted_to == incarnation:
            granted.set()

    path, engine = lockserver_socket(directory), "engine-0"
    client = LockClient(path, LockCallbacks(on_granted=on_granted), engine=engine)
    running = asyncio.create_task(client.run())
    form = SlotFormat("bench 1")
    form.create(os.path.join(directory, "slots"), RECORD)
    slots = SlotFile(os.path.join(directory, "slots"), form)
    took_ms: dict[str, list[float]] = {"acquire_ms": [], "durable_write_ms": []}
    try:
        for _ in range(cycles):
            incarnation = witness.new_incarnation(engine)
            held, fd = witness.create(directory, incarnation)
            began = time.perf_counter()
            client.set_want(incarnation, held, ("active",))
            async with asyncio.timeout(GRANT_S):
                await granted.wait()
            took_ms["acquire_ms"].append((time.perf_counter() - began) * 1000)
            granted.clear()
            os.close(fd)  # as when the last process that holds the witness ends
            client.set_want(None, None)
            began = time.perf_counter()
            slots.write(RECORD)
            took_ms["durable_write_ms"].append((time.perf_counter() - began) * 1000)
    finally:
        slots.close()
        running.cancel()
    return {name: rig.spread(values, 3) for name, values in took_ms.items()}


async def measure(contenders: Sequence[str], kills: int, cycles: int, base: Path) -> rig.Figures:
    found = await asyncio.to_thread(race, contenders, kills)
    with in_memory() as directory, contextlib.closing(LockServer(directory)) as server:
        server.start()
        found["uncontended"] = await uncontended(directory, cycles)
    return rig.document({"cycles": cycles, **found}, [])


def main() -> None:
    parser = rig.arguments("bench_lock", "from a holder's death until the next one has the lock")
    parser.add_argument("--kills", type=int, default=150, help="of each contender")
    parser.add_argument("--cycles", type=int, default=1000, help="acquisitions of a free lock")
    parser.add_argument("--only", default=",".join(HOLDERS), help="these [default: %(default)s]")
    flags = parser.parse_args()
    kills, cycles = (5, 50) if flags.quick else (flags.kills, flags.cycles)
    contenders = flags.only.split(",")
    if unknown := {*contenders} - {*HOLDERS}:
        parser.error(f"unknown contenders: {', '.join(unknown)}; there are {', '.join(HOLDERS)}")
    found = rig.run("bench-lock-", partial(measure, contenders, kills, cycles))
    rig.finish(found, is_json=flags.json)


if __name__ == "__main__":
    main()
