"""The pod of a pool file as data: which containers there are, and what each is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plumbing.errors import UsageError
from understudy.pod.ports import free_pod_ports
from understudy.pod.table import Container, LocalPod
from understudy.up.pods import PreparedPod, prepare_pool

POOL_FILE = """
devices: [HOST-0, 1]
host_memory: 64MiB
models:
  chat: {backend: reference, model: ., shadow: keeps, aliases: [gpt-4o-mini]}
  coder: {backend: vllm, model: ., devices: [1], args: [--max-model-len, 1024]}
"""


def prepared(directory: Path, text: str, pod: LocalPod | None = None, **more: Any) -> PreparedPod:
    path = directory / "pool.yaml"
    path.write_text(text)
    pod = pod or LocalPod(Path(), None, free_pod_ports(has_pool=True))
    return asyncio.run(prepare_pool(pod, path, directory, print, **more))


def containers(directory: Path, text: str) -> list[Container]:
    return list(prepared(directory, text).containers)


@pytest.fixture
def pool(tmp_path: Path) -> dict[str, Container]:
    return {each.name: each for each in containers(tmp_path, POOL_FILE)}


def test_parts_are_told_the_pool_file_wherever_they_run(tmp_path: Path, monkeypatch):
    """Method: a relative path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool.yaml").write_text(POOL_FILE)
    local = LocalPod(Path(), None, free_pod_ports(has_pool=True))
    pod = prepare_pool(local, Path("pool.yaml"), tmp_path, print)
    env = {each.name: each.env.get("UNDERSTUDY_POOL") for each in asyncio.run(pod).containers}
    absent = dict.fromkeys(("lockserver", "gms"))
    told = ("gateway", "pool", "chat-0", "chat-1", "coder-0")
    assert env == {**absent, **dict.fromkeys(told, str(tmp_path / "pool.yaml"))}


@pytest.mark.parametrize("given", [(), ("host",), ("host", "service_port")])
def test_pod_listens_where_the_file_says_unless_a_flag_does(tmp_path: Path, given: tuple[str, ...]):
    """Method: the pod's own ports are free ones; the file names an address of this machine."""
    ports = free_pod_ports(has_pool=True)
    listen = f"listen: 127.0.0.2:{free_pod_ports().service}\n"
    local = LocalPod(Path(), None, ports, http_host="127.0.0.3")
    file = listen + POOL_FILE
    pod = prepared(tmp_path, file, local, given=given)
    host = "127.0.0.1" if "host" in given else "127.0.0.2"
    port = str(ports.service) if "service_port" in given else listen.strip().rpartition(":")[2]
    assert f"--service=active={host}:{port}" in pod.containers[0].command


def test_gpus_and_host_memory_in_one_pool_are_refused(tmp_path: Path):
    mixed = POOL_FILE.replace("[HOST-0, 1]", "[HOST-0, GPU-12345678]").replace(
        "devices: [1]", "devices: [HOST-0]"
    )
    with pytest.raises(UsageError, match=r"pool\.mixed_devices"):
        containers(tmp_path, mixed)


def test_model_that_is_nowhere_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"pod\.no_model"):
        containers(tmp_path, POOL_FILE.replace("reference, model: .", "reference, model: /none"))
