"""SIGKILL of the holder → the next waiter runs, for one contender after another.

A lane is one lock with its holder and a waiter; the waiter becomes the next round's holder. The
waiter stamps the clock when it knows that it holds the lock, the killer stamps it just before the
kill: both are CLOCK_MONOTONIC of one machine.
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
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plumbing.service.parent import die_with_parent
from tests.helpers import until

ROOT = str(Path(__file__).resolve().parent.parent)
PARTY = str(Path(__file__).with_name("bench_lock_party.py"))
SETTLE_S = 0.05  # who says that it waits is about to block, and may not have done it yet
PHASE_S = 0.1  # kills fall evenly over the polling interval
RENEWAL_S = {"tcp": 0.5, "redis": 10 / 3, "etcd": 10 / 3}  # and over that of renewing leases
SMALL = ("unix", "unix_disk", "flock", "flock_poll_100ms")  # their holders become `sleep` first
READY_S = 60.0
GRANT_S = 120.0


class Party:
    """A process of `bench_lock_party`, and what it says."""

    def __init__(self, contender: str, address: str, name: str) -> None:
        self.name, self._rest = name, b""
        self.backends: list[int] = []
        parent = os.getpid()
        self.process = subprocess.Popen(
            # -S: no start-up code of site packages in what is to be small; the path finds them.
            [sys.executable, "-S", PARTY, contender, address, name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, *filter(None, sys.path)])},
            preexec_fn=lambda: die_with_parent(parent),
        )

    def hear(self, key: str, deadline_s: float) -> Any:
        """The value of the next line that has `key`."""
        end = time.monotonic() + deadline_s
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                said = json.loads(line)
                self.backends = said.get("backends", self.backends)
                if key in said:
                    return said[key]
            self._read(end, key)

    def _read(self, end: float, key: str) -> None:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
        data = os.read(fd, 4096) if ready else b""
        if not data:
            what = "ended before it said" if ready else "did not say in time"
            raise RuntimeError(f"{self.process.args!r} {what}: {key}")
        self._rest += data

    def shrink(self) -> None:
        """What is killed next is `sleep`, with what this process holds."""
        name = Path(f"/proc/{self.process.pid}/comm")
        os.kill(self.process.pid, signal.SIGUSR1)
        until(lambda: name.read_text() == "sleep\n", f"pid {self.process.pid} to become `sleep`")

    def kill(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Lane:
    """One lock of one contender, with whoever holds it and whoever waits."""

    def __init__(self, contender: str, address: str, number: int = 0, every: int = 1) -> None:
        """`every`: in which rounds of a race it takes part."""
        self.contender, self.address, self.number = contender, address, number
        self.every = every
        self.took_ms: list[float] = []
        self._count = 0
        self._random = random.Random(number)
        self._parties: list[Party] = []

    def launch(self) -> None:
        """Start one more; `in_line` says when it waits."""
        self._count += 1
        name = f"{self.contender.replace('_', '-')}-{self.number}-{self._count}"
        self._parties.append(Party(self.contender, self.address, name))

    def hold(self) -> None:
        """The first one must hold it."""
        self._parties[0].hear("granted_ns", READY_S)

    def in_line(self) -> None:
        self._parties[-1].hear("waiting", READY_S)

    def kill(self) -> float:
        """Kill the holder; how long until the waiter knew (ms)."""
        holder, waiter = self._parties[:2]
        if self.contender in SMALL:
            holder.shrink()  # it beats no more, and is dead long before anybody minds
        phase_s = RENEWAL_S.get(self.contender, PHASE_S)
        time.sleep(SETTLE_S + self._random.uniform(0, phase_s))
        killed = [holder.process.pid, *holder.backends]
        if self.contender.endswith("_handback"):
            killed = holder.backends
        began_ns = time.monotonic_ns()
        holder.kill(killed)
        took_ms: float = (waiter.hear("granted_ns", GRANT_S) - began_ns) / 1e6
        self.took_ms.append(took_ms)
        self._parties.pop(0).close()
        return took_ms

    def close(self) -> None:
        for party in self._parties:
            party.close()
        self._parties.clear()


def race_apart(lanes: Sequence[Lane], rounds: int) -> None:
    """Each lane at its own pace: for locks that take seconds, and then a moment does not count."""

    def run(lane: Lane) -> None:
        lane.launch()
        lane.hold()
        for _ in range(rounds):
            lane.launch()
            lane.in_line()
            lane.kill()

    with ThreadPoolExecutor(max_workers=len(lanes)) as pool:
        for done in [pool.submit(run, lane) for lane in lanes]:
            done.result()


def race(lanes: Sequence[Lane], rounds: int) -> None:
    """All lanes side by side: in each round every contender's holder is killed once, and who is
    first changes from round to round, so that what disturbs the machine hits all alike."""
    for lane in lanes:
        lane.launch()
    for lane in lanes:
        lane.hold()
    for number in range(rounds):
        turn = [lane for lane in lanes if number % lane.every == 0]
        for lane in turn:
            lane.launch()
        for lane in turn:
            lane.in_line()
        first = number % len(turn)
        for lane in [*turn[first:], *turn[:first]]:
            lane.kill()
