"""What is measured: the gateway's child in front of the stub, and whole pods with and without one.

The child is the real one, `python -m gateway.server`, and this process plays its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from gateway import messages as msg
from gateway.supervisor.child import COMMAND, ChildLink
from hack.bench_gateway import ENGINE, TOKEN
from hack.processes import LockServer, ServerProcess, until
from plumbing.part.paths import engine_http_socket
from plumbing.service import procfs
from plumbing.service.clock import SystemClock
from plumbing.service.process import parent_environment
from plumbing.wire.fds import OwnedFd
from understudy.up.ports import free_ports

BACKLOG = 4096
START_S = 60.0
IDLE_S = 0.1  # less than the half second between two beats


Address: TypeAlias = "int | str"  # a port on the loopback, or the path of a Unix socket


class Door(Protocol):
    """A process that clients connect to."""

    @property
    def address(self) -> Address: ...

    @property
    def pid(self) -> int: ...


@dataclass
class Usage:
    """What a process took while it passed events on: the sum of the times between begin and end."""

    events: int = 0
    wall_ms: float = 0.0
    cpu_ms: float = 0.0  # of the thread that has the loop, to the nanosecond
    waited_ms: float = 0.0  # for a CPU, which others had
    writes: int = 0  # system calls; where a process lags, one passes several events on

    def begin(self, door: Door, events: int = 0) -> None:
        self._add(door, events, -1)

    def end(self, door: Door, events: int = 0) -> None:
        self._add(door, events, 1)

    @property
    def cpu_us_per_event(self) -> float:
        return round(self.cpu_ms * 1000 / self.events, 2)

    @property
    def cores(self) -> float:
        return round(self.cpu_ms / self.wall_ms, 2)

    @property
    def events_per_s(self) -> float:
        return self.events * 1000 / self.wall_ms

    def _add(self, door: Door, events: int, sign: int) -> None:
        found = procfs.cpu_times(door.pid)
        assert found is not None
        self.events += sign * events
        self.wall_ms += sign * time.monotonic() * 1000
        self.cpu_ms += sign * found[1]
        self.waited_ms += sign * found[2]
        self.writes += sign * _writes(door.pid)


def _writes(pid: int) -> int:
    """How often it has called `write` (man 5 proc); not `sendmsg` and its like."""
    found = re.search(r"^syscw: (\d+)$", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


class BenchChild:
    """The serving child; it accepts at `address`: a port of its own unless set."""

    def __init__(self, directory: str, cert: str = "", key: str = "", address: Address = 0) -> None:
        self._settings = msg.ConfigureGatewayMsg(
            directory=os.fsencode(directory),
            hold_ms=10_000,
            park_timeout_ms=300_000,
            resumes_max=8,
            memory_bytes=1 << 30,
            keepalive_comments_ms=0,
            access_log=False,
            tls_cert=cert,
            tls_key=key,
        )
        self._link = ChildLink(1, self, SystemClock())
        self._beat = asyncio.Event()
        self.address = address or free_ports(1)[0]

    @property
    def pid(self) -> int:
        return self._link.pid

    async def start(self) -> None:
        """Let it accept, and grant the lock to the stub."""
        self._link.start(COMMAND, self._settings)
        await self._next_beat()
        with _bound(self.address) as door:
            door.listen(BACKLOG)
            door.setblocking(False)
            self._link.send(msg.AcceptMsg("bench"), [OwnedFd(os.dup(door.fileno()))])
        self._link.send(msg.GrantMsg(ENGINE, TOKEN, "0" * 16))
        while not (self._link.beat and self._link.beat.upstream and self._link.beat.is_accepting):
            await self._next_beat()

    def rss_kib(self) -> float:
        return (procfs.rss_bytes(self.pid) or 0) / 1024

    async def close(self) -> None:
        self._link.kill()
        assert self._link.process is not None
        await self._link.process.wait()

    async def _next_beat(self) -> None:
        self._beat.clear()
        async with asyncio.timeout(START_S):
            await self._beat.wait()

    # What `ChildOwner` asks for.

    def beaten(self, link: ChildLink) -> None:
        self._beat.set()

    def demanded(self, link: ChildLink, demand: msg.ModelDemandMsg) -> None:
        """There is no pool here."""

    def happened(self, link: ChildLink, event: msg.GatewayEventMsg) -> None:
        pass

    def ended(self, link: ChildLink) -> None:
        self._beat.set()

    def read_out(self, link: ChildLink) -> None:
        pass


class Beside(ServerProcess):
    """A program between the stub's socket and clients, or the stub itself, with a port of its own
    unless `address` is set."""

    def __init__(self, program: Sequence[str], path: str, address: Address = 0) -> None:
        self.address = address or free_ports(1)[0]
        command = [*program, path, str(self.address)]
        super().__init__(command, lambda: os.path.exists(path) and _is_open(self.address))


class OverUnix(NamedTuple):
    """The same, with clients on Unix sockets: what they take without TCP."""

    child: BenchChild
    compiled: Beside | None


class Doors(NamedTuple):
    """The ways to the stub: through the gateway, through the proxies that only copy (`compiled`:
    the one in C, where there is a compiler), past all of them."""

    child: BenchChild
    copier: Beside
    compiled: Beside | None
    stub: Beside
    over_unix: OverUnix

    def all(self) -> list[Door]:
        every = (self.child, self.copier, self.compiled, self.stub, *self.over_unix)
        return [door for door in every if door is not None]


@contextlib.asynccontextmanager
async def doors_of_stub(directory: str) -> AsyncIterator[Doors]:
    path = engine_http_socket(directory, ENGINE)
    copier, stub = (
        Beside((sys.executable, "-m", f"hack.bench_gateway.{name}"), path)
        for name in ("copier", "stub")
    )
    program = _compile(directory)
    one, two = (os.path.join(directory, f"clients-{number}.sock") for number in (1, 2))
    compiled = Beside(program, path) if program else None
    over_unix = OverUnix(
        BenchChild(directory, address=one), Beside(program, path, two) if program else None
    )
    doors = Doors(BenchChild(directory), copier, compiled, stub, over_unix)
    processes = [each for each in (stub, copier, compiled, over_unix.compiled) if each]
    children = (doors.child, over_unix.child)
    try:
        for process in processes:
            process.start()
        for child in children:
            await child.start()
        yield doors
    finally:
        for child in children:
            await child.close()
        for process in processes:
            process.kill()


def _compile(directory: str) -> list[str]:
    """The command of `copier.c`; none without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return []
    program = os.path.join(directory, "copier")
    source = Path(__file__).with_name("copier.c")
    subprocess.run([compiler, "-O2", "-o", program, str(source)], check=True)
    return [program]


def _bound(address: Address) -> socket.socket:
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(address)
        return sock
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", address))
    return sock


@contextlib.asynccontextmanager
async def secure_child(directory: str) -> AsyncIterator[tuple[BenchChild, ssl.SSLContext]]:
    """Another child, in front of the same stub, that serves TLS; and what its clients trust."""
    cert, key = (os.path.join(directory, name) for name in ("cert.pem", "key.pem"))
    words = "req -x509 -nodes -days 2 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    command = ["openssl", *words.split(), "-keyout", key, "-out", cert, "-subj", "/CN=bench"]
    await asyncio.to_thread(
        subprocess.run,
        [*command, "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )
    child = BenchChild(directory, cert, key)
    try:
        await child.start()
        yield child, ssl.create_default_context(cafile=cert)
    finally:
        await child.close()


def _is_open(address: Address) -> bool:
    if isinstance(address, str):
        with socket.socket(socket.AF_UNIX) as sock:
            return sock.connect_ex(address) == 0
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", address)) == 0


@contextlib.contextmanager
def pod(directory: Path, *flags: str, arguments: Sequence[str] = ()) -> Iterator[int]:
    """`understudy up` with the reference backend, which is told `arguments`; the port of its
    service."""
    service, lock, gms, gate, *engines = free_ports(6)
    ports = {"service": service, "lockserver": lock, "gms": gms, "gateway": gate}
    command = [sys.executable, "-m", "understudy.cli.main", "up", "--dir", str(directory), *flags]
    command += [word for name, port in ports.items() for word in (f"--{name}-port", str(port))]
    command += [word for port in engines for word in ("--engine-port", str(port))]
    command += ["--", *arguments]
    with open(directory.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **parent_environment()}
        )
    try:
        until(lambda: _is_ready(lock), f"pod in {directory}", START_S)
        yield service
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _is_ready(port: int) -> bool:
    """Whether an engine is active: the lock server's probe says so."""
    with socket.socket() as sock:
        if sock.connect_ex(("127.0.0.1", port)) != 0:
            return False
        sock.settimeout(START_S)
        sock.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b" 200 " in sock.recv(64)


def idle_rss_mib(directory: str) -> dict[str, float]:
    """Resident memory of an idle `gateway serve`: parent, serving child, spare."""
    (service, http) = free_ports(2)
    lock = LockServer(directory, "--service", f"active=127.0.0.1:{service}", "--no-direct")
    lock.start()
    command = [sys.executable, "-m", "gateway.cli", "serve", "--dir", directory]
    gateway = ServerProcess(
        [*command, "--http-port", str(http)], lambda: len(procfs.children(gateway.pid)) == 2
    )
    try:
        gateway.start()
        # The spare's import is over once neither of them works any more.
        until(lambda: _are_idle(procfs.children(gateway.pid)), "two idle children")
        sizes = [procfs.rss_bytes(pid) or 0 for pid in (gateway.pid, *procfs.children(gateway.pid))]
    finally:
        gateway.close()
        lock.close()
    parent, *children = (round(size / 2**20, 1) for size in sizes)
    return {"parent": parent, "serving": max(children), "spare": min(children)}


def _are_idle(pids: list[int]) -> bool:
    """Whether there are two, and none has taken CPU for a moment."""
    before = _cpu_ms(pids)
    time.sleep(IDLE_S)
    return len(pids) == 2 and _cpu_ms(pids) == before


def _cpu_ms(pids: list[int]) -> list[float]:
    return [found[1] for pid in pids if (found := procfs.cpu_times(pid))]
