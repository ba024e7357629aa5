"""One process that waits for a lock, holds it, and is killed: the same for every contender.

    python hack/bench_lock_party.py CONTENDER ADDRESS NAME

Writes lines of JSON: `{"waiting": …}` once it is in line, `{"granted_ns": …}` with CLOCK_MONOTONIC
as read when it knew that it holds the lock. Every contender's process imports the same few modules
at first, so that what is killed weighs the same and little (most of it is Python itself); what one
needs besides is imported where it is used.

Told by SIGUSR1 that it is about to be killed, a holder becomes `sleep`, with all that it holds: how
long Python takes to die is not the lock's.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time

from hack.bench_lock_clients import (
    ETCD_TTL_S,
    REDIS_PX_MS,
    REDIS_RETRY_S,
    Etcd,
    LockServerClient,
    Redis,
)

TYPE_CHECKING = False  # typing's own costs 1 MiB
if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 0.1  # NVIDIA Dynamo's flock, polled every 100 ms


def tell(key: str, value: int | list[int]) -> None:
    print(f'{{"{key}": {value}}}', flush=True)


def granted() -> None:
    tell("granted_ns", time.monotonic_ns())


def rest() -> None:
    """Hold it until killed."""
    while True:
        time.sleep(3600)


def shrinks(*fds: int) -> None:
    """On SIGUSR1 this process keeps `fds` and its pid, and has a sixth of its size."""
    for fd in fds:
        os.set_inheritable(fd, True)
    signal.signal(signal.SIGUSR1, lambda *_: os.execv("/bin/sleep", ["sleep", "3600"]))


def small(address: str, name: str) -> None:
    """One process that is supervisor and backend: it holds its witness itself, on descriptor 0."""
    client = LockServerClient(address, name)
    os.dup2(client.launch(), 0)
    shrinks(client.fileno())
    client.want("active")
    while True:
        heard = client.hear()
        if heard["type"] == "granted" and heard["incarnation"] == client.incarnation:
            granted()
            client.want("active", active=heard["token"])
        elif heard["type"] == "granted":
            tell("waiting", 1)


def supervisor(address: str, name: str) -> None:
    from hack import bench_lock_supervisor

    bench_lock_supervisor.alone(address, name, tell)


def tree(address: str, name: str) -> None:
    from hack import bench_lock_supervisor

    bench_lock_supervisor.tree(address, name, tell)


def handback(address: str, name: str) -> None:
    from hack import bench_lock_supervisor

    bench_lock_supervisor.handback(address, name, tell)


def flock(address: str, name: str) -> None:
    fd = os.open(address, os.O_RDWR | os.O_CREAT, 0o600)
    shrinks(fd)
    tell("waiting", 1)
    fcntl.flock(fd, fcntl.LOCK_EX)
    granted()
    rest()


def flock_poll(address: str, name: str) -> None:
    fd = os.open(address, os.O_RDWR | os.O_CREAT, 0o600)
    shrinks(fd)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            tell("waiting", 1)
            time.sleep(POLL_S)
    granted()
    rest()


def redis(address: str, name: str) -> None:
    port, _, key = address.partition("/")
    client, owner = Redis(int(port)), os.urandom(16).hex()
    while not client.try_acquire(key, owner):
        tell("waiting", 1)
        time.sleep(REDIS_RETRY_S)
    granted()
    while True:
        time.sleep(REDIS_PX_MS / 3 / 1000)
        client.renew(key, owner)


def etcd(address: str, name: str) -> None:
    import threading

    port, _, key = address.partition("/")
    client = Etcd(int(port))
    lease = client.lease()

    def keep_alive() -> None:
        keeper = Etcd(int(port))
        while True:
            time.sleep(ETCD_TTL_S / 3)
            keeper.keep_alive(lease)

    threading.Thread(target=keep_alive, daemon=True).start()
    tell("waiting", 1)
    client.acquire(key, lease)
    granted()
    rest()


PARTIES: dict[str, Callable[[str, str], None]] = {
    "unix": small,
    "unix_disk": small,
    "unix_python": small,
    "unix_supervisor": supervisor,
    "unix_tree": tree,
    "unix_handback": handback,
    "tcp": supervisor,
    "tcp_handback": handback,
    "flock": flock,
    "flock_python": flock,
    "flock_poll_100ms": flock_poll,
    "redis": redis,
    "etcd": etcd,
}

if __name__ == "__main__":
    PARTIES[sys.argv[1]](sys.argv[2], sys.argv[3])
