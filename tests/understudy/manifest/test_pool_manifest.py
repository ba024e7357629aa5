"""A manifest with a pool file in a ConfigMap, on one machine: pure, but for files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from plumbing.errors import UsageError
from pool.pool_file import read_pool_file
from tests.deploy.manifests import RENDERED
from tests.helpers import free_ports
from understudy.manifest.values import Choices, read_choice, replace_paths_within
from understudy.up.directory import has_pool
from understudy.up.manifest_pod import PodRequest, prepare
from understudy.up.sessions import PreparedPod

PORTS = ("http", "lockserver", "gms", "gateway", "pool", *(f"engine-{n}" for n in range(4)))


def prepared(
    directory: Path, overlay: str, *chosen: str, said: list[str] | None = None
) -> PreparedPod:
    first = free_ports(len(PORTS))
    ports = [f"port.{name}={first + number}" for number, name in enumerate(PORTS)]
    choices = Choices.of(read_choice(each) for each in (*ports, *chosen))
    request = PodRequest(RENDERED / f"{overlay}.yaml", choices)
    say = [].append if said is None else said.append
    return asyncio.run(prepare(request, directory, say, is_drilled=False))


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("model: /model/chat", "model: /there/chat"),
        ("[/model, '/model/x', \"/model\"]", "[/there, '/there/x', \"/there\"]"),
        ("{a: /model}\nb:\n  - /model\n", "{a: /there}\nb:\n  - /there\n"),
        ("--path=/model/x", "--path=/there/x"),
        ("http://h/model /models /model-2 /model.d x/model", None),
    ],
)
def test_mount_paths_in_a_file_become_directories(text: str, moved: str | None):
    assert replace_paths_within(text, {"/model": "/there", "/mod": "/no"}) == (moved or text)


def test_pool_file_of_a_manifest_names_directories_of_this_machine(tmp_path: Path):
    """Goal: the file that all containers read has paths that exist here. Method: the pod of the
    rendered file, with a checkpoint of somebody's."""
    model = tmp_path / "checkpoint"
    model.mkdir()
    said: list[str] = []
    pod = prepared(tmp_path / "pod", "pool-cpu", f"volume.model={model}", said=said)
    assert not [line for line in said if "listen" in line]
    assert has_pool(pod.containers)
    containers = {each.name: each for each in pod.containers}
    paths = {
        containers[name].env["UNDERSTUDY_POOL"] for name in ("gateway", "pool", "chat-1", "batch-0")
    }
    (path,) = paths
    file = read_pool_file(path)
    assert {each.model for each in file.models.values()} == {str(model)}
    # Each engine mounts a volume of its own at /tmp: a path that means several directories stays.
    assert len({each.env["TMPDIR"] for each in containers.values() if "TMPDIR" in each.env}) == 4


def test_address_in_the_pool_file_of_a_manifest_is_said_to_be_ignored(tmp_path: Path):
    model = tmp_path / "checkpoint"
    model.mkdir()
    text = f"{{listen: '0.0.0.0:9', devices: [HOST-0], models: {{chat: {{model: {model}}}}}}}"
    said: list[str] = []
    chosen = (f"volume.model={model}", f"config.pool.yaml={text}")
    prepared(tmp_path / "pod", "pool-cpu", *chosen, said=said)
    assert [line for line in said if "listen: 0.0.0.0:9" in line]


def test_pool_whose_models_are_not_here_is_refused(tmp_path: Path):
    """A random model has no weights for vLLM, which its pool file asks for."""
    with pytest.raises(UsageError) as refused:
        prepared(tmp_path, "pool")
    assert refused.value.code == "pod.no_model"
    assert "vllm" in refused.value.message
