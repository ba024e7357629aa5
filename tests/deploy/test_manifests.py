"""Goal: the manifests are valid, are what their sources render to, and say what our code knows.

Method: the rendered files as data, against Kubernetes' own schemas and against our code: its flags,
its environment, its ports, its probes.
"""

from __future__ import annotations

import re
import subprocess

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
from tests.deploy.manifests import (
    DEPLOY,
    OVERLAYS,
    PODS,
    RENDERED,
    containers,
    documents,
    kubectl,
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


# ------------------------------------------------------------------ a pool
