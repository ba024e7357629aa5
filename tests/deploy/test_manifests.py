"""Goal: the manifests are valid, are what their sources render to, and say what our code knows.

Method: the rendered files as data, against Kubernetes' own schemas and against our code: its flags,
its environment, its ports, its probes.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import click
import kubernetes_validate
import pytest

import engine.cli
import gateway.cli
import gms.cli
import lockserver.cli
import pool.cli
import understudy.cli.main
from engine.core import probes
from engine.supervisor import settings as engine_settings
from engine.supervisor.pool_config import place_in_pool, placed
from engine.supervisor.settings import OPTIONS, settle
from plumbing.errors import UsageError
from plumbing.pod.gms_files import write_device_names
from plumbing.service.config import resolve, size_bytes
from tests.deploy.manifests import (
    DEPLOY,
    IN_MANY_CONTAINERS,
    ON_HOST_MEMORY,
    OVERLAYS,
    PODS,
    POOLS,
    RENDERED,
    WITH_ONE_MODEL,
    containers,
    documents,
    engines_in_order,
    environment,
    kubectl,
    of_program,
    one,
    pod_spec,
    pool_file,
    words,
)

PROGRAMS: dict[str, click.Group] = {
    "lockserver": lockserver.cli.main,
    "gms": gms.cli.main,
    "gateway": gateway.cli.main,
    "pool": pool.cli.main,
    "engine": engine.cli.main,
    "understudy": understudy.cli.main.main,
}
PROBES = {
    "lockserver": {"live", "ready"},
    "gms": {"startup", "live", "ready"},
    "gateway": {"startup", "live", "ready"},
    "pool": {"startup", "live", "ready"},
    "engine": set(probes.TABLE),
}
PORTS = {8000: "http", 9400: "lockserver", 9401: "gms", 9402: "lock", 9403: "gateway", 9404: "pool"}
# Of Kubernetes' and of the system, not ours.
OTHER_ENVIRONMENT = {"HOME"}


# ------------------------------------------------------------------ they are what they claim to be


@pytest.mark.skipif(kubectl() is None, reason="needs kubectl 1.28 or newer, to render")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rendered_file_is_what_its_sources_render_to(overlay: str):
    """`make manifests` writes them; somebody forgot it where this fails."""
    path = kubectl()
    assert path is not None
    said = subprocess.run(
        [path, "kustomize", str(DEPLOY / "overlays" / overlay)], capture_output=True, check=True
    ).stdout
    assert said.decode() == (RENDERED / f"{overlay}.yaml").read_text()


@pytest.mark.parametrize("version", ["1.34", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid(overlay: str, version: str):
    for document in documents(overlay):
        kubernetes_validate.validate(document, version, strict=True)


def test_overlays_are_those_that_are_promised():
    one_pod = {"single-gpu", "tp2", "tp8", "two-shadows", "no-dra", "cpu"}
    assert set(OVERLAYS) == one_pod | {"multi-node-lock", "pool", "pool-cpu"}


# ------------------------------------------------------------------ our code knows what they say


@pytest.mark.parametrize("overlay", PODS)
def test_every_flag_is_taken_by_its_command(overlay: str):
    for container in containers(overlay):
        program, verb, *rest = words(overlay, container)
        assert not [word for word in rest if "$(" in word]
        command = PROGRAMS[program].commands[verb]
        ours = rest[: rest.index("--")] if "--" in rest else rest
        command.make_context(verb, [*ours], resilient_parsing=False)


@pytest.mark.parametrize("overlay", PODS)
def test_every_variable_is_read_by_somebody(overlay: str):
    """By the command itself, or by the container's own flags."""
    for container in containers(overlay):
        program, verb, *_ = container["command"]
        known = {
            name.strip("[]$ ")
            for option in PROGRAMS[program].commands[verb].params
            for name in re.findall(r"[A-Z][A-Z_]+", getattr(option, "help", "") or "")
        }
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container.get("args", []))))
        for name in (each["name"] for each in container.get("env", [])):
            assert name in known | used | OTHER_ENVIRONMENT, (container["name"], name)
        if container.get("envFrom"):
            assert used, f"{container['name']} has a ConfigMap and uses nothing of it"


@pytest.mark.parametrize("overlay", WITH_ONE_MODEL)
def test_every_value_of_the_config_map_is_used(overlay: str):
    text = json.dumps([each.get("args", []) for each in containers(overlay)])
    for name in one(overlay, "ConfigMap")["data"]:
        if overlay not in ON_HOST_MEMORY or name != "KV_CACHE_BYTES":  # not the reference backend's
            assert f"$({name})" in text


@pytest.mark.parametrize("overlay", PODS)
def test_every_probe_is_answered_by_the_code(overlay: str):
    for container in containers(overlay):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if "httpGet" in container.get(kind, {}):
                asked = container[kind]["httpGet"]
                owner = "engine" if asked["port"].startswith("engine-") else asked["port"]
                assert asked["path"].removeprefix("/") in PROBES[owner]
                assert asked["port"] in ports


@pytest.mark.parametrize("overlay", PODS)
def test_ports_are_those_of_the_code(overlay: str):
    seen: list[int] = []
    for container in containers(overlay):
        for port in container["ports"]:
            number, name = port["containerPort"], port["name"]
            seen.append(number)
            if name.startswith("engine-"):
                assert number == engine_settings.PORT_FIRST + int(name.removeprefix("engine-"))
            else:
                assert PORTS[number] == name
    assert len(seen) == len(set(seen))
    assert one(overlay, "Service", "understudy")["spec"]["ports"][0]["targetPort"] == "http"


@pytest.mark.parametrize("overlay", IN_MANY_CONTAINERS)
def test_each_engine_has_its_own_name_port_and_files(overlay: str):
    """In a pool names are the models', and ports are not: whoever scrapes them knows no models."""
    engines = of_program(overlay, "engine")
    count = 3 if overlay == "two-shadows" else 2
    names = [f"engine-{number}" for number in range(count)]
    if overlay in POOLS:
        names = [engine for engine, _ in engines_in_order(overlay)]
    assert [each["name"] for each in engines] == names
    for number, (name, container) in enumerate(zip(names, engines, strict=True)):
        port = f"engine-{number}"
        assert environment(overlay, container)["ENGINE_ID"] == name
        assert container["ports"][0] == {"name": port, "containerPort": 9410 + number}
        assert container["startupProbe"]["httpGet"]["port"] == port
        assert container["livenessProbe"]["httpGet"]["port"] == port
        mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert mounted["/tmp"] == f"tmp-{name}"


# ------------------------------------------------------------------ a pool


@pytest.mark.parametrize("overlay", POOLS)
def test_every_part_is_told_the_pool_files_models(overlay: str):
    """Goal: no model is in one place and missing in another. Method: the pool file of the ConfigMap
    against the flags of those who do not read it, and the path at which the others do."""
    (lock_server,), (memory,) = (of_program(overlay, each) for each in ("lockserver", "gms"))
    models = list(pool_file(overlay).models)
    assert len(models) == 3
    for container in (lock_server, memory):
        told = [each for each in container["args"] if each.startswith("--model=")]
        assert told == [f"--model={name}" for name in models]
    copies = [each for each in memory["args"] if each.startswith("--host-memory=")]
    sizes = [size_bytes(each.removeprefix("--host-memory=")) for each in copies]
    host_bytes = int(pool_file(overlay).host_memory)
    assert sizes == ([host_bytes] if host_bytes else [])
    limit = size_bytes(f"{memory['resources']['limits']['memory']}B")
    assert host_bytes < limit  # which makes the copies
    (volume,) = (each for each in pod_spec(overlay)["volumes"] if "configMap" in each)
    for program in ("gateway", "pool", "engine"):
        for container in of_program(overlay, program):
            mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
            (name,) = one(overlay, "ConfigMap")["data"]
            path = environment(overlay, container)["UNDERSTUDY_POOL"]
            assert path == f"{mounted[volume['name']]}/{name}"


@pytest.mark.parametrize("overlay", POOLS)
def test_engines_of_a_pool_start_as_the_pool_file_says(overlay: str, tmp_path: Path):
    """Goal: each container is an engine of the file, with its own port. Method: what the engine
    itself makes of the file and of its environment."""
    path = tmp_path / "pool.yaml"
    path.write_text(one(overlay, "ConfigMap")["data"]["pool.yaml"])
    write_device_names(str(tmp_path), ("GPU-0", "GPU-1"))
    for (name, model), container in zip(
        engines_in_order(overlay), of_program(overlay, "engine"), strict=True
    ):
        place = place_in_pool(str(path), name, str(tmp_path))
        config = placed(resolve(OPTIONS, {}, environment(overlay, container)), place, 9410)
        settings = settle(config, [], str(tmp_path))
        assert (settings.engine, settings.model) == (name, model)
        assert settings.http_port == container["ports"][0]["containerPort"]
        # A model below the volume that is mounted for it.
        assert [each for each in place.arguments if each == "/model" or each.startswith("/model/")]


@pytest.mark.parametrize("overlay", POOLS)
def test_pools_state_outlives_its_container(overlay: str):
    (container,) = of_program(overlay, "pool")
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    directory = environment(overlay, container)["UNDERSTUDY_DIR"]
    (shared,) = (name for path, name in mounts.items() if directory.startswith(path + "/"))
    volumes = {each["name"]: each for each in pod_spec(overlay)["volumes"]}
    assert "emptyDir" in volumes[shared]
    assert "readinessProbe" not in container  # without it models that are awake serve on


def test_flags_that_nobody_takes_are_found():
    """The check itself: a command with a flag that it does not have is refused."""
    with pytest.raises((click.UsageError, UsageError)):
        PROGRAMS["gms"].commands["serve"].make_context("serve", ["--no-such-flag"])
