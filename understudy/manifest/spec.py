"""A pod's manifest as typed data: of what Kubernetes would be told, what means something here.

Owns the words. `manifest/read.py` fills them in, `manifest/place.py` puts the pod somewhere. Knows
neither this machine nor the parts of Understudy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from understudy.kubelet.containers import Kind, Restart


@dataclass(frozen=True, slots=True)
class Check:
    """A probe as the manifest has it. `port`: a number, or the name of one of the container's."""

    path: str
    port: str | int
    host: str
    period_s: int
    timeout_s: int
    failure_threshold: int
    success_threshold: int
    initial_delay_s: int
    grace_s: int | None


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable of the environment: a text, or where the text comes from."""

    name: str
    value: str | None = None
    config_map: str = ""  # `key` of this
    key: str = ""
    field_path: str = ""  # or a field of the pod
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A whole ConfigMap as environment."""

    config_map: str
    prefix: str
    is_optional: bool


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a volume is seen in a container."""

    volume: str
    path: str
    sub_path: str


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume: an emptyDir, a hostPath with its `source`, or a configMap named `source`.
    Any other kind is something that only a cluster has."""

    name: str
    kind: str
    source: str = ""

    @property
    def is_of_pod(self) -> bool:
        """Whether it comes and goes with the pod."""
        return self.kind in ("emptyDir", "configMap")


@dataclass(frozen=True, slots=True)
class Spec:
    """One container as the manifest has it."""

    name: str
    kind: Kind
    restart: Restart
    command: tuple[str, ...]
    env: tuple[Variable, ...] = ()
    env_from: tuple[Source, ...] = ()
    ports: Mapping[str, int] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    startup: Check | None = None
    liveness: Check | None = None
    readiness: Check | None = None

    @property
    def checks(self) -> tuple[Check, ...]:
        found = (self.startup, self.liveness, self.readiness)
        return tuple(check for check in found if check is not None)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One pod. `unhonoured` fields and `left_out` objects mean nothing on one machine."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    specs: tuple[Spec, ...]
    volumes: Mapping[str, Volume]
    config_maps: Mapping[str, Mapping[str, str]]
    grace_s: int
    shares_processes: bool  # one PID namespace for all
    unhonoured: tuple[str, ...]
    left_out: tuple[str, ...]

    def ports(self) -> dict[str, int]:
        """Every named port of the pod, by number: neighbours stay neighbours where they move."""
        found = {name: number for spec in self.specs for name, number in spec.ports.items()}
        return dict(sorted(found.items(), key=lambda pair: pair[1]))
