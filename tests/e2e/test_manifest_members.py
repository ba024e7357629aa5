"""Engines that span nodes, from the overlay's own manifests: each node's pod on this machine.

`understudy up -f` runs one pod, so the rendered file is split: the lock server's Deployment, and
the engines' StatefulSet once for each of its pods, with its ordinal as the kubelet would set it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockserver import certificates
from lockserver.messages import CATALOGUE, EventMsg, StatusMsg, WatchMsg
from plumbing.errors import UnderstudyError
from plumbing.service.procfs import descendants
from plumbing.wire.blocking import BlockingClient
from tests.deploy.manifests import LOCK_POD, NODES, Document, containers, one, workload
from tests.e2e.test_commands import ENVIRONMENT, UNDERSTUDY
from tests.helpers import free_port, until

START_S = 120.0  # four engines, two memory services and a lease, on a busy machine
LEASE_MS = 10_000  # of the twenty seconds in the manifest: the first start waits for one


class Nodes:
    """The overlay's three pods as processes, each under an `understudy up` of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.ups: list[subprocess.Popen[bytes]] = []
        self.service = f"127.0.0.1:{free_port()}"
        self._lock_port = free_port()
        (home / "state").mkdir(0o700)
        certificates.create(str(home / "key"), ["127.0.0.1"])
        self._write("lock.yaml", workload(LOCK_POD))
        self._write("members.yaml", workload(NODES), one(NODES, "ConfigMap"))

    def _write(self, name: str, *documents: Document) -> None:
        (self.home / name).write_text(yaml.safe_dump_all(documents))

    def start(self) -> None:
        self._up(
            "lock",
            *("lock.yaml", f"volume.state={self.home / 'state'}", f"flag.lease-ms={LEASE_MS}"),
            f"port.lock={self._lock_port}",
            f"port.lockserver={free_port()}",
        )
        names = [each["name"] for c in containers(NODES) for each in c["ports"]]
        for member in range(workload(NODES)["spec"]["replicas"]):
            self._up(
                f"node{member}",
                "members.yaml",
                f"env.UNDERSTUDY_MEMBER={member}",
                f"env.LOCKSERVER_SOCKET=tcp://127.0.0.1:{self._lock_port}",
                f"env.UNDERSTUDY_SERVICE_ADDRESS={self.service}",
                *(f"port.{name}={free_port()}" for name in names),
            )

    def _up(self, name: str, manifest: str, *choices: str) -> None:
        pair = self.home / "key" / ("lockserver" if name == "lock" else "engine")
        sets = [f"--set={each}" for each in (f"volume.lock-key={pair}", *choices)]
        where = ("-f", str(self.home / manifest), "--dir", str(self.home / name))
        with open(self.home / f"{name}.log", "wb") as log:
            command = [UNDERSTUDY, "up", *where, *sets]
            self.ups.append(subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT))

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.home.glob("*.log")))

    def _client(self) -> BlockingClient:
        return BlockingClient(str(self.home / "state" / "lock" / "lockserver.sock"), CATALOGUE)

    def lock(self) -> dict[str, Any]:
        """The lock `active`; {} while the server does not answer."""
        for up in self.ups:
            assert up.poll() is None, self.logs()
        with contextlib.suppress(UnderstudyError), self._client() as client:
            reply: Any = client.request(StatusMsg()).message
            return dict(reply.document["locks"]["active"])
        return {}

    def events(self) -> list[str]:
        """The types of all events so far, in order."""
        with self._client() as client:
            reply: Any = client.request(WatchMsg(0)).message
            found = []
            while len(found) < reply.document["as_of_event_id"]:
                message = client.receive().message
                if isinstance(message, EventMsg):
                    found.append(str(message.record["type"]))
        return found

    def whole(self) -> dict[str, Any]:
        """The lock once one engine holds it and the other one waits."""

        def found() -> dict[str, Any]:
            lock = self.lock()
            is_whole = lock.get("state") == "held" and len(lock["waiters"]) == 1
            return lock if is_whole else {}

        return until(found, "both engines to be there", START_S)

    def backend(self, member: int, engine: str) -> int:
        """A process of one member's backend."""
        for pid in descendants(self.ups[1 + member].pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                is_its = f"ENGINE_ID={engine}".encode() in env
                if is_its and b"engine.backends.reference.http.main" in words:
                    return pid
        raise AssertionError(f"member {member} of {engine} has no backend")

    def answers(self) -> tuple[str, int]:
        """Which engine answers a request, and under which token."""
        with urllib.request.urlopen(f"http://{self.service}/v1/models", timeout=START_S) as reply:
            json.load(reply)
            return reply.headers["X-Understudy-Engine"], int(reply.headers["X-Understudy-Token"])

    def close(self) -> None:
        for up in self.ups:
            up.send_signal(signal.SIGTERM)
        for up in self.ups:
            up.wait()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    home = Path(tempfile.mkdtemp(prefix="us-"))
    found = Nodes(home)
    try:
        yield found
    finally:
        found.close()
        shutil.rmtree(home)


@pytest.mark.slow
def test_death_of_a_second_members_process_is_a_failover(nodes: Nodes):
    """Goal: the overlay serves over two nodes, and a death on the node without the HTTP server is a
    failover like any other: no lease has to expire. Method: SIGKILL a process of member 1 of the
    active engine; check which engine serves then, and that no lease expired."""
    nodes.start()
    before = nodes.whole()
    first, second = before["holder"]["engine"], before["waiters"][0]["engine"]
    assert {first, second} == {"engine-0", "engine-1"}
    serving = until(lambda: served(nodes), "the first answer", START_S)
    assert serving == (first, before["holder"]["token"])
    os.kill(nodes.backend(1, first), signal.SIGKILL)
    after = until(lambda: served(nodes, but=first), "the other engine to answer", START_S)
    assert after[0] == second
    assert after[1] > serving[1]
    assert nodes.whole()["waiters"][0]["engine"] == first  # it is the standby now
    events = nodes.events()
    assert "lock.member_lost" in events
    assert "lock.lease_expired" not in events


def served(nodes: Nodes, but: str = "") -> tuple[str, int] | None:
    """The engine that answers, once it is another one than `but`."""
    with contextlib.suppress(OSError):
        found = nodes.answers()
        return found if found[0] != but else None
    return None
