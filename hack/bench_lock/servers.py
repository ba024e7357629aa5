"""The servers of the contenders, started on free ports in directories of their own.

`missing` tells whether a contender can run here; `flock` needs no server at all.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, closing, suppress

from hack.bench_lock.clients import Etcd, Redis
from hack.processes import LockServer, ProcessError, ServerProcess
from plumbing import __version__
from understudy.up.ports import free_ports

MEMORY = "/dev/shm"  # like the pod's shared volume: an emptyDir of medium Memory
PROGRAMS = {"redis": "redis-server", "etcd": "etcd"}
PACKAGES = {"redis": "redis-server", "etcd": "etcd-server"}  # Debian's


@functools.cache
def missing(contender: str) -> str | None:
    """Why this contender cannot run here; None if it can: its server was started once."""
    program = PROGRAMS.get(contender)
    if program is None:
        return None
    if shutil.which(program) is None:
        return f"{program} is not installed (Debian: apt-get install {PACKAGES[contender]})"
    try:
        with ExitStack() as stack:
            server, _ = make_server(contender, stack)
            server.start()
    except (ProcessError, OSError) as error:
        return f"{program} does not run here: {error}"
    return None


def folder(stack: ExitStack, *, on_disk: bool = False) -> str:
    """A new directory, removed with `stack`."""
    base = None if on_disk or not os.path.isdir(MEMORY) else MEMORY
    return stack.enter_context(tempfile.TemporaryDirectory(prefix="lock-", dir=base))


def lockserver(stack: ExitStack, directory: str, *flags: str) -> LockServer:
    """A running lock server, ended with `stack`."""
    server = LockServer(directory, *flags)
    stack.callback(server.close)
    server.start()
    return server


def make_server(contender: str, stack: ExitStack) -> tuple[ServerProcess, int]:
    """A server of Redis or etcd, not started yet and ended with `stack`; and its port."""
    (port,) = free_ports(1)
    server = {"redis": _redis, "etcd": _etcd}[contender](folder(stack, on_disk=True), port)
    stack.callback(server.kill)
    return server, port


def _redis(directory: str, port: int) -> ServerProcess:
    """With its own defaults."""
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", directory]
    return ServerProcess(command, lambda: _answers(Redis, port))


def _etcd(directory: str, port: int) -> ServerProcess:
    """One member, with its own defaults."""
    (peer_port,) = free_ports(1)
    url, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    flags = {
        "data-dir": os.path.join(directory, "etcd"),
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": peers,
        "initial-advertise-peer-urls": peers,
        "initial-cluster": f"default={peers}",
    }
    command = ["etcd", *(f"--{name}={value}" for name, value in flags.items())]
    return ServerProcess(command, lambda: _answers(Etcd, port))


def _answers(kind: type[Redis] | type[Etcd], port: int) -> bool:
    with suppress(OSError), closing(kind(port)) as client:
        client.ping()
        return True
    return False


class Servers:
    """All servers of one run; `address` starts those that do not run yet."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._ports: dict[str, int] = {}  # of the one server that all lanes of a contender share

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def address(self, contender: str, lane: int = 0) -> str:
        """What a holder is given: PORT/KEY, a file, or the directory or URL of a lock server.

        Raises:
            ProcessError: the server does not start.
        """
        if contender in PROGRAMS:
            if contender not in self._ports:
                server, port = make_server(contender, self._stack)
                server.start()
                self._ports[contender] = port
            return f"{self._ports[contender]}/lock-{lane}"
        directory = folder(self._stack, on_disk=contender == "unix_disk")
        if contender.startswith("tcp"):
            url = f"tcp://127.0.0.1:{free_ports(1)[0]}"
            lockserver(self._stack, directory, "--listen", url, "--listen-insecure")
            return url
        if contender.startswith("unix"):
            lockserver(self._stack, directory)
            return directory
        return os.path.join(directory, "lock")


def versions() -> dict[str, str | None]:
    """The versions of all contenders."""
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
