"""Very many waiters: how long until they are in line, what they cost, and kill → grant before them.

Run as a program, `python hack/bench_lock_crowd.py DIR FIRST COUNT`, this is a part of the crowd:
COUNT supervisors in one process, each with a connection, an incarnation and a witness of its own,
that beat as supervisors do. It says how many are in line, and what the server said to the others.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: the repository is where its neighbours are
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import asyncio
import json
import os
import subprocess
import time
from contextlib import ExitStack
from typing import Any

import uvloop

from hack.bench_lock_race import Lane
from hack.bench_lock_servers import folder, lockserver
from hack.bench_lock_trees import spread
from lockserver import witness
from lockserver.client import LockCallbacks, LockClient
from plumbing.errors import UnderstudyError
from plumbing.service import procfs
from plumbing.service.fd_limit import raise_fd_limit
from plumbing.service.parent import arm_from_environment, environment
from tests.helpers import auntil

PER_PROCESS = 250  # of the crowd: four processes are enough for a thousand
LINE_S = 60.0


def measure(asked: int, kills: int) -> dict[str, Any]:
    """A holder, `kills` waiters to be killed one after another, and behind them the crowd."""
    with ExitStack() as stack:
        directory = folder(stack)
        server = lockserver(directory)
        stack.callback(server.close)
        idle_bytes = procfs.rss_bytes(server.pid) or 0
        lane = Lane("unix", directory)
        stack.callback(lane.close)
        lane.launch()
        lane.hold()
        for _ in range(kills):
            lane.launch()
            lane.in_line()
        began = time.monotonic()
        parts, queued, refused = _gather(stack, directory, asked)
        queued_s = time.monotonic() - began
        crowded_bytes = procfs.rss_bytes(server.pid) or 0
        for _ in range(kills):
            lane.kill()
        return {
            "asked": asked,
            "queued": queued,
            "refused_with": refused,
            "processes": parts,
            "time_to_queue_s": round(queued_s, 2),
            "kill_to_grant_ms": spread(lane.took_ms),
            "server_idle_mib": round(idle_bytes / 2**20, 1),
            "server_crowded_mib": round(crowded_bytes / 2**20, 1),
        }


def _gather(stack: ExitStack, directory: str, asked: int) -> tuple[int, int, str | None]:
    """Processes of waiters until there are enough or the server has refused one."""
    parts = queued = 0
    refused = None
    while queued < asked and refused is None:
        count = min(PER_PROCESS, asked - queued)
        part = subprocess.Popen(
            [sys.executable, __file__, directory, str(queued), str(count)],
            stdout=subprocess.PIPE,
            env={**os.environ, **environment()},
        )
        stack.callback(_end, part)
        assert part.stdout is not None
        said = json.loads(part.stdout.readline())
        parts, queued, refused = parts + 1, queued + said["queued"], said["refused"]
    return parts, queued, refused


def _end(part: subprocess.Popen[bytes]) -> None:
    part.kill()
    part.wait()
    assert part.stdout is not None
    part.stdout.close()


# ---------------------------------------------------------------------- a part of the crowd


class Waiter:
    """One supervisor that waits; `state` is "queued" or the code that it was refused with."""

    def __init__(self, directory: str, number: int) -> None:
        self.state: str | None = None
        name = f"crowd-{number}"
        self.client = LockClient(
            os.path.join(directory, "lockserver.sock"),
            LockCallbacks(on_granted=lambda *_: self._hear("queued"), on_refused=self._refused),
            engine=name,
        )
        incarnation = witness.new_incarnation(name)
        path, self.fd = witness.create(directory, incarnation)
        self.client.set_want(incarnation, path, ("active",))

    def _refused(self, error: UnderstudyError) -> None:
        self._hear(error.code)

    def _hear(self, state: str) -> None:
        self.state = self.state or state


async def _crowd(directory: str, first: int, count: int) -> None:
    waiters = [Waiter(directory, first + number) for number in range(count)]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(waiter.client.run()) for waiter in waiters]
        await auntil(lambda: all(each.state for each in waiters), "an answer to each", LINE_S)
        refused = [each.state for each in waiters if each.state != "queued"]
        for waiter, task in zip(waiters, running, strict=True):
            if waiter.state != "queued":
                task.cancel()  # it would ask again and again
        said = {"queued": count - len(refused), "refused": refused[0] if refused else None}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    arm_from_environment()
    raise_fd_limit()
    uvloop.run(_crowd(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
