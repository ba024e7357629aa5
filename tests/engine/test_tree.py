"""A supervisor's tree of real processes: what reaches them, and what kills them."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from engine.supervisor.tree import Tree
from plumbing.errors import UsageError
from plumbing.service import procfs
from plumbing.service.signals import ENDING
from tests.helpers import run_command, until

# A subreaper with a tree of its own: in the test's process orphans and children are the test's.
PROGRAM = """
import asyncio, os, signal, sys
from plumbing.service import procfs
from plumbing.service.process import become_subreaper
from tests.engine import test_tree
become_subreaper()
try:
    asyncio.run(getattr(test_tree, sys.argv[1])())
finally:
    for pid in procfs.descendants(os.getpid()):
        os.kill(pid, signal.SIGKILL)
"""
NOBODY = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '1000'])"]
STARTING = {signal.SIGUSR1}  # blocked with all others between vfork(2) and execve(2)
HANDLERS = "import signal, sys; [signal.signal(n, lambda *_: sys.exit()) for n in (2, 15)]; "
WITH_HANDLERS = [*NOBODY[:2], HANDLERS + NOBODY[2]]


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    done = run_command([sys.executable, "-c", PROGRAM, scenario.__name__])
    assert done.returncode == 0, done.stderr


class Watched:
    """A tree whose main process has one child."""

    def __init__(self) -> None:
        self.deaths: list[str] = []
        self.is_gone = asyncio.Event()
        self.tree = Tree(
            self.deaths.append,
            lambda death: self.deaths.append(death.describe()),
            self.is_gone.set,
        )

    def start(self, command: Sequence[str] = NOBODY) -> Watched:
        self.tree.start(command, os.environ, subprocess.DEVNULL, [])
        until(lambda: len(procfs.descendants(os.getpid())) == 2, "the child")
        return self

    async def end(self) -> None:
        self.tree.kill()
        await asyncio.wait_for(self.is_gone.wait(), 30)
        assert procfs.descendants(os.getpid()) == []


def test_signals_of_a_host_that_stops_everything_reach_no_process_of_a_tree():
    """Goal: the supervisor decides when streams end. Method: SIGTERM and SIGINT to a backend that
    has handlers for both, as vLLM has, and to its child: both have them blocked, and the
    supervisor has not."""
    run(unreached)


async def unreached() -> None:
    watched = Watched().start(WITH_HANDLERS)
    for pid in procfs.descendants(os.getpid()):
        until(lambda pid=pid: not STARTING & blocked(pid), "the child to be executed")
        assert blocked(pid) == set(ENDING)
        for number in ENDING:
            os.kill(pid, number)
    watched.tree.scan()
    assert len(watched.tree.everyone()) == 2
    assert watched.deaths == []
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(ENDING)
    await watched.end()


def blocked(pid: int) -> set[int]:
    """The signals that the main thread of a process never receives."""
    with open(f"/proc/{pid}/status", encoding="ascii") as lines:
        bits = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}


def test_a_main_process_that_could_not_be_watched_is_killed():
    """Goal: no process outlives a launch that failed halfway. Method: fork succeeds and pidfd_open
    does not; then the tree is killed."""
    run(unwatched)


async def unwatched() -> None:
    watched, real = Watched(), os.pidfd_open

    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    os.pidfd_open = refuse
    try:
        with pytest.raises(OSError, match="Too many open files"):
            watched.start()
        await watched.end()
    finally:
        os.pidfd_open = real


def test_a_program_that_does_not_exist_is_a_usage_error():
    run(misnamed)


async def misnamed() -> None:
    with pytest.raises(UsageError):
        Watched().tree.start(["/no/such"], os.environ, subprocess.DEVNULL, [])
