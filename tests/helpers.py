"""What tests share: waiting with a deadline, counting descriptors, making a free witness."""

from __future__ import annotations

import asyncio
import functools
import http.client
import inspect
import itertools
import os
import random
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lockserver import witness
from plumbing.service import procfs

T = TypeVar("T")

# Runs a command as PID 1 of a namespace, which ends with `unshare`.
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

# Below the kernel's range for automatic ports: nobody else is given one while a test's server is
# not up yet, or dead.
PORTS = range(15_000, 32_000)
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


def http_get(port: int, path: str) -> tuple[int, str]:
    """Status and body of what a part on this host answers."""
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with closing(conn):
        conn.request("GET", path)
        reply = conn.getresponse()
        return reply.status, reply.read().decode()


@functools.cache
def can_unshare() -> bool:
    """Whether this machine lets a test make a PID namespace."""
    return shutil.which("unshare") is not None and not run_command([*NAMESPACE, "true"]).returncode


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


def is_over(pid: int) -> bool:
    """Whether `pid` can do nothing any more: it has ended, or is dying and has released all that it
    had, which is what the next engine waits for. The rest may wait for a CPU."""
    return not procfs.is_alive(pid) or procfs.is_spent(pid)


class LoopThread:
    """An event loop on a thread, for a server beside a test that blocks."""

    def __init__(self, new_loop: Callable[[], Any] = asyncio.new_event_loop) -> None:
        self.loop = new_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        async def there() -> Any:
            return function(*args)

        return self.run(there())

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()


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
def descriptors_below(limit: int, pid: int | None = None) -> Iterator[None]:
    """`pid`, or this process, may open no descriptor from `limit` on; with 3 it may open none."""
    target = pid or os.getpid()
    before = resource.prlimit(target, resource.RLIMIT_NOFILE)
    resource.prlimit(target, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(target, resource.RLIMIT_NOFILE, before)


def free_witness(directory: str, incarnation: str) -> str:
    """The path of a new witness that nobody holds yet: whom a test starts is to join it."""
    path, fd = witness.create(directory, incarnation)
    os.close(fd)
    return path


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """Room for `count` more descriptors in this process, and no more."""
    used = open_fds()
    free = (number for number in itertools.count() if number not in used)
    with descriptors_below(next(itertools.islice(free, count, None))):
        yield


def on_loop_of(
    fixture: str, name: str, run: Callable[[Any, Callable[[Any], Awaitable[None]]], None]
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """A test that is `async def test(NAME, …)`: `run` makes NAME from this fixture, and a loop.
    The other parameters are fixtures."""

    def decorate(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        takes = inspect.signature(scenario)

        def test(**given: Any) -> None:
            run(given.pop(fixture), lambda made: scenario(**{name: made}, **given))

        found: Any = functools.update_wrapper(test, scenario)
        del found.__wrapped__  # pytest would ask that one for its fixtures
        parameters = takes.parameters.values()
        found.__signature__ = takes.replace(
            parameters=[
                each.replace(name=fixture) if each.name == name else each for each in parameters
            ]
        )
        return found

    return decorate
