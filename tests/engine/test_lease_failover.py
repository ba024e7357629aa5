"""Engines and a lock server over TCP, all real: a lost engine is replaced once it is over.

All processes are on one machine with one clock, so what happened first can be read from the
events of both sides. The loss of a whole node is `tests/e2e/test_lock_over_nodes.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import messages as m
from lockserver.messages import CATALOGUE
from lockserver.messages import EventMsg as LockEvent
from lockserver.messages import WatchMsg as LockWatch
from plumbing.errors import WaitTimeoutError
from plumbing.wire.blocking import BlockingClient
from tests.engine.pod import Engine, LoopThread, Pod, environment, program
from tests.helpers import free_port, until
from tests.lockserver.processes import ServerProcess
from tests.plumbing.wire.certificates import shared, tls_flags

LEASE_MS = 3000  # a machine with much to do stops a process for a second
LONG_LEASE_MS = 60_000  # where no lease may run out, however busy the machine is
MARGIN_MS = 400

Record = dict[str, Any]


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
        host, own_port = self.pod.address
        flags = (
            *("--lockserver-socket", f"tcp://127.0.0.1:{port or self.port}"),
            *(*tls_flags(shared(), "lockserver-"), "--service-address", f"{host}:{own_port}"),
        )
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


@pytest.mark.slow
@pytest.mark.parametrize("host", [LONG_LEASE_MS], indirect=True, ids=["long"])
def test_leaving_and_handing_over_wait_for_no_lease(host: Host):
    """Goal: a holder that releases in order costs no waiting time. Method: switch over, then
    SIGTERM to the new holder; each grant follows a reaping, no lease has run out."""
    first, second = host.pair()
    command = [*program("lockserver"), "switchover", "--dir", host.server.directory, "--json"]
    done = subprocess.run(command, env=environment(), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engine"] == "engine-1"
    assert reaped_ms(first) < host.grant_of("engine-1")["mono_ms"]
    second.until("active")
    assert host.pod.ask()[0] == "engine-1"
    assert first.until("standby", number=2)["deaths"][-1]["cause"] == "drained"
    second.terminate()
    assert second.wait() == 0
    first.until("active")
    assert host.events("lock.lease_expired") == []


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
def test_a_partitioned_holder_has_stopped_before_another_is_granted(host: Host):
    """Goal: one owner, whichever links are cut. Method: the holder's packets are lost; by the one
    clock of this machine its last process is gone before the next grant, its death is a lost lease;
    reconnected, it comes back as a standby."""
    loop, proxy = LoopThread(), Proxy(host.port)
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
    loop.close()
