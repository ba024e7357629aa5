"""A pod's manifest as typed data: the part of it that means something on one machine.

Filled in by `read.py`, turned into containers by `placement.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from understudy.kubelet.containers import Kind, Restart


class ProbeSpec(Struct, frozen=True):
    """A probe. `port`: a number, or the name of one of the container's ports."""

    path: str
    port: str | int
    host: str
    period_s: int
    timeout_s: int
    failure_threshold: int
    success_threshold: int
    initial_delay_s: int
    grace_s: int | None


class Variable(Struct, frozen=True):
    """One environment variable: a value, or where the value comes from."""

    name: str
    value: str | None = None
    config_map: str = ""  # from `key` of this ConfigMap
    key: str = ""
    field_path: str = ""  # or from a field of the pod
    is_optional: bool = False


class ConfigMapEnv(Struct, frozen=True):
    """A whole ConfigMap as environment."""

    config_map: str
    prefix: str
    is_optional: bool


class Mount(Struct, frozen=True):
    """Where a volume is mounted in a container."""

    volume: str
    path: str
    sub_path: str


class Volume(Struct, frozen=True):
    """A volume: an emptyDir, a hostPath at `source`, or a configMap named `source`. Any other kind
    exists only in a cluster."""

    name: str
    kind: str
    source: str = ""

    @property
    def is_of_pod(self) -> bool:
        """Whether it is created with the pod."""
        return self.kind in ("emptyDir", "configMap")


class ContainerSpec(Struct, frozen=True):
    """One container."""

    name: str
    kind: Kind
    restart: Restart
    command: tuple[str, ...]
    env: tuple[Variable, ...] = ()
    env_from: tuple[ConfigMapEnv, ...] = ()
    ports: Mapping[str, int] = {}
    mounts: tuple[Mount, ...] = ()
    startup: ProbeSpec | None = None
    liveness: ProbeSpec | None = None
    readiness: ProbeSpec | None = None

    @property
    def checks(self) -> tuple[ProbeSpec, ...]:
        found = (self.startup, self.liveness, self.readiness)
        return tuple(check for check in found if check is not None)


class PodManifest(Struct, frozen=True):
    """One pod. `ignored` fields and `left_out` objects have no effect on one machine."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    specs: tuple[ContainerSpec, ...]
    volumes: Mapping[str, Volume]
    config_maps: Mapping[str, Mapping[str, str]]
    grace_s: int
    shares_processes: bool  # one PID namespace for all containers
    ignored: tuple[str, ...]
    left_out: tuple[str, ...]

    def ports(self) -> dict[str, int]:
        """Every port of the pod by name, sorted by number: neighbours stay so when moved."""
        found = {name: number for spec in self.specs for name, number in spec.ports.items()}
        return dict(sorted(found.items(), key=lambda pair: pair[1]))
