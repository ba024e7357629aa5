"""What tests share: waiting with a deadline, counting descriptors, making a free witness."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lockserver import witness
from plumbing.service import procfs
from plumbing.wire.fds import OwnedFd, close_all

T = TypeVar("T")

# Below the kernel's range for automatic ports: nobody else is given one while a test's server is
# not up yet, or dead.
PORTS = range(15_000, 32_000)
STEADY_LOOKS = 25
COMMAND_S = 600.0  # of a command that a test runs; a hang is a failure
POLL_S = 0.002  # short enough that a test costs little more than what it waits for


def until(predicate: Callable[[], T], what: str, deadline_s: float = 30.0) -> T:
    """Poll until `predicate()` is truthy and return its value; fail with `what` at the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:g} s in vain for {what}")
        time.sleep(POLL_S)


async def auntil(predicate: Callable[[], T], what: str, deadline_s: float = 30.0) -> T:
    """`until` for tests on an event loop: the loop runs between two polls."""
    end = time.monotonic() + deadline_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:g} s in vain for {what}")
        await asyncio.sleep(POLL_S)


_ports_given: set[int] = set()


def free_ports(in_a_row: int) -> int:
    """The first of so many free ports, none of which was given to anybody before in this run: the
    kernel may give the same one twice where the first is not bound yet."""
    while True:
        first = random.choice(PORTS)
        wanted = set(range(first, first + in_a_row))
        if not wanted & _ports_given and all(map(_is_free, wanted)):
            _ports_given.update(wanted)
            return first


def free_port() -> int:
    return free_ports(1)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def run_command(words: Sequence[str | Path], **how: Any) -> subprocess.CompletedProcess[str]:
    """Its exit code, and what it said on both streams."""
    how = {"timeout": COMMAND_S, **how}
    return subprocess.run(words, capture_output=True, text=True, check=False, **how)


def open_fds(pid: int | None = None) -> dict[int, str]:
    """Every open descriptor of `pid` (default: this process) and what it points at."""
    base = f"/proc/{pid or os.getpid()}/fd"
    found = {}
    for name in os.listdir(base):
        try:
            found[int(name)] = os.readlink(f"{base}/{name}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


def steady_fds(pid: int) -> set[int]:
    """The numbers of the descriptors that `pid` keeps: open in each of many looks, so without what
    it opens for a moment."""
    kept = set(open_fds(pid))
    for _ in range(STEADY_LOOKS):
        time.sleep(POLL_S)
        kept &= open_fds(pid).keys()
    return kept


def is_over(pid: int) -> bool:
    """Whether `pid` can do nothing any more: it has ended, or is dying and has released all that it
    had, which is what the next engine waits for. The rest may wait for a CPU."""
    return not procfs.is_alive(pid) or procfs.is_spent(pid)


@contextmanager
def busy_loops(per_core: int) -> Iterator[None]:
    """Busy loops at this process's priority. Each has a session of its own: where the kernel shares
    CPUs out by session (sched_autogroup), loops of one session would count as a single program."""
    command = ("setpriv", "--pdeathsig", "KILL", "sh", "-c", "while :; do :; done")
    with ExitStack() as stack:
        for _ in range(per_core * len(os.sched_getaffinity(0))):
            loop = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            stack.enter_context(loop)  # reaps it
            stack.callback(loop.kill)
        yield


@contextmanager
def descriptors_below(limit: int) -> Iterator[None]:
    """This process may open no descriptor from `limit` on; with 3 it may open none at all."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def free_witness(directory: str, incarnation: str) -> str:
    """The path of a new witness that nobody holds yet: whom a test starts is to join it."""
    path, fd = witness.create(directory, incarnation)
    os.close(fd)
    return path


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """Room for `count` more descriptors in this process, and no more."""
    filler = [OwnedFd(os.memfd_create("filler")) for _ in range(30)]
    free = [filler.pop() for _ in range(count)]
    limit = max(fd.fileno() for fd in [*filler, *free]) + 1
    close_all(free)
    try:
        with descriptors_below(limit):
            yield
    finally:
        close_all(filler)
