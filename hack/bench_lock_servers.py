"""The servers of the contenders, started on free ports in directories of their own.

Whether a contender can run here is asked with `missing`; `flock` needs no server at all.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from hack.bench_lock_clients import Etcd, LockServerClient, Redis
from plumbing import __version__
from plumbing.service import procfs
from plumbing.service.parent import environment
from tests.helpers import until
from tests.lockserver.processes import ServerProcess, free_port

MEMORY = "/dev/shm"  # as the pod's shared volume: an emptyDir of medium Memory
PROGRAMS = {"redis": "redis-server", "etcd": "etcd"}
PACKAGES = {"redis": "redis-server", "etcd": "etcd-server"}  # Debian's


@functools.cache
def missing(contender: str) -> str | None:
    """Why this contender cannot run here, or None: then its server was started once."""
    program = PROGRAMS.get(contender)
    if program is None:
        return None
    if shutil.which(program) is None:
        return f"{program} is not installed (Debian: apt-get install {PACKAGES[contender]})"
    try:
        with ExitStack() as stack:
            daemon = START[contender](folder(stack, on_disk=True), free_port())
            stack.callback(daemon.close)
            daemon.ready()
    except (AssertionError, OSError) as error:
        return f"{program} does not run here: {error}"
    return None


def folder(stack: ExitStack, *, on_disk: bool = False) -> str:
    """A directory of its own that goes with `stack`."""
    base = None if on_disk or not os.path.isdir(MEMORY) else MEMORY
    return stack.enter_context(tempfile.TemporaryDirectory(prefix="lock-", dir=base))


class Daemon:
    """A server's process, from its command until it is closed."""

    def __init__(self, command: list[str], answers: Callable[[], bool]) -> None:
        self._answers = answers
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment()},
        )

    def ready(self) -> None:
        until(self._is_up, f"{self.process.args!r} to answer")

    def _is_up(self) -> bool:
        code = self.process.poll()
        assert code is None, f"{self.process.args!r} has ended with code {code}"
        return self._answers()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def redis(directory: str, port: int) -> Daemon:
    """With its own defaults."""

    def answers() -> bool:
        with suppress(OSError):
            client = Redis(port)
            client("PING")
            client.close()
            return True
        return False

    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", directory]
    return Daemon(command, answers)


def etcd(directory: str, port: int) -> Daemon:
    """One member, with its own defaults."""

    def answers() -> bool:
        with suppress(OSError):
            client = Etcd(port)
            client("maintenance/status")
            client.close()
            return True
        return False

    url, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    flags = {
        "data-dir": os.path.join(directory, "etcd"),
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": peers,
        "initial-advertise-peer-urls": peers,
        "initial-cluster": f"default={peers}",
    }
    return Daemon(["etcd", *(f"--{name}={value}" for name, value in flags.items())], answers)


def lockserver(directory: str, *flags: str) -> ServerProcess:
    server = ServerProcess(directory, *flags)
    server.start()
    return server


START: dict[str, Callable[[str, int], Daemon]] = {"redis": redis, "etcd": etcd}


class Servers:
    """All servers of one run. `address` starts what is not there yet."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._shared: dict[str, int] = {}  # contender → port of the one server of all its lanes

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def address(self, contender: str, lane: int = 0) -> str:
        """What a party is told: PORT/KEY, a file, or the directory of a lock server of its own."""
        if contender in START:
            return f"{self._port(contender)}/lock-{lane}"
        directory = folder(self._stack, on_disk=contender == "unix_disk")
        if contender.startswith("tcp"):
            tcp = f"tcp://127.0.0.1:{free_port()}"
            self._stack.callback(lockserver(directory, "--listen", tcp).close)
            return tcp
        if contender.startswith("unix"):
            self._stack.callback(lockserver(directory).close)
            return directory
        return os.path.join(directory, "lock")

    def _port(self, contender: str) -> int:
        if contender not in self._shared:
            self._shared[contender] = free_port()
            directory = folder(self._stack, on_disk=True)
            daemon = START[contender](directory, self._shared[contender])
            self._stack.callback(daemon.close)
            daemon.ready()
        return self._shared[contender]


def versions() -> dict[str, str | None]:
    """Of everything that took part."""
    return {
        "understudy": __version__,
        "redis": _version("redis-server"),
        "etcd": _version("etcd"),
    }


def _version(program: str) -> str | None:
    if shutil.which(program) is None:
        return None
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.stdout else None


def start_to_grant(contender: str) -> tuple[float, float]:
    """From starting the server to the first lock held (ms), and its memory then (MiB)."""
    with ExitStack() as stack:
        directory = folder(stack, on_disk=contender in START)
        port, began = free_port(), time.monotonic()
        if contender in START:
            daemon: Any = START[contender](directory, port)
            stack.callback(daemon.close)
            pid = daemon.process.pid
            until(lambda: _acquires(contender, port, directory), f"a lock of {contender}")
        else:
            server = ServerProcess(directory)
            stack.callback(server.close)
            pid = server.spawn()
            until(lambda: _acquires(contender, port, directory), f"a lock of {contender}")
        took_ms = (time.monotonic() - began) * 1000
        return took_ms, (procfs.rss_bytes(pid) or 0) / 2**20


def _acquires(contender: str, port: int, directory: str) -> bool:
    """Whether the lock could be had just now; nobody else asks for it."""
    with suppress(OSError), ExitStack() as stack:
        if contender == "redis":
            redis_client = Redis(port)
            stack.callback(redis_client.close)
            return redis_client.try_acquire("lock", "me")
        if contender == "etcd":
            etcd_client = Etcd(port)
            stack.callback(etcd_client.close)
            return bool(etcd_client.acquire("lock", etcd_client.lease()))
        client = LockServerClient(directory, "engine-0")
        stack.callback(client.close)
        stack.callback(os.close, client.launch())
        client.want("active")
        while True:
            heard = client.hear()
            if heard["type"] == "granted":
                return bool(heard["incarnation"] == client.incarnation)
    return False
