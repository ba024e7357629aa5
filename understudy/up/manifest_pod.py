"""Prepares the pod of a manifest: its containers, ports and volumes.

Files of an existing pod are touched only after a check that it is not running.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from plumbing.errors import UsageError
from pool.pool_file import settle
from pool.yaml_file import YamlFile, parse
from understudy.kubelet import namespaces
from understudy.kubelet.containers import KUBELET
from understudy.manifest.files import load_manifest, make_volumes
from understudy.manifest.placement import (
    MODEL,
    Placement,
    common_paths,
    ignored_parts,
    needs_model,
    place_containers,
    place_ports,
    place_volumes,
    runtime_directory,
)
from understudy.manifest.spec import PodManifest
from understudy.manifest.values import Choices, pod_fields
from understudy.up.directory import refuse_second_pod
from understudy.up.local_pod import program
from understudy.up.ports import ANYWHERE, check_port, free_ports
from understudy.up.random_model import ONE_THREAD, make_random_model
from understudy.up.sessions import PreparedPod, Say

POOL_ENV = "UNDERSTUDY_POOL"
DRILL_BACKOFF_MAX_S = 1.0  # kills are not crashes, and twenty of them should take minutes


@dataclass(frozen=True, slots=True)
class PodRequest:
    """The pod that the user asks for. `backoff_max_s`: the longest restart delay; None: default."""

    file: Path
    choices: Choices
    pid_namespaces: str = "auto"
    backoff_max_s: float | None = None
    env: dict[str, str] | None = None
    port_offset: int = 0


async def prepare(request: PodRequest, directory: Path, say: Say, is_drilled: bool) -> PreparedPod:
    """Everything but the start. `say` gets what is ignored on this machine."""
    manifest, choices = await load_manifest(request.file), request.choices
    env = dict(request.env or {})
    model = directory / "random-model" if needs_model(manifest, choices) else None
    if model is not None:
        _refuse_other_backends(manifest, choices)
        choices = replace(choices, volume={**choices.volume, MODEL: str(model)})
        env |= {name: os.environ.get(name, value) for name, value in ONE_THREAD.items()}
    first = free_ports(max(1, len(manifest.ports())))[0] if is_drilled else None
    backoff_max_s = DRILL_BACKOFF_MAX_S if is_drilled else request.backoff_max_s
    has_pid_namespaces = await namespaces.wanted(request.pid_namespaces)
    place = Placement(
        place_volumes(manifest, directory, choices),
        place_ports(manifest, choices, first, request.port_offset),
        pod_fields(manifest, str(uuid.uuid4()), socket.gethostname()),
        choices,
        env,
        KUBELET.up_to(backoff_max_s),
        has_pid_namespaces,
    )
    containers = place_containers(manifest, place, program)
    runtime = runtime_directory(containers)
    if runtime is not None:
        await refuse_second_pod(runtime)
    for name, port in place.ports.items():
        check_port(port, ANYWHERE, f"--set port.{name}=NUMBER")
    if model is not None:
        await make_random_model(model)
    make_volumes(manifest, place.volumes, choices, common_paths(manifest, place))
    for line in (*ignored_parts(manifest), *_ignored_addresses(manifest, choices)):
        say(line)
    conditions = {
        "manifest": str(request.file),
        "restart_backoff_max_s": backoff_max_s,
        "pid_namespaces": has_pid_namespaces,
    }
    return PreparedPod(containers, runtime, f"the pod of {request.file}", conditions)


def _refuse_other_backends(manifest: PodManifest, choices: Choices) -> None:
    """Only the reference backend can serve a random model without further flags."""
    words = [word for spec in manifest.specs for word in spec.command]
    named = [word.removeprefix("--").partition("=") for word in words]
    backends = [choices.flag.get(name, backend) for name, _, backend in named if name == "backend"]
    for file in _pool_files(manifest, choices):
        backends += [model.backend for model in settle(file).models.values()]
    for backend in backends:
        if backend != "reference":
            raise UsageError(
                "pod.no_model",
                f"the {backend} backend needs a model; choose a Hugging Face checkpoint with "
                f"--set volume.{MODEL}=PATH",
            )


def _ignored_addresses(manifest: PodManifest, choices: Choices) -> Iterator[str]:
    """A manifest says itself where its pod listens: on port `http` of its lock server."""
    for file in _pool_files(manifest, choices):
        if ("listen",) in file.lines:
            yield (
                f"ignored: listen: {file.value['listen']} in {file.path}, which only `understudy up"
                " --pool` obeys; this pod listens where its lock server's --service says"
                " (--set port.http=NUMBER)"
            )


def _pool_files(manifest: PodManifest, choices: Choices) -> list[YamlFile]:
    """The pool files in the ConfigMaps of `manifest`, where containers are told of them."""
    found = {}
    for spec in manifest.specs:
        paths = [each.value or "" for each in spec.env if each.name == POOL_ENV]
        for path, mount in ((path, mount) for path in paths for mount in spec.mounts):
            volume = manifest.volumes.get(mount.volume)
            name = path.removeprefix(f"{mount.path.rstrip('/')}/")
            text = manifest.config_maps.get(volume.source, {}).get(name) if volume else None
            if text is not None:
                found[name] = parse(name, choices.config.get(name, text))
    return [*found.values()]
