"""One process that waits for a lock, holds it, and is killed: the same for every contender.

    python hack/bench_lock/holder.py CONTENDER ADDRESS NAME

Writes lines of JSON: `{"waiting": …}` once it is queued, `{"granted_ns": …}` with CLOCK_MONOTONIC
when it knew that it holds the lock, `{"backends": [pid, …]}` if it has any. Every contender's
process imports the same few modules first, so that what is killed is equally small (most of it is
Python itself); what one contender needs besides is imported where it is used.

On SIGUSR1, sent just before the kill, a holder becomes `sleep` with all that it holds: the bench
must not measure how long Python takes to die.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time

from hack.bench_lock.clients import (
    ETCD_TTL_S,
    REDIS_PX_MS,
    REDIS_RETRY_S,
    Etcd,
    LockServerClient,
    Redis,
)

TYPE_CHECKING = False  # importing typing costs 1 MiB
if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 0.1  # as NVIDIA Dynamo polls its flock


def report(key: str, value: int | list[int]) -> None:
    print(f'{{"{key}": {value}}}', flush=True)


def report_granted() -> None:
    report("granted_ns", time.monotonic_ns())


def rest() -> None:
    """Hold the lock until killed."""
    while True:
        time.sleep(3600)


def shrink_on_signal(*fds: int) -> None:
    """On SIGUSR1 this process keeps `fds` and its pid, and a sixth of its size."""
    for fd in fds:
        os.set_inheritable(fd, True)
    signal.signal(signal.SIGUSR1, lambda *_: os.execv("/bin/sleep", ["sleep", "3600"]))


def small(address: str, name: str) -> None:
    """A supervisor that is its own backend: it holds its witness on descriptor 0."""
    client = LockServerClient(address, name)
    os.dup2(client.launch(), 0)
    shrink_on_signal(client.fileno())
    client.want("active")
    while True:
        message = client.receive()
        if message["type"] == "granted" and message["incarnation"] == client.incarnation:
            report_granted()
            client.want("active", active=message["token"])
        elif message["type"] == "granted":
            report("waiting", 1)


def supervisor(address: str, name: str) -> None:
    from hack.bench_lock import supervisors

    supervisors.alone(address, name, report)


def tree(address: str, name: str) -> None:
    from hack.bench_lock import supervisors

    supervisors.tree(address, name, report)


def large_tree(address: str, name: str) -> None:
    from hack.bench_lock import supervisors

    supervisors.tree(address, name, report, dirty_mib=supervisors.LARGE_MIB)


def handback(address: str, name: str) -> None:
    from hack.bench_lock import supervisors

    supervisors.handback(address, name, report)


def flock(address: str, name: str) -> None:
    fd = os.open(address, os.O_RDWR | os.O_CREAT, 0o600)
    shrink_on_signal(fd)
    report("waiting", 1)
    fcntl.flock(fd, fcntl.LOCK_EX)
    report_granted()
    rest()


def flock_poll(address: str, name: str) -> None:
    fd = os.open(address, os.O_RDWR | os.O_CREAT, 0o600)
    shrink_on_signal(fd)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            report("waiting", 1)
            time.sleep(POLL_S)
    report_granted()
    rest()


def redis(address: str, name: str) -> None:
    port, _, key = address.partition("/")
    client, owner = Redis(int(port)), os.urandom(16).hex()
    while not client.try_acquire(key, owner):
        report("waiting", 1)
        time.sleep(REDIS_RETRY_S)
    report_granted()
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
    report("waiting", 1)
    client.acquire(key, lease)
    report_granted()
    rest()


HOLDERS: dict[str, Callable[[str, str], None]] = {
    "unix": small,
    "unix_disk": small,
    "unix_python": small,
    "unix_supervisor": supervisor,
    "unix_tree": tree,
    "unix_large_tree": large_tree,
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
    HOLDERS[sys.argv[1]](sys.argv[2], sys.argv[3])
