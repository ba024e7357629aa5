"""The pod of a manifest on this machine: containers with host paths, ports and programs.

Pure. Owns what a manifest leaves to its node: the directories of volumes, the actual ports, and how
our programs learn them. There are no mount namespaces: an emptyDir is a directory below the pod's
own, and arguments and variables that begin with a mount path get the volume's directory instead,
as do words in the files of ConfigMaps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plumbing.errors import UsageError
from understudy.kubelet.containers import KUBELET, Container, HttpProbe, Pace
from understudy.manifest.spec import ContainerSpec, PodManifest, ProbeSpec
from understudy.manifest.values import (
    LOCAL_IP,
    Choices,
    arguments,
    replace_paths,
    replace_ports,
    variables,
)

VOLUMES = "vol"  # short: it holds sockets, whose paths have at most 107 bytes
MODEL = "model"  # the volume that gets a random model by default
TEMPORARY = "/tmp"
SHARED_MEMORY = "/dev/shm"  # programs use this path as is; it stays the machine's
DIRECTORY_ENV = "UNDERSTUDY_DIR"
HTTP_PORT_ENV = "UNDERSTUDY_HTTP_PORT"

# Variables of `understudy up`, which has the ports of all parts: engine n's is that of engine 0 +
# n.
UP = "understudy"
INIT = "understudy-init"  # what runs a container's program, by plumbing/service/init.py
UP_PORTS = {
    "http": "UNDERSTUDY_SERVICE_PORT",
    "lockserver": "UNDERSTUDY_LOCKSERVER_PORT",
    "gms": "UNDERSTUDY_GMS_PORT",
    "gateway": "UNDERSTUDY_GATEWAY_PORT",
    "engine-0": "UNDERSTUDY_ENGINE_PORT",
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pod runs. `volumes`: directories by name; `ports`: numbers by name; `fields`: values
    for `fieldRef`; `env`: variables that the manifest may override."""

    volumes: Mapping[str, Path]
    ports: Mapping[str, int]
    fields: Mapping[str, str]
    choices: Choices = field(default_factory=Choices)
    env: Mapping[str, str] = field(default_factory=dict)
    pace: Pace = KUBELET
    has_pid_namespaces: bool = False


def place_volumes(manifest: PodManifest, directory: Path, choices: Choices) -> dict[str, Path]:
    """The directory of each volume, for a pod in `directory`.

    Raises:
        UsageError: `manifest.no_volume`, one exists only in a cluster.
    """
    found = {}
    for name, volume in manifest.volumes.items():
        if name in choices.volume:
            found[name] = Path(os.path.abspath(choices.volume[name]))
        elif volume.is_of_pod:
            found[name] = directory / VOLUMES / name
        elif volume.kind == "hostPath":
            found[name] = Path(volume.source)
        else:
            raise UsageError(
                "manifest.no_volume",
                f"volume {name} is a {volume.kind}, which exists only in a cluster; choose a "
                f"directory with --set volume.{name}=PATH",
            )
    return found


def needs_model(manifest: PodManifest, choices: Choices) -> bool:
    """Whether there is a volume for a model that has no directory here."""
    volume = manifest.volumes.get(MODEL)
    is_here = volume is None or volume.is_of_pod or volume.kind == "hostPath"
    return not is_here and MODEL not in choices.volume


def place_ports(
    manifest: PodManifest, choices: Choices, first: int | None = None, offset: int = 0
) -> dict[str, int]:
    """The number of each port, plus `offset` unless the user has chosen it; consecutive from
    `first` on, if that is given."""
    ports = {name: port + offset for name, port in manifest.ports().items()}
    if first is not None:
        ports = {name: first + number for number, name in enumerate(ports)}
    return {**ports, **choices.port}


def place_containers(
    manifest: PodManifest, place: Placement, program: Callable[[str], tuple[str, ...]]
) -> list[Container]:
    """The pod in starting order; `program` finds the executable that a command names.

    Raises:
        UsageError: a container cannot run here, and why.
    """
    place.choices.check(manifest)
    return [_container(spec, manifest, place, program) for spec in manifest.specs]


def common_paths(manifest: PodManifest, place: Placement) -> dict[str, str]:
    """The directories of the mount paths that mean the same in every container that has them."""
    found: dict[str, set[str]] = {}
    for spec in manifest.specs:
        for path, directory in _paths(spec, place).items():
            found.setdefault(path, set()).add(directory)
    return {path: each.pop() for path, each in found.items() if len(each) == 1}


def runtime_directory(containers: Sequence[Container]) -> Path | None:
    """The directory that the pod's parts share; None if they are not Understudy's."""
    for container in containers:
        if DIRECTORY_ENV in container.env:
            return Path(container.env[DIRECTORY_ENV])
        for word in container.command:
            if word.startswith("--dir="):
                return Path(word.removeprefix("--dir="))
    return None


def ignored_parts(manifest: PodManifest) -> list[str]:
    """One or two lines about what has no effect on this machine."""
    fields = list(manifest.ignored)
    if any(mount.path == SHARED_MEMORY for spec in manifest.specs for mount in spec.mounts):
        fields.append(f"the volume at {SHARED_MEMORY}")
    lines = [f"ignored on one machine: {', '.join(fields)}"] if fields else []
    left_out = f"not started: {', '.join(manifest.left_out)}"
    return [*lines, left_out] if manifest.left_out else lines


def _container(
    spec: ContainerSpec,
    manifest: PodManifest,
    place: Placement,
    program: Callable[[str], tuple[str, ...]],
) -> Container:
    values = variables(spec, manifest, place.choices, place.fields)
    command = arguments(spec, values, place.choices)
    has_init = command[:1] == (INIT,)
    if has_init:
        command = command[1:]
    if not command:
        raise UsageError(
            "manifest.no_command",
            f"container {spec.name} has no command, and its image is not read here; add the "
            "command to the manifest",
        )
    numbers = {number: place.ports[name] for name, number in spec.ports.items()}
    paths = _paths(spec, place)
    first, *rest = (replace_paths(word, paths) for word in replace_ports(command, numbers))
    env = {name: replace_paths(value, paths) for name, value in values.items()}
    if TEMPORARY in paths:
        env["TMPDIR"] = paths[TEMPORARY]
    env |= _port_variables(spec, command[0], place)
    return Container(
        spec.name,
        (*program(first), *rest),
        {**place.env, **env},
        _probe(spec.startup, spec, place),
        spec.restart,
        manifest.grace_s,
        spec.kind,
        _probe(spec.liveness, spec, place),
        _probe(spec.readiness, spec, place),
        place.pace,
        is_private=True,
        has_pid_namespace=place.has_pid_namespaces and not manifest.shares_processes,
        init=program(INIT) if has_init else (),
    )


def _paths(spec: ContainerSpec, place: Placement) -> dict[str, str]:
    """The directory on this machine for each mount path of the container."""
    found = {}
    for mount in spec.mounts:
        if mount.path == SHARED_MEMORY:
            continue
        if mount.volume not in place.volumes:
            raise UsageError(
                "manifest.broken",
                f"invalid manifest: container {spec.name} mounts volume {mount.volume}, which the "
                "pod does not define",
            )
        found[mount.path.rstrip("/")] = str(place.volumes[mount.volume] / mount.sub_path)
    return found


def _port_variables(spec: ContainerSpec, program: str, place: Placement) -> dict[str, str]:
    """The variables with which the container's program learns its ports."""
    if os.path.basename(program) == UP:
        _check_neighbours(spec, place)
        return {
            variable: str(place.ports[name])
            for name, variable in UP_PORTS.items()
            if name in spec.ports
        }
    asked = {_port(check, spec, place) for check in spec.checks}
    return {HTTP_PORT_ENV: str(asked.pop())} if len(asked) == 1 else {}


def _check_neighbours(spec: ContainerSpec, place: Placement) -> None:
    """`understudy up` takes one port for all engines: theirs must be consecutive."""
    engines = [name for name in spec.ports if name.startswith("engine-")]
    for name in engines:
        number = int(name.removeprefix("engine-"))
        if place.ports[name] != place.ports["engine-0"] + number:
            raise UsageError(
                "manifest.scattered_ports",
                f"port {name} must be that of engine-0 plus {number} in container {spec.name}, "
                "which runs `understudy up`; set both",
            )


def _port(check: ProbeSpec, spec: ContainerSpec, place: Placement) -> int:
    """The actual port of a probe, which gives a name or a number of the manifest."""
    for name, number in spec.ports.items():
        if check.port in (name, number):
            return place.ports[name]
    if isinstance(check.port, int):
        return check.port
    raise UsageError(
        "manifest.broken",
        f"invalid manifest: a probe of container {spec.name} uses port {check.port!r}, which the "
        "container does not declare",
    )


def _probe(check: ProbeSpec | None, spec: ContainerSpec, place: Placement) -> HttpProbe | None:
    if check is None:
        return None
    path = check.path if check.path.startswith("/") else f"/{check.path}"
    return HttpProbe(
        f"http://{check.host or LOCAL_IP}:{_port(check, spec, place)}{path}",
        check.period_s,
        check.timeout_s,
        check.failure_threshold,
        check.success_threshold,
        check.initial_delay_s,
        check.grace_s,
    )
