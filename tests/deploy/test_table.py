"""Kubernetes and `understudy up` run the same pod: the manifests against the table."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from plumbing.service.config import size_bytes
from tests.deploy.manifests import (
    POOLS,
    containers,
    environment,
    init_containers,
    pod_spec,
    pool_file,
    words,
)
from understudy.pod.ports import ENGINE_PORT, POOL_PORT, Ports
from understudy.pod.table import GATEWAY, INIT, REPLACING_INIT, Container, LocalPod, PoolModels

SHARED = "/run/shared/understudy"
PODS = ("single-gpu", "tp2", "two-shadows", "cpu", *POOLS)
OF_A_CLUSTER = {"HOME"}  # the root of a container is read-only
# Which is the default on one machine, and the memory limit of a container.
OF_DEPLOY = r"--tensor-parallel(-size)?=1|--memory-bytes=.*"
OF_ONE_MACHINE = {"LOCKSERVER_SOCKET", "GMS_SOCKET_DIR"}  # not the user's own


@dataclass(frozen=True)
class Said:
    """What is said of a container. A port: the number that its probes are sent to."""

    name: str
    command: list[str]
    env: dict[str, str]
    startup: tuple[Any, ...]
    port: int
    grace_s: float
    is_engine: bool


def plain(command: Iterable[str]) -> list[str]:
    """`command` with each flag and value in one word, sizes in bytes, and without `OF_DEPLOY`."""
    text = re.sub(r"(?<= )(--[\w-]+) (?!-)(?=\S)", r"\1=", " ".join(command))
    found = re.sub(r"\b[\d.]+[KMGT]iB\b", lambda size: str(size_bytes(size[0])), text).split()
    return [word for word in found if not re.fullmatch(OF_DEPLOY, word)]


def in_cluster(pod: str) -> list[Said]:
    """In the order in which the containers start."""
    engines = {each["name"] for each in pod_spec(pod)["containers"]}
    found = []
    for each in containers(pod):
        ports = {port["name"]: port["containerPort"] for port in each["ports"]}
        probe = each["startupProbe"]
        port = ports[probe["httpGet"]["port"]]
        config = environment(pod, {**each, "env": []})
        own = {key: text for key, text in environment(pod, each).items() if key not in config}
        said_port = int(own.pop("UNDERSTUDY_HTTP_PORT", port))
        assert said_port == port
        found.append(
            Said(
                each["name"],
                plain(words(pod, each)),
                {name: value for name, value in own.items() if name not in OF_A_CLUSTER},
                (probe["httpGet"]["path"], probe["periodSeconds"], probe["failureThreshold"]),
                port,
                pod_spec(pod)["terminationGracePeriodSeconds"],
                each["name"] in engines,
            )
        )
    return found


def on_one_machine(container: Container) -> Said:
    name = Path(container.command[0]).name
    env = {key: text for key, text in container.env.items() if key not in OF_ONE_MACHINE}
    port = int(env.pop("UNDERSTUDY_HTTP_PORT"))
    assert container.init == (REPLACING_INIT if container.name == GATEWAY else INIT)
    probe = container.startup
    assert probe is not None
    url = urlsplit(probe.url)
    assert url.port == port
    return Said(
        container.name,
        plain((name, *container.command[1:])),
        env,
        (url.path, probe.period_s, probe.failure_threshold),
        port,
        container.grace_s,
        container.is_engine,
    )


def pod_like(overlay: str) -> LocalPod:
    """The pod of the table with the values of the overlay."""
    count = sum(each["command"][0] == "engine" for each in containers(overlay))
    is_pool, is_on_host = overlay in POOLS, "cpu" in overlay
    file = Path("/etc/understudy/pool/pool.yaml")
    return LocalPod(
        Path(SHARED),
        Path("/model"),
        Ports(engines=tuple(range(ENGINE_PORT, ENGINE_PORT + count)), pool=POOL_PORT),
        backend="reference" if is_on_host else "vllm",
        backend_args=() if is_on_host else ("--kv-cache-memory-bytes=8589934592",),
        host="0.0.0.0",
        http_host="0.0.0.0",
        memory="host" if is_on_host else "cuda",
        device_bytes={"cpu": "1GiB", "pool-cpu": "768MiB"}.get(overlay),
        tensor_parallel=2 if overlay == "tp2" else 1,
        pool=PoolModels(file, pool_file(overlay)) if is_pool else None,
    )


@pytest.mark.parametrize("overlay", PODS)
def test_manifest_and_table_are_the_same_pod(overlay: str):
    """Goal: the two cannot drift. Method: every container's name, program, arguments, environment,
    probes, ports and order, of each overlay that is one pod."""
    table = pod_like(overlay).containers()
    assert [on_one_machine(each) for each in table] == in_cluster(overlay)
    made = [each["name"] for each in init_containers(overlay)]
    assert made == (["model"] if "cpu" in overlay else [])  # `up` makes that model itself
