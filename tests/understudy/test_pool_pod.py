"""The pod of a pool file as data: which containers there are, and what each is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from plumbing.errors import UsageError
from understudy.cli.main import main
from understudy.kubelet.containers import Container, starts, stops
from understudy.up.local_pod import LocalPod
from understudy.up.pool_pod import prepare_pool
from understudy.up.ports import free_pod_ports, free_ports
from understudy.up.sessions import PreparedPod

POOL_FILE = """
devices: [HOST-0, 1]
host_memory: 64MiB
models:
  chat: {backend: reference, model: /models/A, shadow: follows, aliases: [gpt-4o-mini]}
  coder: {backend: vllm, model: /models/B, devices: [1], args: [--max-model-len, 1024]}
"""


def prepared(directory: Path, text: str, pod: LocalPod | None = None, **more: Any) -> PreparedPod:
    path = directory / "pool.yaml"
    path.write_text(text)
    pod = pod or LocalPod(Path(), None)
    more = {"is_drilled": True, **more}
    return asyncio.run(prepare_pool(pod, path, 9404, directory, print, **more))


def containers(directory: Path, text: str) -> list[Container]:
    return list(prepared(directory, text).containers)


@pytest.fixture
def pool(tmp_path: Path) -> dict[str, Container]:
    return {each.name: each for each in containers(tmp_path, POOL_FILE)}


def test_what_engines_need_starts_before_them_and_stops_after_them(pool: dict[str, Container]):
    engines = ["chat-0", "chat-1", "coder-0"]
    servers = ["lockserver", "gms", "gateway", "pool"]
    started = [[each.name for each in group] for group in starts([*pool.values()])]
    assert started == [[name] for name in servers + engines]
    stopped = [[each.name for each in group] for group in stops([*pool.values()])]
    assert stopped == [engines, *([name] for name in reversed(servers))]


def test_every_server_is_told_the_models(pool: dict[str, Container], tmp_path: Path):
    for name in ("lockserver", "gms"):
        assert {"--model=chat", "--model=coder"} <= {*pool[name].command}
    assert {"--devices=2", "--host-memory=67108864"} <= {*pool["gms"].command}
    assert f"--pool={tmp_path / 'pool.yaml'}" in pool["gateway"].command
    assert f"--file={tmp_path / 'pool.yaml'}" in pool["pool"].command


def test_engines_differ_in_their_ids_and_ports_alone(pool: dict[str, Container], tmp_path: Path):
    for name in ("chat-0", "chat-1", "coder-0"):
        assert pool[name].env["ENGINE_ID"] == name
        assert pool[name].command[1:] == ("run", f"--pool={tmp_path / 'pool.yaml'}")


def test_every_part_has_a_port_of_its_own(pool: dict[str, Container]):
    ports = [each.env["UNDERSTUDY_HTTP_PORT"] for each in pool.values()]
    assert len({*ports}) == len(pool)


def test_devices_may_differ_in_size(tmp_path: Path):
    pod = prepared(tmp_path, POOL_FILE, LocalPod(Path(), None, device_bytes=(600, 300)))
    assert "--device-bytes=600,300" in pod.containers[1].command


@pytest.mark.parametrize("given", [(), ("host",), ("host", "service_port")])
def test_pod_listens_where_the_file_says_unless_a_flag_does(tmp_path: Path, given: tuple[str, ...]):
    """Method: the pod's own ports are free ones; the file names an address of this machine."""
    ports = free_pod_ports()
    listen = f"listen: 127.0.0.2:{free_ports(1)[0]}\n"
    local = LocalPod(Path(), None, ports, http_host="127.0.0.3")
    file = listen + POOL_FILE.replace("/models/A", "/").replace("/models/B", "/")
    pod = prepared(tmp_path, file, local, is_drilled=False, given=given)
    host = "127.0.0.1" if "host" in given else "127.0.0.2"
    port = str(ports.service) if "service_port" in given else listen.strip().rpartition(":")[2]
    assert f"--service=active={host}:{port}" in pod.containers[0].command


def test_a_model_without_its_directory_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="chat: there is no directory /models/A"):
        prepared(tmp_path, POOL_FILE, is_drilled=False)


def test_gpus_and_host_memory_in_one_pool_are_refused(tmp_path: Path):
    mixed = POOL_FILE.replace("[HOST-0, 1]", "[HOST-0, GPU-12345678]").replace(
        "devices: [1]", "devices: [HOST-0]"
    )
    with pytest.raises(UsageError) as refused:
        containers(tmp_path, mixed)
    assert refused.value.code == "pool.mixed_devices"


@pytest.mark.parametrize("memory", ["host", "cuda"])
def test_numbers_count_devices_of_the_kind_that_is_asked_for(tmp_path: Path, memory: str):
    path = tmp_path / "pool.yaml"
    path.write_text("devices: [0, 2]\nmodels: {chat: {model: /models/A}}\n")
    local = LocalPod(Path(), None, memory=memory)
    made = asyncio.run(prepare_pool(local, path, 0, tmp_path, print, is_drilled=True))
    (command,) = (each.command for each in made.containers if each.name == "gms")
    assert f"--memory={memory}" in command
    assert ("--devices=3" in command) == (memory == "host")  # GPUs are found


def test_flags_that_the_pool_file_replaces_are_refused(tmp_path: Path):
    result = CliRunner().invoke(
        main, ["up", "--pool", "pool.yaml", "--backend", "vllm", "--dir", str(tmp_path)]
    )
    assert result.exit_code == 2
    assert "--backend cannot be used with --pool" in result.output
