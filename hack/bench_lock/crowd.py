"""Very many waiters: how long until they are queued, what they cost, and kill → grant before them.

    python -m hack.bench_lock.crowd DIR FIRST COUNT

Run like that, this is a part of the crowd: COUNT supervisors in one process, each with its own
connection, incarnation and witness, that send heartbeats as supervisors do. It reports how many are
queued, and the code with which the server refused the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import uvloop

from hack.bench_lock.race import Lane
from hack.bench_lock.servers import folder, lockserver
from hack.processes import ProcessError
from hack.report import ROOT, spread
from lockserver import witness
from lockserver.client import LockCallbacks, LockClient
from plumbing.errors import UnderstudyError
from plumbing.part.paths import lockserver_socket
from plumbing.service.process import arm_from_environment, parent_environment, raise_fd_limit

PER_PROCESS = 250  # of the crowd: four processes are enough for a thousand
QUEUE_S = 60.0


def measure(asked: int, kills: int) -> dict[str, Any]:
    """A holder, `kills` waiters to be killed one after another, and behind them the crowd.

    Raises:
        ProcessError, OSError: one of the processes failed.
    """
    with ExitStack() as stack:
        directory = folder(stack)
        server = lockserver(stack, directory)
        idle_mib = server.rss_mib
        lane = Lane("unix", directory)
        stack.callback(lane.close)
        lane.launch()
        lane.wait_held()
        for _ in range(kills):
            lane.launch()
            lane.wait_queued()
        began = time.monotonic()
        parts, queued, refused = _gather(stack, directory, asked)
        queued_s = time.monotonic() - began
        crowded_mib = server.rss_mib
        for _ in range(kills):
            lane.kill()
        return {
            "asked": asked,
            "queued": queued,
            "refused_with": refused,
            "processes": parts,
            "time_to_queue_s": round(queued_s, 2),
            "kill_to_grant_ms": spread(lane.took_ms),
            "server_idle_mib": idle_mib,
            "server_crowded_mib": crowded_mib,
        }


def _gather(stack: ExitStack, directory: str, asked: int) -> tuple[int, int, str | None]:
    """Start processes of waiters until there are enough or the server has refused one."""
    parts = queued = 0
    refused = None
    while queued < asked and refused is None:
        count = min(PER_PROCESS, asked - queued)
        part = subprocess.Popen(
            [sys.executable, "-m", __name__, directory, str(queued), str(count)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            env={**os.environ, **parent_environment()},
        )
        stack.enter_context(part)
        stack.callback(part.kill)
        assert part.stdout is not None
        line = part.stdout.readline()
        if not line:
            raise ProcessError(f"a part of the crowd ended with code {part.wait()}")
        found = json.loads(line)
        parts, queued, refused = parts + 1, queued + found["queued"], found["refused"]
    return parts, queued, refused


# ---------------------------------------------------------------------- a part of the crowd


class Waiter:
    """One supervisor that waits; `answer` is "queued" or the code that it was refused with."""

    def __init__(self, directory: str, number: int) -> None:
        self.answer: str | None = None
        self.is_answered = asyncio.Event()
        name = f"crowd-{number}"
        self.client = LockClient(
            lockserver_socket(directory),
            LockCallbacks(on_granted=lambda *_: self._answered("queued"), on_refused=self._refused),
            engine=name,
        )
        incarnation = witness.new_incarnation(name)
        path, self.fd = witness.create(directory, incarnation)
        self.client.set_want(incarnation, path, ("active",))

    def _refused(self, error: UnderstudyError) -> None:
        self._answered(error.code)

    def _answered(self, answer: str) -> None:
        self.answer = self.answer or answer
        self.is_answered.set()


async def _crowd(directory: str, first: int, count: int) -> None:
    waiters = [Waiter(directory, first + number) for number in range(count)]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(waiter.client.run()) for waiter in waiters]
        async with asyncio.timeout(QUEUE_S):
            for waiter in waiters:
                await waiter.is_answered.wait()
        refused = [each.answer for each in waiters if each.answer != "queued"]
        for waiter, task in zip(waiters, running, strict=True):
            if waiter.answer != "queued":
                task.cancel()  # it would retry for ever
        report = {"queued": count - len(refused), "refused": refused[0] if refused else None}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    arm_from_environment()
    raise_fd_limit()
    uvloop.run(_crowd(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
