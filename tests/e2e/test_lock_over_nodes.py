"""Engines of two nodes that share one lock: each node's pod on this machine, from the overlay.

The lock server's Deployment, and the engines' StatefulSet once for each of its pods, with its
ordinal as the kubelet would set it. Volumes are directories, and ports are free ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockserver.messages import CATALOGUE
from plumbing.errors import UnderstudyError
from plumbing.pod.cli import ask_status, events_of
from plumbing.service.procfs import descendants
from plumbing.wire import certificates
from tests.deploy.manifests import LOCK_POD, NODES, containers, environment, words, workload
from tests.e2e.pods import AS_USERS_RUN_IT
from tests.helpers import free_port, until
from understudy.pod.runner import PodRunner
from understudy.pod.table import INIT, Container, HttpProbe, program
from understudy.up.models import make_random_model

START_S = 120.0  # four engines and two memory services, on a busy machine
LEASE_MS = 10_000  # of the twenty seconds in the manifest: the first start waits for one


class Nodes:
    """The overlay's three pods as processes, each with a runner of its own."""

    def __init__(self, home: Path) -> None:
        self.home, self.lock_socket = home, str(home / "lock/state/lock/lockserver.sock")
        self.model = asyncio.run(make_random_model(home / "model"))
        self.service = f"127.0.0.1:{free_port()}"
        certificates.create(str(home / "key"), ["127.0.0.1"])
        lock = f"127.0.0.1:{free_port()}"
        engines = {
            "LOCKSERVER_SOCKET": f"tcp://{lock}",
            "UNDERSTUDY_SERVICE_ADDRESS": self.service,
        }
        self.runners = [self._runner("lock", LOCK_POD, 0, {}, {"listen": f"tcp://{lock}"})]
        self.runners += [
            self._runner(f"node{node}", NODES, node, engines, {})
            for node in range(workload(NODES)["spec"]["replicas"])
        ]

    def _runner(
        self, name: str, pod: str, index: int, env: dict[str, str], flags: dict[str, str]
    ) -> PodRunner:
        """The pod's containers. `env`, `flags`: what is said otherwise than in the manifest."""
        directory = self.home / name
        pair = self.home / "key" / ("lockserver" if pod == LOCK_POD else "engine")
        places = {"model": self.model, "lock-key": pair}
        flags = {"lease-ms": str(LEASE_MS), **flags}
        made = []
        for each in containers(pod):
            mounts = {
                mount["mountPath"]: str(places.get(mount["name"], directory / mount["name"]))
                for mount in each["volumeMounts"]
                if mount["mountPath"] != "/dev/shm"
            }

            def here(word: str, mounts: dict[str, str] = mounts) -> str:
                paths = "|".join(sorted(mounts, key=len, reverse=True))
                pattern = rf"(^|=)({paths})(?=/|$)"
                word = re.sub(pattern, lambda found: found[1] + mounts[found[2]], word)
                flag = word.removeprefix("--").partition("=")[0]
                return f"--{flag}={flags[flag]}" if flag in flags else word

            for place in mounts.values():
                Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
            port = free_port()
            program_name, *arguments = words(pod, each)
            own = {key: here(value) for key, value in environment(pod, each, index).items()}
            url = f"http://127.0.0.1:{port}{each['startupProbe']['httpGet']['path']}"
            made.append(
                Container(
                    each["name"],
                    (*program(program_name), *map(here, arguments)),
                    {**AS_USERS_RUN_IT, **own, **env, "UNDERSTUDY_HTTP_PORT": str(port)},
                    HttpProbe(url, 1, round(START_S)),
                    init=INIT,
                    is_engine=each["name"].startswith("engine-"),
                    starts_in_order=False,
                )
            )
        return PodRunner(made, directory / "log")

    async def start(self) -> None:
        """All three at once: engines retry until the lock server answers."""
        await asyncio.gather(*(runner.start() for runner in self.runners))

    async def stop(self) -> None:
        await asyncio.gather(*(runner.stop() for runner in self.runners))

    def lock(self) -> dict[str, Any]:
        """The lock `active`; {} while the server does not answer."""
        with contextlib.suppress(UnderstudyError):
            return dict(ask_status(self.lock_socket, CATALOGUE)["locks"]["active"])
        return {}

    def events(self) -> list[str]:
        """The types of all events so far, in order."""
        return [str(each["type"]) for each in events_of(self.lock_socket, CATALOGUE)]

    def whole(self) -> dict[str, Any]:
        """The lock once one engine holds it and the other three wait."""

        def found() -> dict[str, Any]:
            lock = self.lock()
            is_whole = lock.get("state") == "held" and len(lock["waiters"]) == 3
            return lock if is_whole else {}

        return until(found, "all four engines to be there", START_S)

    def runner(self, engine: str) -> PodRunner:
        """That of the node of `engine`, which is called after it."""
        return self.runners[1 + node_of(engine)]

    def backend(self, engine: str) -> int:
        """A process of its backend."""
        for pid in descendants(self.runner(engine).pids()[container_of(engine)]):
            if b"engine.backends.reference.main" in cmdline(pid):
                return pid
        raise AssertionError(f"{engine} has no backend")

    def answers(self) -> tuple[str, int]:
        """Which engine answers a request, and under which token."""
        with urllib.request.urlopen(f"http://{self.service}/v1/models", timeout=START_S) as reply:
            json.load(reply)
            return reply.headers["X-Understudy-Engine"], int(reply.headers["X-Understudy-Token"])


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    home = Path(tempfile.mkdtemp(prefix="us-"))
    yield Nodes(home)
    shutil.rmtree(home)


@pytest.mark.slow
async def test_death_of_an_engine_or_of_its_node_is_a_failover(nodes: Nodes):
    """Goal: four engines on two nodes share one lock, and the loss of a node is a failover. Method:
    SIGKILL the active engine's backend: another one serves before any lease expires. Then SIGKILL
    every process of the active engine's node: one of the other node serves once the lease has."""

    def scenario() -> None:
        lock = nodes.whole()
        first = until(lambda: served(nodes), "the first answer", START_S)
        assert first == (lock["holder"]["engine"], lock["holder"]["token"])
        os.kill(nodes.backend(first[0]), signal.SIGKILL)
        second = until(lambda: served(nodes, but=first[0]), "another engine to answer", START_S)
        assert second[1] > first[1]
        nodes.whole()
        assert "lock.lease_expired" not in nodes.events()
        lost = nodes.runner(second[0])
        for init in lost.pids().values():
            os.kill(init, signal.SIGKILL)  # and the kernel what is below it
        third = until(lambda: served(nodes, but=second[0]), "the other node to answer", START_S)
        assert third[1] > second[1]
        assert node_of(third[0]) != node_of(second[0])
        assert "lock.lease_expired" in nodes.events()

    try:
        await nodes.start()
        await asyncio.to_thread(scenario)
    finally:
        await nodes.stop()


def node_of(engine: str) -> int:
    """The 1 of `understudy-1-engine-0`: the overlay calls an engine after its pod."""
    return int(engine.split("-")[1])


def container_of(engine: str) -> str:
    return engine.split("-", 2)[2]


def cmdline(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def served(nodes: Nodes, but: str = "") -> tuple[str, int] | None:
    """The engine that answers, once it is another one than `but`."""
    with contextlib.suppress(OSError):
        found = nodes.answers()
        return found if found[0] != but else None
    return None
