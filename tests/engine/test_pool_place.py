"""What the pool file says of one engine, and the names that all processes have for its devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.relaunch import YIELD_MS
from engine.supervisor.settings import OPTIONS, placed, settle
from plumbing.errors import UsageError
from plumbing.pod.paths import write_device_names
from plumbing.service.config import Resolved, resolve
from pool.server import settings as pool_settings

POOL_FILE = """
devices: [{devices}]
models:
  chat: {{backend: reference, model: /models/A, shadow: keeps, aliases: [gpt-4o-mini]}}
  coder: {{backend: vllm, model: /models/B, devices: [{last}], args: [--max-model-len, 1024]}}
  both: {{backend: vllm, model: /models/C, tensor_parallel: 2}}
"""
GPUS = ("GPU-0a", "GPU-0b")
PoolPlace = tuple[Resolved, tuple[str, ...], dict[str, str]]


def pool_file(directory: Path, *devices: str) -> str:
    path = directory / "pool.yaml"
    path.write_text(POOL_FILE.format(devices=", ".join(devices), last=devices[-1]))
    return str(path)


def place(directory: Path, engine: str, *devices: str, **flags: object) -> PoolPlace:
    told = {"pool": pool_file(directory, *devices), "engine_id": engine, **flags}
    return placed(resolve(OPTIONS, told, {}), str(directory))


def test_engine_runs_its_model_under_all_names_on_its_devices(tmp_path: Path):
    _, arguments, environment = place(tmp_path, "chat-1", "HOST-0", "HOST-1")
    names = ("--served-model-name", "chat", "gpt-4o-mini")
    assert arguments == ("--model", "/models/A", *names)
    assert environment == {"UNDERSTUDY_HOST_DEVICES": "HOST-0"}
    _, arguments, _ = place(tmp_path, "coder-0", "HOST-0", "HOST-1")
    words = ("/models/B", "--served-model-name", "coder", "--max-model-len", "1024")
    assert arguments == words
    _, arguments, environment = place(tmp_path, "both-0", "HOST-0", "HOST-1")
    assert arguments[:3] == ("/models/C", "--tensor-parallel-size", "2")
    assert environment == {"UNDERSTUDY_HOST_DEVICES": "HOST-0,HOST-1"}


@pytest.mark.parametrize(
    ("engine", "flags", "yield_ms"),
    [
        *(("coder-0", {}, 1), ("coder-0", {"yield_ms": 300}, 300)),
        *(("chat-0", {}, YIELD_MS), ("chat-1", {}, YIELD_MS)),
    ],
)
def test_engine_without_a_shadow_is_relaunched_at_once_unless_somebody_says_otherwise(
    tmp_path: Path, engine: str, flags: dict[str, object], yield_ms: int
):
    """Its model has nobody who could take over, so nobody is waited for."""
    assert place(tmp_path, engine, "HOST-0", "HOST-1", **flags)[0]["yield_ms"] == yield_ms


def test_number_is_the_same_device_for_engines_and_pool(tmp_path: Path):
    """Goal: no process counts devices by itself. Method: what the memory service wrote, in another
    order than that of the names."""
    tmp_path.chmod(0o700)
    write_device_names(str(tmp_path), GPUS[::-1])
    for engine, devices in (("coder-0", "GPU-0a"), ("both-0", "GPU-0b,GPU-0a")):
        assert place(tmp_path, engine, "0", "1")[2] == {"CUDA_VISIBLE_DEVICES": devices}
    flags = {"dir": str(tmp_path), "file": pool_file(tmp_path, "0", "1")}
    found = pool_settings.settle(resolve(pool_settings.OPTIONS, flags, {})).file
    assert found.devices == GPUS[::-1]
    assert found.models["coder"].devices == ("GPU-0a",)


@pytest.mark.parametrize(
    ("served", "devices", "words"),
    [
        ((), ("0", "1"), "and none has started; start `gms serve` first"),
        (GPUS, ("0", "2"), "device 2 .* it serves 2: GPU-0a, GPU-0b"),
        (GPUS, ("1", "GPU-0b"), "are both GPU-0b"),
    ],
)
def test_number_without_a_device_is_refused(tmp_path: Path, served, devices, words: str):
    if served:
        write_device_names(str(tmp_path), served)
    with pytest.raises(UsageError, match=words):
        place(tmp_path, "chat-0", *devices)


def test_settings_are_the_pool_files_and_the_port_is_the_engines_own(tmp_path: Path):
    found, _, _ = place(tmp_path, "coder-0", "HOST-0", "HOST-1")
    settings = settle(found, [], str(tmp_path))
    assert (settings.backend, settings.model, settings.http_port) == ("vllm", "coder", 9412)
    assert settings.config["goal"] == "cold"
    assert found.origin("backend") == "pool file"
    assert place(tmp_path, "chat-0", "HOST-0", "HOST-1", http_port=7)[0]["http_port"] == 7


def test_flag_that_the_pool_file_replaces_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="--model-name: with --pool"):
        place(tmp_path, "chat-0", "HOST-0", "HOST-1", model_name="chat")
