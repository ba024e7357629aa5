"""The standard pod of one machine as a list of containers: lock server, memory, two engines.

Owns the command lines and the ports; a Kubernetes manifest says the same in YAML. Nothing here
starts anything. The surprising thing: ports are checked before the start. Without that, a second
pod's probes would be answered by the first one's servers, and the start would look fine.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plumbing.errors import UsageError
from understudy.kubelet.containers import QUICK, Container, Pace
from understudy.kubelet.probes import Probe, quick_startup
from understudy.up.ports import check_port, free_ports

SERVICE_PORT = 8000  # DESIGN §9
LOCKSERVER_PORT = 9400
GMS_PORT = 9401
ENGINE_PORT = 9410  # engine n: this plus n

# Of an engine's supervisor, as in the manifests: one that hangs is gone within four seconds. It
# does next to nothing, so a second is a long time for it to answer in, and it has two.
HANG_PERIOD_S, HANG_TIMEOUT_S, HANG_LOOKS, HANG_GRACE_S = 1.0, 1.0, 2, 1.0

SERVER_STARTUP_S = 60.0  # imports on a busy machine; there is nothing to load
ENGINE_STARTUP_S = 7200.0  # DESIGN §9: first init and waiting for weights 2 h


@dataclass(frozen=True, slots=True)
class Ports:
    """Every TCP port of a pod. `engines[n]` is engine n's probe port."""

    service: int = SERVICE_PORT
    lockserver: int = LOCKSERVER_PORT
    gms: int = GMS_PORT
    engines: tuple[int, ...] = (ENGINE_PORT, ENGINE_PORT + 1)

    def by_flag(self) -> list[tuple[str, int]]:
        """Every port with the flag of `understudy up` that moves it."""
        return [
            ("--service-port", self.service),
            ("--lockserver-port", self.lockserver),
            ("--gms-port", self.gms),
            *(("--engine-port", port) for port in self.engines),
        ]

    def all(self) -> tuple[int, ...]:
        return tuple(port for _, port in self.by_flag())


@dataclass(frozen=True, slots=True)
class LocalPod:
    """What distinguishes one local pod from another.

    `backend_args` go to the backend as they are; `env` is laid over every container's environment.
    """

    directory: Path
    model: Path
    ports: Ports = field(default_factory=Ports)
    backend: str = "reference"
    backend_args: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    memory: str = "host"
    device_bytes: str | None = None  # the memory service's default unless given
    tensor_parallel: int = 1  # so many devices, and as many model processes in each engine
    env: Mapping[str, str] = field(default_factory=dict)
    http_host: str = "127.0.0.1"  # where probes and metrics listen
    pace: Pace = QUICK

    @property
    def service_url(self) -> str:
        return f"http://{reachable(self.host)}:{self.ports.service}"

    def _probes(self, port: int) -> str:
        return f"http://{reachable(self.http_host)}:{port}"

    def containers(self) -> list[Container]:
        """The pod, in the order in which it starts."""
        shared = {
            "UNDERSTUDY_DIR": str(self.directory),
            "LOCKSERVER_SOCKET": str(self.directory / "lockserver.sock"),
            "GMS_SOCKET_DIR": str(self.directory),
            **self.env,
        }
        engines = [
            self._engine(number, port, shared) for number, port in enumerate(self.ports.engines)
        ]
        return [self._lockserver(shared), self._gms(shared), *engines]

    def _lockserver(self, shared: Mapping[str, str]) -> Container:
        port = self.ports.lockserver
        command = (
            *program("lockserver"),
            "serve",
            f"--dir={self.directory}",
            f"--service=active={self.host}:{self.ports.service}",
            f"--http-host={self.http_host}",
            f"--http-port={port}",
        )
        startup = quick_startup(f"{self._probes(port)}/live", SERVER_STARTUP_S)
        return Container("lockserver", command, shared, startup, pace=self.pace)

    def _gms(self, shared: Mapping[str, str]) -> Container:
        port = self.ports.gms
        command = (
            *program("gms"),
            "serve",
            f"--dir={self.directory}",
            f"--memory={self.memory}",
            # GPUs are there or not; those of host memory are as many as are asked for.
            *((f"--devices={self.tensor_parallel}",) if self.memory == "host" else ()),
            *((f"--device-bytes={self.device_bytes}",) if self.device_bytes else ()),
            f"--http-host={self.http_host}",
            f"--http-port={port}",
        )
        startup = quick_startup(f"{self._probes(port)}/startup", SERVER_STARTUP_S)
        return Container("gms", command, shared, startup, pace=self.pace)

    def _engine(self, number: int, port: int, shared: Mapping[str, str]) -> Container:
        name = f"engine-{number}"
        command = (
            *program("engine"),
            "run",
            f"--backend={self.backend}",
            f"--dir={self.directory}",
            f"--http-host={self.http_host}",
            f"--http-port={port}",
            "--",
            *model_arguments(self.backend, self.model, self.tensor_parallel),
            *self.backend_args,
        )
        env = {**shared, "ENGINE_ID": name}
        startup = quick_startup(f"{self._probes(port)}/startup", ENGINE_STARTUP_S)
        liveness = Probe(
            f"{self._probes(port)}/live",
            HANG_PERIOD_S,
            HANG_TIMEOUT_S,
            HANG_LOOKS,
            grace_s=HANG_GRACE_S,
        )
        return Container(name, command, env, startup, liveness=liveness, pace=self.pace)


def reachable(host: str) -> str:
    """Where to ask a server on this machine that listens at `host`."""
    return "127.0.0.1" if host in ("", "0.0.0.0", "::") else host


def model_arguments(backend: str, model: Path, ranks: int) -> tuple[str, ...]:
    """How `backend` is told what to serve, and over how many devices.

    One rank is every backend's default, also of those that do not know the flag.
    """
    if backend == "vllm":
        return (str(model), *(("--tensor-parallel-size", str(ranks)) if ranks > 1 else ()))
    return ("--model", str(model), *(("--tensor-parallel", str(ranks)) if ranks > 1 else ()))


def program(name: str) -> tuple[str, ...]:
    """The command of one of our console scripts, the one that belongs to this interpreter."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UsageError(
            "pod.not_installed",
            f"the command {name} is not installed beside {sys.executable}; run `pip install .`",
        )
    return (found,)


def free_pod_ports(engines: int = 2) -> Ports:
    """Ports for a whole pod."""
    service, lockserver, gms, *rest = free_ports(3 + engines)
    return Ports(service, lockserver, gms, tuple(rest))


def check_ports(ports: Ports, host: str = "127.0.0.1", http_host: str = "127.0.0.1") -> None:
    """Raise if somebody already has one of `ports`; `host` is where the service will listen,
    `http_host` where the probes will.

    Raises:
        UnderstudyError: `pod.port_in_use`, with the number and the way out.
    """
    for flag, port in ports.by_flag():
        check_port(port, host if port == ports.service else http_host, flag)
