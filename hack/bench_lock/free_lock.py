"""A lock that nobody else wants: how long to acquire it, how often per second, and how long from
the start of a server to the first lock held.

One client acquires and releases one lock. Between two acquisitions a record of the same size is
written and synced in the same kind of directory, for comparison: a grant of `active` is one such
write and a round trip.
"""

from __future__ import annotations

import fcntl
import os
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from hack.bench_lock.clients import Etcd, LockServerClient, Redis
from hack.bench_lock.servers import PROGRAMS, folder, lockserver, make_server
from hack.processes import LockServer, ServerProcess, until
from hack.report import spread
from plumbing.service.files import SlotFile, SlotFormat

CONTENDERS = ("unix", "unix_disk", "unix_loader", "flock", "redis", "etcd")
STARTED = ("unix", "redis", "etcd")
RECORD = b"{%s}" % (b" " * 600)  # as long as the lock server's own with two holders
SYNCS = "understudy_lock_state_sync_duration_seconds_count"


@dataclass(frozen=True)
class Client:
    """One contender's only client."""

    prepare: Callable[[], object]
    acquire: Callable[[], object]
    release: Callable[[], object]


def measure(name: str, cycles: int) -> dict[str, Any]:
    """The figures of one contender, by the table's names.

    Raises:
        ProcessError, OSError: its server does not start or ends.
    """
    with ExitStack() as stack:
        client, server = stack.enter_context(_client_and_server(name))
        directory = folder(stack, on_disk=name == "unix_disk")
        before = _syncs(server)
        acquired_ms, written_ms = _alternate(client, directory, cycles)
        per_s = round(_rate(client, cycles))
        found = {"acquire_ms": spread(acquired_ms, 3), "acquire_and_release_per_s": per_s}
        if server is not None:
            found["durable_write_ms"] = spread(written_ms, 3)
            found["writes_per_grant"] = (_syncs(server) - before) / (2 * cycles)
        return found


def start_to_grant(name: str) -> tuple[float, float]:
    """From starting the server to the first lock held (ms), and its memory then (MiB).

    Raises:
        ProcessError, OSError: it does not start, or gives no lock.
    """
    with ExitStack() as stack:
        directory, port = folder(stack), 0
        server: ServerProcess = LockServer(directory)
        if name in PROGRAMS:
            server, port = make_server(name, stack)
        stack.callback(server.close)
        began = time.monotonic()
        server.spawn()

        def is_acquired() -> bool:
            with suppress(OSError), ExitStack() as attempt:
                client = _client(name, directory, port, attempt)
                client.prepare()
                client.acquire()
                attempt.callback(client.release)
                return True
            return False

        until(is_acquired, f"lock of {name}")
        return (time.monotonic() - began) * 1000, server.rss_mib


def _alternate(client: Client, directory: str, cycles: int) -> tuple[list[float], list[float]]:
    """How long each acquisition took, and each durable write between them (ms)."""
    path = os.path.join(directory, "slots")
    form = SlotFormat("bench 1")
    form.create(path, RECORD)
    slots = SlotFile(path, form)
    took_ms: dict[str, list[float]] = defaultdict(list)

    def timed(what: str, action: Callable[[], object]) -> None:
        began = time.perf_counter()
        action()
        took_ms[what].append((time.perf_counter() - began) * 1000)

    for _ in range(cycles):
        client.prepare()
        timed("acquire", client.acquire)
        client.release()
        timed("write", lambda: slots.write(RECORD))
    slots.close()
    return took_ms["acquire"], took_ms["write"]


def _rate(client: Client, cycles: int) -> float:
    began = time.perf_counter()
    for _ in range(cycles):
        client.prepare()
        client.acquire()
        client.release()
    return cycles / (time.perf_counter() - began)


def _syncs(server: LockServer | None) -> float:
    """How many times the lock server has written its state."""
    if server is None:
        return 0.0
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics") as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(SYNCS))


# ---------------------------------------------------------------------- one client of each


@contextmanager
def _client_and_server(name: str) -> Iterator[tuple[Client, LockServer | None]]:
    with ExitStack() as stack:
        if name in PROGRAMS:
            server, port = make_server(name, stack)
            server.start()
            yield _client(name, "", port, stack), None
        else:
            directory = folder(stack, on_disk=name == "unix_disk")
            ours = lockserver(stack, directory) if name.startswith("unix") else None
            yield _client(name, directory, 0, stack), ours


def _client(name: str, directory: str, port: int, stack: ExitStack) -> Client:
    """The client of contender `name`, closed with `stack`."""
    if name.startswith("unix"):
        return _lock_server_client(name, directory, stack)
    if name == "flock":
        fd = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        stack.callback(os.close, fd)
        flock = partial(fcntl.flock, fd)
        return Client(_nothing, lambda: flock(fcntl.LOCK_EX), lambda: flock(fcntl.LOCK_UN))
    if name == "redis":
        redis = Redis(port)
        stack.callback(redis.close)
        return Client(
            _nothing,
            lambda: redis.try_acquire("lock", "me"),
            lambda: redis.release("lock", "me"),
        )
    etcd = Etcd(port)
    stack.callback(etcd.close)
    lease, keys = etcd.lease(), list[str]()
    return Client(
        _nothing,
        lambda: keys.append(etcd.acquire("lock", lease)),
        lambda: etcd.release(keys.pop()),
    )


def _nothing() -> None:
    """No preparation."""


def _lock_server_client(name: str, directory: str, stack: ExitStack) -> Client:
    """`active` with a new incarnation each time, as each launch has one; `loader` with the same."""
    client = LockServerClient(directory, "engine-0")
    stack.callback(client.close)
    lock = "loader" if name == "unix_loader" else "active"
    held: list[int] = []

    def prepare() -> None:
        if not held:
            held.append(client.launch())

    def acquire() -> None:
        client.want(lock)
        while client.receive().get("incarnation") != client.incarnation:
            pass

    def release() -> None:
        if lock == "active":
            os.close(held.pop())  # as when the last process that holds the witness ends
            client.incarnation = client.witness = ""
        client.want()

    return Client(prepare, acquire, release)
