"""A lock that nobody else wants: how long to acquire it, and how often per second.

One client, one lock, acquire and release in turns. Between two acquisitions a record of the same
size is written and synced in the same kind of directory, so that the two can be compared: a grant
of `active` is one such write and a round trip.
"""

from __future__ import annotations

import fcntl
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from hack.bench_lock_clients import Etcd, LockServerClient, Redis
from hack.bench_lock_servers import START, folder, lockserver, missing
from hack.bench_lock_trees import spread
from plumbing.service.slots import SlotFile, SlotFormat
from tests.lockserver.processes import ServerProcess, free_port

CONTENDERS = ("unix", "unix_disk", "unix_loader", "flock", "redis", "etcd")
RECORD = b"{%s}" % (b" " * 600)  # as long as the lock server's own with two holders
SYNCS = "understudy_lock_state_sync_duration_seconds_count"


@dataclass(frozen=True)
class Holder:
    """One contender's only client."""

    prepare: Callable[[], object]
    acquire: Callable[[], object]
    release: Callable[[], object]
    on_disk: bool = True


def measure(cycles: int) -> dict[str, Any]:
    acquire_ms: dict[str, Any] = {}
    cycles_per_s: dict[str, Any] = {}
    write_ms: dict[str, Any] = {}
    writes_per_grant: dict[str, Any] = {}
    for name in CONTENDERS:
        if missing(name):
            acquire_ms[name] = cycles_per_s[name] = None
            continue
        with ExitStack() as stack:
            holder, server = stack.enter_context(_holder(name))
            directory = folder(stack, on_disk=holder.on_disk)
            before = _syncs(server)
            acquired, written = _alternate(holder, directory, cycles)
            cycles_per_s[name] = round(_rate(holder, cycles))
            acquire_ms[name] = spread(acquired, 3)
            if server is not None:
                write_ms[name] = spread(written, 3)
                writes_per_grant[name] = (_syncs(server) - before) / (2 * cycles)
    return {
        "acquire_ms": acquire_ms,
        "durable_write_ms": write_ms,
        "writes_per_grant": writes_per_grant,
        "acquire_and_release_per_s": cycles_per_s,
    }


def _alternate(holder: Holder, directory: str, cycles: int) -> tuple[list[float], list[float]]:
    """How long each acquisition took, and each durable write between them (ms)."""
    path = os.path.join(directory, "slots")
    form = SlotFormat("bench 1")
    form.create(path, RECORD)
    slots = SlotFile(path, form)
    acquired, written = [], []
    for _ in range(cycles):
        holder.prepare()
        acquired.append(_took_ms(holder.acquire))
        holder.release()
        written.append(_took_ms(lambda: slots.write(RECORD)))
    slots.close()
    return acquired, written


def _took_ms(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1000


def _rate(holder: Holder, cycles: int) -> float:
    began = time.perf_counter()
    for _ in range(cycles):
        holder.prepare()
        holder.acquire()
        holder.release()
    return cycles / (time.perf_counter() - began)


def _syncs(server: ServerProcess | None) -> float:
    """How many times the lock server has written its state."""
    if server is None:
        return 0.0
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics") as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(SYNCS))


# ---------------------------------------------------------------------- one client of each


@contextmanager
def _holder(name: str) -> Iterator[tuple[Holder, ServerProcess | None]]:
    with ExitStack() as stack:
        if name.startswith("unix"):
            directory = folder(stack, on_disk=name == "unix_disk")
            server = lockserver(directory)
            stack.callback(server.close)
            client = LockServerClient(directory, "engine-0")
            stack.callback(client.close)
            yield _ours(client, name), server
        elif name == "flock":
            path = os.path.join(folder(stack), "lock")
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            stack.callback(os.close, fd)
            take = partial(fcntl.flock, fd, fcntl.LOCK_EX)
            give = partial(fcntl.flock, fd, fcntl.LOCK_UN)
            yield Holder(_nothing, take, give), None
        else:
            port = free_port()
            daemon = START[name](folder(stack, on_disk=True), port)
            stack.callback(daemon.close)
            daemon.ready()
            yield _theirs(name, port, stack), None


def _nothing() -> None:
    """No preparation."""


def _ours(client: LockServerClient, name: str) -> Holder:
    """`active` with a new incarnation each time, as each launch has one; `loader` with the same."""
    lock = "loader" if name == "unix_loader" else "active"
    held: list[int] = []

    def prepare() -> None:
        if not held:
            held.append(client.launch())

    def acquire() -> None:
        client.want(lock)
        while client.hear().get("incarnation") != client.incarnation:
            pass

    def release() -> None:
        if lock == "active":
            os.close(held.pop())  # as the end of the last process that held the witness
            client.incarnation = client.witness = ""
        client.want()

    return Holder(prepare, acquire, release, on_disk=name == "unix_disk")


def _theirs(name: str, port: int, stack: ExitStack) -> Holder:
    if name == "redis":
        redis = Redis(port)
        stack.callback(redis.close)
        return Holder(
            _nothing,
            lambda: redis.try_acquire("lock", "me"),
            lambda: redis.release("lock", "me"),
        )
    etcd = Etcd(port)
    stack.callback(etcd.close)
    lease, keys = etcd.lease(), list[str]()
    return Holder(
        _nothing,
        lambda: keys.append(etcd.acquire("lock", lease)),
        lambda: etcd.release(keys.pop()),
    )
