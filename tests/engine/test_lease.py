"""Engines whose lock is over TCP: each serves on an address of its own, never longer than its lease
allows, and a lost one is replaced once it is over.

First with a server of the real messages that does what each test says, then with a real one. All
processes are on one machine with one clock, so what happened first can be read from the events of
both sides. The loss of a whole node is `tests/e2e/test_lock_over_nodes.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engine import cli
from engine import messages as m
from lockserver import witness
from lockserver.messages import CATALOGUE
from lockserver.messages import EventMsg as LockEvent
from lockserver.messages import WatchMsg as LockWatch
from plumbing.errors import WaitTimeoutError
from plumbing.service import procfs
from plumbing.wire.blocking import BlockingClient
from tests.engine.pod import Engine, LoopThread, Pod
from tests.helpers import free_port, free_witness, until
from tests.lockserver.lease_server import LeaseServer
from tests.lockserver.processes import ServerProcess
from tests.plumbing.wire.certificates import shared, tls_flags

LEASE_MS = 3000  # a machine with much to do stops a process for a second
LONG_LEASE_MS = 60_000  # where no lease may run out, however busy the machine is
MARGIN_MS = 400

Record = dict[str, Any]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def server(loop) -> Iterator[LeaseServer]:
    """Grants `active` and `loader` to every engine that wants them."""
    made = LeaseServer(LEASE_MS, auto=("active", "loader"))
    loop.run(made.start())
    yield made
    loop.run(made.stop())


def over_tcp(address: str, pod: Pod) -> tuple[str, ...]:
    """Flags of an engine that finds its lock server at `address`."""
    host, port = pod.address
    return (
        *("--lockserver-socket", address, *tls_flags(shared(), "lockserver-")),
        *("--service-address", f"{host}:{port}"),
    )


def accepts(pod: Pod) -> bool:
    try:
        socket.create_connection(pod.address).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture
def engine(pod, server) -> Engine:
    """engine-0, active, with two processes."""
    made = pod.engine("engine-0", "--grandchild", "joined", flags=over_tcp(server.address, pod))
    made.until("active")
    return made


def test_serves_on_its_own_address_only_while_it_is_active(pod, server, loop):
    """Goal: without a lent socket an engine binds its address itself, when it is to wake, and
    closes it once it is reaped. Method: look before, while and after it is active."""
    server.auto = ()
    engine = pod.engine("engine-0", flags=over_tcp(server.address, pod))
    status = engine.until("standby")
    assert not accepts(pod)
    assert status["lock"]["address"] == "{}:{}".format(*pod.address)
    assert status["lock"]["lease"]["valid_for_ms"] > 0
    assert not status["lock"]["lease"]["is_held"]
    server.auto = ("active",)
    loop.call(server.hang_up)
    status = engine.until("active")
    assert pod.ask() == ("engine-0", status["lock"]["token"])
    assert status["lock"]["lease"]["is_held"]
    assert "understudy_engine_lease_valid_seconds" in engine.get("/metrics")[1]
    text = CliRunner().invoke(
        cli.main, ["status", "--dir", str(pod.directory), "--engine-id", "engine-0"]
    )
    assert re.search(r"lease +valid for \S+( ms)?, held\n", text.output)
    server.auto = ()
    engine.kill("backend-http")
    again = engine.until("standby", number=2)
    assert not accepts(pod)
    witnesses = [path.name for path in pod.directory.glob("witness_*")]
    assert witnesses == [witness.name_of(again["engine"]["incarnation"])], "its own, and no other"


@pytest.mark.slow
def test_a_stopped_supervisor_is_ended_by_the_kernel_with_its_backend(pod, server, engine):
    """Goal: a supervisor that does nothing any more cannot outlive its lease, nor can its tree.
    Method: SIGSTOP, sent from outside."""
    tree = [*procfs.descendants(engine.process.pid), engine.process.pid]
    assert len(tree) == 3
    os.kill(engine.process.pid, signal.SIGSTOP)
    assert engine.wait() == -signal.SIGKILL
    until(lambda: not any(procfs.is_alive(pid) for pid in tree), "the whole tree to be gone")
    assert not accepts(pod)


def test_an_address_in_use_is_waited_for_and_said(pod, server):
    """Goal: a service address in use is no crash, and no silent wait. Method: a listener
    of the test's own, closed once status names it."""
    with socket.create_server(pod.address):
        engine = pod.engine("engine-0", flags=over_tcp(server.address, pod))
        engine.until("waking")
        problem = until(lambda: engine.status()["lock"]["problem"], "the problem to be said")
        assert f"pid {os.getpid()}" in problem
        assert problem in engine.status()["problems"]
    assert engine.until("active")["lock"]["problem"] is None
    assert pod.ask() == ("engine-0", 1)


def test_first_launch_waits_for_processes_of_an_earlier_supervisor(pod, server, tmp_path):
    """Goal: over TCP no lock server sees the witnesses here, so a restarted supervisor looks
    itself. Method: a stray process holds the witness of an earlier launch; another's are not its
    business, and a free one is removed."""
    stray = witness.new_incarnation("engine-0")
    path = free_witness(str(pod.directory), stray)
    free = free_witness(str(pod.directory), witness.new_incarnation("engine-0"))
    others = free_witness(str(pod.directory), witness.new_incarnation("engine-0_1"))
    held = (
        "import sys; from lockserver.witness import join; join(sys.argv[1]);"
        "print(flush=True); import signal; signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", held, path], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        engine = pod.engine("engine-0", flags=over_tcp(server.address, pod))
        problem = until(lambda: (engine.status() or {}).get("problems"), "the stray to be named")
        assert f"pid {process.pid}" in problem[0]
        assert engine.state == "dead"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    engine.until("active")
    assert not Path(path).exists()
    assert not Path(free).exists()
    assert Path(others).exists()


# ---------------------------------------------------------------- a real lock server


def events_of(client: BlockingClient, watch: Any, record: type) -> list[Record]:
    """Every event that the other side remembers."""
    with client:
        known = client.request(watch).message.document["as_of_event_id"]
        found: list[Record] = []
        while not found or found[-1]["id"] < known:
            try:
                message = client.receive(timeout_s=5).message
            except WaitTimeoutError:
                break
            if isinstance(message, record):
                found.append(message.record)
        return found


class Host:
    """A lock server over TCP with certificates, and two engines of it."""

    def __init__(self, lock_dir: Path, pod: Pod, lease_ms: int) -> None:
        self.pod = pod
        lock_dir.chmod(0o700)
        # The first server of a directory that listens would wait a lease out before it grants.
        first_server = ServerProcess(str(lock_dir))
        first_server.start()
        first_server.close()
        self.port = free_port()
        self.server = ServerProcess(
            str(lock_dir),
            *("--listen", f"tcp://127.0.0.1:{self.port}", *tls_flags(shared())),
            *("--lease-ms", str(lease_ms), "--lease-margin-ms", str(MARGIN_MS)),
        )
        self.server.start()

    def pair(self, port: int | None = None) -> tuple[Engine, Engine]:
        """engine-0 active, engine-1 standby; `port`: where the first one finds the lock server."""
        first, second = (self._engine(number, at) for number, at in enumerate((port, None)))
        return first, second

    def _engine(self, number: int, port: int | None) -> Engine:
        flags = over_tcp(f"tcp://127.0.0.1:{port or self.port}", self.pod)
        made = self.pod.engine(f"engine-{number}", "--grandchild", "joined", flags=flags)
        made.until("standby" if number else "active")
        return made

    def events(self, kind: str) -> list[Record]:
        path = os.path.join(self.server.directory, "lockserver.sock")
        found = events_of(BlockingClient(path, CATALOGUE), LockWatch(0), LockEvent)
        return [each for each in found if each["type"] == kind]

    def grant_of(self, engine: str) -> Record:
        """The first grant of `active` to `engine`; waits for it."""

        def granted() -> list[Record]:
            found = [(each["data"]["lock"], each) for each in self.events("lock.granted")]
            return [e for lock, e in found if (lock, e["data"]["engine"]) == ("active", engine)]

        return until(granted, f"{engine} to be granted")[0]


def reaped_ms(engine: Engine) -> float:
    """When the last process of the engine's last tree was gone."""
    found = events_of(engine.client(), m.WatchMsg(0), m.EventMsg)
    return [each["mono_ms"] for each in found if each["type"] == "engine.reaped"][-1]


@pytest.fixture
def host(tmp_path: Path, pod: Pod, request: pytest.FixtureRequest) -> Iterator[Host]:
    """A lock server, with leases as long as a test asks for."""
    made = Host(tmp_path, pod, getattr(request, "param", LEASE_MS))
    try:
        yield made
    finally:
        pod.close()
        made.server.close()


class Proxy:
    """Forwards to a port until it is cut; then nothing passes, without any notice: what a partition
    looks like to both ends."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._passes = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []
        self._passes.set()

    async def start(self) -> int:
        """Listen; the port."""
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def cut(self) -> None:
        self._passes.clear()

    async def reconnect(self) -> None:
        """New connections come through; those from before the cut are dead, and now say so."""
        for writer in self._writers:
            writer.transport.abort()
        self._passes.set()

    async def stop(self) -> None:
        self._server.close()
        await self.reconnect()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passes.wait()
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, far_writer]
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b"-"
        with contextlib.suppress(OSError):
            while data:
                data = await reader.read(65_536)
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.mark.slow
def test_a_partitioned_holder_has_stopped_before_another_is_granted(host: Host, loop: LoopThread):
    """Goal: one owner, whichever links are cut. Method: the holder's packets are lost; by the one
    clock of this machine its last process is gone before the next grant, its death is a lost lease;
    reconnected, it comes back as a standby."""
    proxy = Proxy(host.port)
    first, second = host.pair(port=loop.run(proxy.start()))
    assert host.pod.ask()[0] == "engine-0"
    loop.run(proxy.cut())
    granted = host.grant_of("engine-1")
    assert reaped_ms(first) < granted["mono_ms"]
    second.until("active")
    assert host.pod.ask()[0] == "engine-1"
    death = first.status()["deaths"][-1]
    assert death["cause"] == "lease_lost"
    assert first.process.poll() is None
    loop.run(proxy.reconnect())
    first.until("standby", number=2)
    second.kill("backend-http")
    first.until("active")
    host.pod.close()
    loop.run(proxy.stop())
