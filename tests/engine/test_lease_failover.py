"""Engines and a lock server over TCP, all real: a lost engine is replaced once it is over.

All processes are on one machine with one clock, so what happened first can be read from the
events of both sides.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import messages as m
from engine.backends.reference.random_model import write_random_model
from lockserver.messages import CATALOGUE
from lockserver.messages import EventMsg as LockEvent
from lockserver.messages import WatchMsg as LockWatch
from plumbing.errors import WaitTimeoutError
from plumbing.service import procfs
from plumbing.wire.blocking import BlockingClient
from tests.engine.pod import Engine, Pod, environment, program
from tests.engine.wire_cut import Proxy
from tests.helpers import free_port, is_over, until
from tests.lockserver.processes import ServerProcess
from tests.plumbing.wire.certificates import shared, tls_flags

LEASE_MS = 3000  # a machine with much to do stops a process for a second
LONG_LEASE_MS = 60_000  # where no lease may run out, however busy the machine is
MARGIN_MS = 400
PROMPT = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 8}

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
    """A lock server over TCP with certificates, a directory for engines and their memory."""

    def __init__(self, lock_dir: Path, pod: Pod, lease_ms: int = LEASE_MS) -> None:
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
        self.gms: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def flags(self, *, address: str | None = None) -> tuple[str, ...]:
        host, port = self.pod.address
        return (
            *("--lockserver-socket", address or self.address),
            *tls_flags(shared(), "lockserver-"),
            *("--service-address", f"{host}:{port}"),
        )

    def start_gms(self, directory: Path | None = None) -> None:
        directory = directory or self.pod.directory
        command = [
            *program("gms"),
            *("serve", "--dir", str(directory), "--memory", "host", "--devices", "1"),
            *("--http-port", str(free_port())),
        ]
        with open(directory / "gms.stderr", "ab") as stderr:
            self.gms.append(subprocess.Popen(command, env=environment(), stderr=stderr))

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

    def close(self) -> None:
        self.pod.close()
        for gms in self.gms:
            gms.terminate()
            gms.wait()
        self.server.close()


def reaped_ms(engine: Engine) -> float:
    """When the last process of the engine's last tree was gone."""
    found = events_of(engine.client(), m.WatchMsg(0), m.EventMsg)
    return [each["mono_ms"] for each in found if each["type"] == "engine.reaped"][-1]


def say(host: Host) -> tuple[str, str]:
    """Who answers at the service's address, and what."""
    address, port = host.pod.address
    request = urllib.request.Request(
        f"http://{address}:{port}/v1/completions",
        json.dumps(PROMPT).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        text = json.load(response)["choices"][0]["text"]
        return response.headers["X-Understudy-Engine"], text


@pytest.fixture
def host(tmp_path: Path, pod: Pod, request: pytest.FixtureRequest) -> Iterator[Host]:
    """A lock server, with leases as long as a test asks for."""
    made = Host(tmp_path, pod, getattr(request, "param", LEASE_MS))
    try:
        yield made
    finally:
        made.close()


long_leases = pytest.mark.parametrize("host", [LONG_LEASE_MS], indirect=True, ids=["long"])


@pytest.fixture
def pair(host: Host, tmp_path: Path) -> tuple[Host, Engine, Engine]:
    """engine-0 active, engine-1 standby, with the reference backend on host memory."""
    model = tmp_path / "tiny"
    write_random_model(str(model))
    host.start_gms()
    backend = ("reference", "--model", str(model))
    first = host.pod.engine("engine-0", flags=host.flags(), backend=backend)
    first.until("active")
    second = host.pod.engine("engine-1", flags=host.flags(), backend=backend)
    second.until("standby")
    return host, first, second


@pytest.mark.slow
def test_a_dead_supervisor_is_replaced_when_its_lease_has_run_out(pair):
    """Goal: only time proves that a holder on another host is dead; then the next one serves
    the same answers. Method: SIGKILL; the lease's end comes before the grant in the server's own
    events, every process of the old tree is gone by then, and both engines say the same."""
    host, first, second = pair
    before = say(host)
    assert before[0] == "engine-0"
    until(lambda: first.status()["health"]["has_standby"], "the active engine to know of the other")
    old = procfs.descendants(first.process.pid)
    assert old
    first.kill("supervisor")
    granted = host.grant_of("engine-1")
    assert all(map(is_over, old))
    (expired,) = host.events("lock.lease_expired")
    assert expired["data"]["engine"] == "engine-0"
    assert expired["id"] < granted["id"]
    second.until("active")
    assert say(host) == ("engine-1", before[1])


@pytest.mark.slow
@long_leases
def test_leaving_and_handing_over_wait_for_no_lease(pair):
    """Goal: a holder that releases in order costs no waiting time. Method: switch over, then
    SIGTERM to the new holder; each grant follows a reaping, no lease has run out."""
    host, first, second = pair
    command = [*program("lockserver"), "switchover", "--dir", host.server.directory, "--json"]
    done = subprocess.run(command, env=environment(), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engine"] == "engine-1"
    assert reaped_ms(first) < host.grant_of("engine-1")["mono_ms"]
    second.until("active")
    assert say(host)[0] == "engine-1"
    assert first.until("standby", number=2)["deaths"][-1]["cause"] == "drained"
    second.terminate()
    assert second.wait() == 0
    first.until("active")
    assert say(host)[0] == "engine-0"
    assert host.events("lock.lease_expired") == []


@pytest.fixture
def proxy(host: Host) -> Iterator[Proxy]:
    made = Proxy(("127.0.0.1", host.port))
    yield made
    made.close()


@pytest.mark.slow
def test_a_partitioned_holder_has_stopped_before_another_is_granted(host, proxy):
    """Goal: one owner, whichever links are cut. Method: the holder's packets are lost; by the one
    clock of this machine its last process is gone before the next grant, its death is a lost lease;
    reconnected, it comes back as a standby."""
    first = host.pod.engine(
        "engine-0", "--grandchild", "joined", flags=host.flags(address=proxy.address)
    )
    first.until("active")
    second = host.pod.engine("engine-1", flags=host.flags())
    second.until("standby")
    assert host.pod.ask()[0] == "engine-0"
    proxy.cut()
    granted = host.grant_of("engine-1")
    assert reaped_ms(first) < granted["mono_ms"]
    second.until("active")
    assert host.pod.ask()[0] == "engine-1"
    death = first.status()["deaths"][-1]
    assert death["cause"] == "lease_lost"
    assert first.process.poll() is None
    proxy.reconnect()
    first.until("standby", number=2)
    second.kill("backend-http")
    first.until("active")
