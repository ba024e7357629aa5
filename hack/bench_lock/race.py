"""SIGKILL of the holder → the next waiter runs, for one contender after another.

A lane is one lock with its holder and a waiter; the waiter becomes the next round's holder. The
waiter reads the clock when it knows that it holds the lock, the killer just before the kill: both
are CLOCK_MONOTONIC of one machine. A lane that fails keeps its reason, and the others go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hack.processes import ProcessError, until
from hack.report import ROOT
from plumbing.service.process import die_with_parent

HOLDER = str(Path(__file__).with_name("holder.py"))
SETTLE_S = 0.05  # a process that reports that it waits may not block yet
PHASE_S = 0.1  # kills are spread evenly over the polling interval
RENEWAL_S = {"tcp": 0.5, "redis": 10 / 3, "etcd": 10 / 3}  # and over the renewal of leases
SMALL = ("unix", "unix_disk", "flock", "flock_poll_100ms")  # their holders become `sleep` first
READY_S = 60.0
GRANT_S = 120.0


class Holder:
    """A process of `holder.py`, and what it reports."""

    def __init__(self, contender: str, address: str, name: str) -> None:
        self.name, self._rest = name, b""
        self.backends: list[int] = []
        parent = os.getpid()
        self.process = subprocess.Popen(
            # -S: no start-up code of site packages in what must be small; the path finds them.
            [sys.executable, "-S", HOLDER, contender, address, name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
            preexec_fn=lambda: die_with_parent(parent),
        )

    def wait_for(self, key: str, deadline_s: float) -> Any:
        """The value of the next line that has `key`.

        Raises:
            ProcessError: it ended, or there is no such line in time; or it was granted the lock
                before it had to wait, since the holder's lease ran out.
        """
        end = time.monotonic() + deadline_s
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                found = json.loads(line)
                self.backends = found.get("backends", self.backends)
                if key in found:
                    return found[key]
                if "granted_ns" in found:
                    raise ProcessError(f"{self.name} was granted the lock while another held it")
            self._read(end, f"{self.name} {{}} before it reported {key}, within {deadline_s:g} s")

    def _read(self, end: float, failure: str) -> None:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
        data = os.read(fd, 4096) if ready else b""
        if not data:
            raise ProcessError(failure.format("ended" if ready else "timed out"))
        self._rest += data

    def shrink(self) -> None:
        """Make it `sleep`, with all that it holds."""
        name = Path(f"/proc/{self.process.pid}/comm")
        os.kill(self.process.pid, signal.SIGUSR1)
        until(lambda: name.read_text() == "sleep\n", f"`sleep` as pid {self.process.pid}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Lane:
    """One lock of one contender, with its holder and its waiters."""

    def __init__(self, contender: str, address: str, number: int = 0, every: int = 1) -> None:
        """`every`: it takes part in every so-many-th round of a race."""
        self.contender, self.address, self.number = contender, address, number
        self.every = every
        self.took_ms: list[float] = []
        self.after_last_ms: list[float] = []  # from the end of the last process killed
        self.failure: str | None = None
        self._count = 0
        self._random = random.Random(number)
        self._holders: list[Holder] = []  # who holds the lock, then those who wait

    def attempt(self, *steps: Callable[[], object]) -> None:
        """Do these steps. A failure is kept, closes the lane, and leaves out all that follow."""
        for step in steps:
            if self.failure is not None:
                return
            try:
                step()
            except (ProcessError, OSError) as error:
                self.failure = str(error)
                self.close()

    def launch(self) -> None:
        """Start one more process; `wait_queued` returns when it waits."""
        self._count += 1
        name = f"{self.contender.replace('_', '-')}-{self.number}-{self._count}"
        self._holders.append(Holder(self.contender, self.address, name))

    def wait_held(self) -> None:
        self._holders[0].wait_for("granted_ns", READY_S)

    def wait_queued(self) -> None:
        self._holders[-1].wait_for("waiting", READY_S)

    def kill(self) -> None:
        """Kill the holder; notes how long until the waiter knew (ms)."""
        holder, waiter = self._holders[:2]
        if self.contender in SMALL:
            holder.shrink()  # it sends no more heartbeats, and is dead long before that matters
        phase_s = RENEWAL_S.get(self.contender, PHASE_S)
        time.sleep(SETTLE_S + self._random.uniform(0, phase_s))
        killed = [holder.process.pid, *holder.backends]
        if self.contender.endswith("_handback"):
            killed = holder.backends
        ends_ns: list[int] = []
        pidfds = [os.pidfd_open(pid) for pid in killed]
        watching = threading.Thread(target=_watch_ends, args=(pidfds, ends_ns))
        watching.start()
        began_ns = time.monotonic_ns()
        for pidfd in pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        try:
            granted_ns = waiter.wait_for("granted_ns", GRANT_S)
        finally:
            watching.join()
            for pidfd in pidfds:
                os.close(pidfd)
        self.took_ms.append((granted_ns - began_ns) / 1e6)
        self.after_last_ms.append(max(0, granted_ns - max(ends_ns)) / 1e6)
        self._holders.pop(0).close()

    def close(self) -> None:
        for holder in self._holders:
            holder.close()
        self._holders.clear()


def _watch_ends(pidfds: Sequence[int], ends_ns: list[int]) -> None:
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        ends_ns.append(time.monotonic_ns())


def race_apart(lanes: Sequence[Lane], rounds: int) -> None:
    """Each lane at its own pace: for locks that take seconds, where a moment does not count."""

    def run(lane: Lane) -> None:
        lane.attempt(lane.launch, lane.wait_held)
        for _ in range(rounds):
            lane.attempt(lane.launch, lane.wait_queued, lane.kill)

    with ThreadPoolExecutor(max_workers=len(lanes)) as pool:
        for done in [pool.submit(run, lane) for lane in lanes]:
            done.result()


def race(lanes: Sequence[Lane], rounds: int) -> None:
    """All lanes side by side: in each round every contender's holder is killed once, and the first
    one changes from round to round, so that whatever disturbs the machine affects all alike."""
    for lane in lanes:
        lane.attempt(lane.launch)
    for lane in lanes:
        lane.attempt(lane.wait_held)
    for number in range(rounds):
        turn = [lane for lane in lanes if number % lane.every == 0]
        for lane in turn:
            lane.attempt(lane.launch)
        for lane in turn:
            lane.attempt(lane.wait_queued)
        first = number % len(turn) if turn else 0
        for lane in [*turn[first:], *turn[:first]]:
            lane.attempt(lane.kill)
