"""The pod of a pool file as data: which containers there are, and what each is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from plumbing.errors import UsageError
from understudy.cli.main import main
from understudy.kubelet.containers import Container, starts, stops
from understudy.up.local_pod import BACKEND_ARGUMENTS, LocalPod
from understudy.up.pool_pod import prepare_pool

POOL_FILE = """
devices: [HOST-0, 1]
host_memory: 64MiB
models:
  chat: {backend: reference, model: /models/A, shadow: follows, aliases: [gpt-4o-mini]}
  coder: {backend: vllm, model: /models/B, devices: [1], args: [--max-model-len, 1024]}
"""


def containers(directory: Path, text: str) -> list[Container]:
    path = directory / "pool.yaml"
    path.write_text(text)
    pod = asyncio.run(
        prepare_pool(LocalPod(Path(), None), path, 0, directory, print, is_drilled=True)
    )
    return list(pod.containers)


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
    told = {f"--file={tmp_path / 'pool.yaml'}", "--device=HOST-0", "--device=HOST-1"}
    assert told <= {*pool["pool"].command}


def test_engines_begin_cold_each_with_its_model_devices_and_names(pool: dict[str, Container]):
    for name, model in (("chat-0", "chat"), ("chat-1", "chat"), ("coder-0", "coder")):
        assert pool[name].env["ENGINE_ID"] == name
        assert {f"--model-name={model}", "--goal=cold"} <= {*pool[name].command}
    assert pool["coder-0"].env["UNDERSTUDY_HOST_DEVICES"] == "HOST-1"
    assert "--backend=vllm" in pool["coder-0"].command
    assert after(pool["coder-0"]) == (
        *("/models/B", "--served-model-name", "coder", "--max-model-len", "1024"),
    )
    names = ("--served-model-name", "chat", "gpt-4o-mini")
    assert after(pool["chat-1"]) == ("--model", "/models/A", *names)


def after(engine: Container) -> tuple[str, ...]:
    """What the backend is told."""
    return engine.command[engine.command.index(BACKEND_ARGUMENTS) + 1 :]


def test_every_part_has_a_port_of_its_own(pool: dict[str, Container]):
    ports = [each.env["UNDERSTUDY_HTTP_PORT"] for each in pool.values()]
    assert len({*ports}) == len(pool)


def test_gpus_and_host_memory_in_one_pool_are_refused(tmp_path: Path):
    mixed = POOL_FILE.replace("[HOST-0, 1]", "[HOST-0, GPU-12345678]").replace(
        "devices: [1]", "devices: [HOST-0]"
    )
    with pytest.raises(UsageError) as refused:
        containers(tmp_path, mixed)
    assert refused.value.code == "pool.mixed_devices"


def test_flags_that_the_pool_file_replaces_are_refused(tmp_path: Path):
    result = CliRunner().invoke(
        main, ["up", "--pool", "pool.yaml", "--backend", "vllm", "--dir", str(tmp_path)]
    )
    assert result.exit_code == 2
    assert "--backend cannot be used with --pool" in result.output
