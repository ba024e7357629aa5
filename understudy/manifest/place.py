"""The pod of a manifest on this machine: containers with host paths, ports and programs.

Pure. Owns what a manifest leaves to its node: where volumes lie, which ports are really used and
how our programs are told of them. There are no mount namespaces: an emptyDir is a directory below
the pod's own, and wherever a word or a variable begins with the path at which a container would see
a volume, the directory is put in its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plumbing.errors import UsageError
from understudy.kubelet.containers import KUBELET, Container, Pace
from understudy.kubelet.probes import Probe
from understudy.manifest.spec import Check, Manifest, Spec
from understudy.manifest.values import (
    LOCAL_IP,
    Choices,
    replace_paths,
    replace_ports,
    variables,
    words,
)

VOLUMES = "vol"  # short: sockets lie in one, and a socket's whole path has 107 bytes
MODEL = "model"  # the volume that gets a random model where nobody names one
TEMPORARY = "/tmp"
SHARED_MEMORY = "/dev/shm"  # programs know it by this name alone; it stays the machine's
DIRECTORY_ENV = "UNDERSTUDY_DIR"
HTTP_PORT_ENV = "UNDERSTUDY_HTTP_PORT"

# `understudy up` has the ports of all its parts, engine n's after that of engine 0.
UP = "understudy"
UP_PORTS = {
    "http": "UNDERSTUDY_SERVICE_PORT",
    "lockserver": "UNDERSTUDY_LOCKSERVER_PORT",
    "gms": "UNDERSTUDY_GMS_PORT",
    "engine-0": "UNDERSTUDY_ENGINE_PORT",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pod is to run. `volumes`: each one's directory; `ports`: each one's number, by name;
    `fields`: the pod's for `fieldRef`; `env`: beneath what the manifest says."""

    volumes: Mapping[str, Path]
    ports: Mapping[str, int]
    fields: Mapping[str, str]
    choices: Choices = field(default_factory=Choices)
    env: Mapping[str, str] = field(default_factory=dict)
    pace: Pace = KUBELET
    has_pid_namespaces: bool = False


def place_volumes(manifest: Manifest, directory: Path, choices: Choices) -> dict[str, Path]:
    """Where each volume lies, for a pod in `directory`.

    Raises:
        UsageError: `manifest.no_volume`, one is what only a cluster has.
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
                f"volume {name} is a {volume.kind}, which only a cluster has; name a directory "
                f"for it with --set volume.{name}=PATH",
            )
    return found


def needs_model(manifest: Manifest, choices: Choices) -> bool:
    """Whether there is a volume for a model, and nothing here to put there."""
    volume = manifest.volumes.get(MODEL)
    is_here = volume is None or volume.is_of_pod or volume.kind == "hostPath"
    return not is_here and MODEL not in choices.volume


def place_ports(manifest: Manifest, choices: Choices, first: int | None = None) -> dict[str, int]:
    """The number of each port: one after the other from `first` on, where that is given."""
    ports = manifest.ports()
    if first is not None:
        ports = {name: first + number for number, name in enumerate(ports)}
    return {**ports, **choices.port}


def place_containers(
    manifest: Manifest, place: Place, program: Callable[[str], tuple[str, ...]]
) -> list[Container]:
    """The pod in the order of starting; `program` finds what a command's first word names.

    Raises:
        UsageError: a container that cannot run here, and why.
    """
    place.choices.check(manifest)
    return [_container(spec, manifest, place, program) for spec in manifest.specs]


def runtime_directory(containers: Sequence[Container]) -> Path | None:
    """The directory that the pod's parts share; None if these are not ours."""
    for container in containers:
        if DIRECTORY_ENV in container.env:
            return Path(container.env[DIRECTORY_ENV])
        for word in container.command:
            if word.startswith("--dir="):
                return Path(word.removeprefix("--dir="))
    return None


def unhonoured(manifest: Manifest) -> list[str]:
    """One or two lines about what the manifest says and this machine does not do."""
    fields = list(manifest.unhonoured)
    if any(mount.path == SHARED_MEMORY for spec in manifest.specs for mount in spec.mounts):
        fields.append(f"the volume at {SHARED_MEMORY}")
    lines = [f"not honoured on one machine: {', '.join(fields)}"] if fields else []
    left_out = f"left out: {', '.join(manifest.left_out)}"
    return [*lines, left_out] if manifest.left_out else lines


def _container(
    spec: Spec, manifest: Manifest, place: Place, program: Callable[[str], tuple[str, ...]]
) -> Container:
    values = variables(spec, manifest, place.choices, place.fields)
    command = words(spec, values, place.choices)
    if not command:
        raise UsageError(
            "manifest.no_command",
            f"container {spec.name} has no command, and its image cannot be asked for one here; "
            "write the command into the manifest",
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
    )


def _paths(spec: Spec, place: Place) -> dict[str, str]:
    """What each path of the container is on this machine."""
    found = {}
    for mount in spec.mounts:
        if mount.path == SHARED_MEMORY:
            continue
        if mount.volume not in place.volumes:
            raise UsageError(
                "manifest.broken",
                f"container {spec.name} mounts volume {mount.volume}, which the pod does not "
                "have; mend the manifest",
            )
        found[mount.path.rstrip("/")] = str(place.volumes[mount.volume] / mount.sub_path)
    return found


def _port_variables(spec: Spec, program: str, place: Place) -> dict[str, str]:
    """How the container's program is told of its ports."""
    if os.path.basename(program) == UP:
        _check_neighbours(spec, place)
        return {
            variable: str(place.ports[name])
            for name, variable in UP_PORTS.items()
            if name in spec.ports
        }
    asked = {_port(check, spec, place) for check in spec.checks}
    return {HTTP_PORT_ENV: str(asked.pop())} if len(asked) == 1 else {}


def _check_neighbours(spec: Spec, place: Place) -> None:
    """`understudy up` is told of one port for all engines: theirs must follow each other."""
    engines = [name for name in spec.ports if name.startswith("engine-")]
    for name in engines:
        number = int(name.removeprefix("engine-"))
        if place.ports[name] != place.ports["engine-0"] + number:
            raise UsageError(
                "manifest.scattered_ports",
                f"port {name} is to be that of engine-0 plus {number} in container {spec.name}, "
                "which runs `understudy up`; set both",
            )


def _port(check: Check, spec: Spec, place: Place) -> int:
    """The number that a probe asks: a port's name, or its number in the manifest."""
    for name, number in spec.ports.items():
        if check.port in (name, number):
            return place.ports[name]
    if isinstance(check.port, int):
        return check.port
    raise UsageError(
        "manifest.broken",
        f"a probe of container {spec.name} asks port {check.port!r}, which it does not have; "
        "mend the manifest",
    )


def _probe(check: Check | None, spec: Spec, place: Place) -> Probe | None:
    if check is None:
        return None
    path = check.path if check.path.startswith("/") else f"/{check.path}"
    return Probe(
        f"http://{check.host or LOCAL_IP}:{_port(check, spec, place)}{path}",
        check.period_s,
        check.timeout_s,
        check.failure_threshold,
        check.success_threshold,
        check.initial_delay_s,
        check.grace_s,
    )
