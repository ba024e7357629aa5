"""The containers of a pod on one machine: one table, for a pod of one model and for a pool's.

`deploy/base` and `deploy/overlays/pool` say the same to Kubernetes, and a test compares them with
the table. Four things differ on one machine: the containers share a directory instead of volumes,
the gateway has no memory limit to respect, startup probes are sent more often, because a user
waits, and there are no liveness probes: what hangs is replaced by the init above it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from engine.backends.registry import model_arguments
from plumbing.errors import UsageError
from plumbing.pod.paths import lockserver_socket
from plumbing.pod.supervision import GRACE_MS
from plumbing.service import init
from plumbing.text import join_address
from pool.pool_file import PoolFile, engines_of
from understudy.pod.ports import FLEET_APART, HOP_PORT, Ports

GATEWAY, POOL, UI, FRONT = "gateway", "pool", "ui", "front"
HOST_PREFIX = "HOST-"  # of a device in host memory
INIT = (sys.executable, "-I", "-S", init.__file__)  # what `understudy-init` executes
PODS_FILE = "pods"  # the names of a fleet's pods, in its directory
BEHIND_FRONT = "UNDERSTUDY_BEHIND_FRONT"  # set in a pod whose clients use its front's address
REPLACING_INIT = (*INIT, init.REPLACEABLE)  # starts a successor on SIGHUP


@dataclass(frozen=True, slots=True)
class HttpProbe:
    """A periodic HTTP GET, with Kubernetes' numbers."""

    url: str
    period_s: float
    failure_threshold: int

    @property
    def patience_s(self) -> float:
        """How long a container has until its first success."""
        return self.period_s * self.failure_threshold


@dataclass(frozen=True, slots=True)
class Container:
    """One program of the pod. `env` is added to the runner's own environment.

    `init`: what runs `command` and restarts it in place; (): the runner restarts it.
    `is_engine`: stops at the same time as the engines beside it; so do the pods of a fleet.
    `starts_in_order`: starts once the container before it is up; an engine may do without.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    startup: HttpProbe | None = None
    init: tuple[str, ...] = ()
    is_engine: bool = False
    starts_in_order: bool = True
    grace_s: float = GRACE_MS / 1000
    pause_s: float = 5.0  # before a restart in a loop


@dataclass(frozen=True, slots=True)
class PoolModels:
    """The models of a pool file, instead of the pod's own model."""

    path: Path
    file: PoolFile

    @property
    def engines(self) -> list[str]:
        """Every engine, in the order of the file."""
        models = self.file.models.items()
        return [engine for name, model in models for engine in engines_of(name, model)]

    @property
    def host_devices(self) -> int:
        """How many devices of the host the file needs."""
        numbers = [each.removeprefix(HOST_PREFIX) for each in self.file.devices]
        return max((int(each) for each in numbers if each.isdecimal()), default=0) + 1


@dataclass(frozen=True, slots=True)
class LocalPod:
    """What distinguishes one local pod from another.

    `model` None: a random one, still to be created, or that of the Hugging Face Hub's `hub_id`,
    still to be downloaded. `backend_args` go to the backend unchanged; `env` is added to every
    container's environment.
    """

    directory: Path
    model: Path | None
    ports: Ports = field(default_factory=Ports)
    backend: str = "reference"
    backend_args: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    memory: str = "host"
    # Of all devices, or of each; the memory service's default unless given.
    device_bytes: str | int | tuple[int, ...] | None = None
    tensor_parallel: int = 1  # number of devices, and of model processes in each engine
    env: Mapping[str, str] = field(default_factory=dict)
    http_host: str = "127.0.0.1"  # where probes and metrics listen
    hub_id: str | None = None
    pool: PoolModels | None = None

    def containers(self) -> list[Container]:
        """The pod, in the order in which it starts. Engines begin cold in a pool."""
        pool, ports = self.pool, self.ports
        service = f"--service=active={join_address(self.host, ports.service)}"
        models = [f"--model={name}" for name in pool.file.models] if pool else []
        file = {"UNDERSTUDY_POOL": str(pool.path.absolute())} if pool else {}
        lock = ("lockserver", "serve", service, *models)
        memory = ("gms", "serve", *self._memory(), *models)
        gateway = ("gateway", "serve")
        return [
            self._row("lockserver", lock, ports.lockserver, "live"),
            self._row("gms", memory, ports.gms, failures=120),
            self._row(GATEWAY, gateway, ports.gateway, env=file, by=REPLACING_INIT),
            *([self._row(POOL, ("pool", "serve"), ports.pool, env=file)] if pool else []),
            *self._engines(file),
            # It shows the others, and none of them needs it.
            *([self._row(UI, ("understudy", "ui"), ports.ui, "live")] if ports.ui else []),
        ]

    def fleet(self, replicas: int, offset: int, flags: Sequence[str]) -> list[Container]:
        """This many pods, and the front before them that has the ports of this one. Each pod is an
        `understudy up` of its own: it has its directory, its ports, and a life of its own. `offset`
        is that of this pod's ports; `flags` are for each pod."""
        pods = []
        for number in range(replicas):
            name, moved = pod_name(number), offset + FLEET_APART * (number + 1)
            ports = Ports().moved(moved)
            where = [f"--dir={self.directory / name}", "--host=127.0.0.1"]
            where += [f"--port-offset={moved}", f"--service-port={ports.service}"]
            rest = ("--", *self.backend_args) if self.backend_args else ()
            words = ("understudy", "up", "--replicas=1", *where, *flags, *rest)
            row = self._row(name, words, ports.gateway, "ready", period_s=2, failures=3600, by=())
            hop = f"127.0.0.1:{HOP_PORT + moved}"
            own = {"UNDERSTUDY_HOP": hop, "UNDERSTUDY_POD_NAME": name, BEHIND_FRONT: "1"}
            env = {**self.env, **own}
            pods.append(replace(row, env=env, is_engine=True, starts_in_order=False))
        listen = f"--listen={join_address(self.host, self.ports.service)}"
        names = f"--pods=@{self.directory / PODS_FILE}"
        front = ("gateway", "serve", names, listen)
        return [*pods, self._row(FRONT, front, self.ports.gateway, "ready")]

    def _engines(self, file: Mapping[str, str]) -> Iterator[Container]:
        """A row for each engine."""
        command = ("engine", "run", *self._backend())
        for number, port in enumerate(self.ports.engines):
            name = self.pool.engines[number] if self.pool else f"engine-{number}"
            env = {"ENGINE_ID": name, **file}
            row = self._row(name, command, port, period_s=2, failures=3600, env=env)
            yield replace(row, is_engine=True)

    def _row(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        page: str = "startup",
        *,
        period_s: int = 1,
        failures: int = 60,
        env: Mapping[str, str] | None = None,
        by: tuple[str, ...] = INIT,
    ) -> Container:
        """A row. `page`, `period_s` and `failures` are of its startup probe."""
        url = f"http://{join_address(reachable(self.http_host), port)}/{page}"
        return Container(
            name,
            (*program(command[0]), *command[1:]),
            self._environment(port, env),
            startup=HttpProbe(url, period_s, failures),
            init=by,
        )

    def _backend(self) -> tuple[str, ...]:
        """An engine's arguments; in a pool the file has them."""
        if self.pool:
            return ()
        model = model_arguments(self.backend, str(self.model), self.tensor_parallel)
        return (f"--backend={self.backend}", "--", *model, *self.backend_args)

    def _memory(self) -> list[str]:
        """Of the memory service. GPUs are found; host memory is divided into devices."""
        found = [f"--memory={self.memory}"]
        if self.memory == "host":
            count = self.pool.host_devices if self.pool else self.tensor_parallel
            found.append(f"--devices={count}")
        if sizes := self.device_bytes:
            text = ",".join(map(str, sizes)) if isinstance(sizes, tuple) else str(sizes)
            found.append(f"--device-bytes={text}")
        if self.pool and (copies := int(self.pool.file.host_memory)):
            found.append(f"--host-memory={copies}")
        return found

    def _environment(self, port: int, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return {
            "UNDERSTUDY_DIR": str(self.directory),
            "UNDERSTUDY_HTTP_HOST": self.http_host,
            "UNDERSTUDY_HTTP_PORT": str(port),
            # Whatever the user's own environment says:
            "LOCKSERVER_SOCKET": lockserver_socket(str(self.directory)),
            "GMS_SOCKET_DIR": str(self.directory),
            **self.env,
            **(more or {}),
        }


def pod_name(number: int) -> str:
    """That of a fleet's pod, and of its directory."""
    return f"pod-{number}"


def starts(containers: Sequence[Container]) -> list[list[Container]]:
    """The groups that start together, in order."""
    return _groups(containers, lambda each: each.is_engine and not each.starts_in_order)


def stops(containers: Sequence[Container]) -> list[list[Container]]:
    """The groups that stop together, in order. All engines are stopped at once: a standby that is
    stopped after the active engine would take over for a moment. What engines need stops after
    them, because an engine that drains still needs its lock server and its memory."""
    return _groups(containers, lambda each: each.is_engine)[::-1]


def _groups(
    containers: Sequence[Container], is_with_others: Callable[[Container], bool]
) -> list[list[Container]]:
    numbered = enumerate(containers)
    grouped = groupby(numbered, lambda pair: -1 if is_with_others(pair[1]) else pair[0])
    return [[container for _, container in group] for _, group in grouped]


def reachable(host: str) -> str:
    """Where to send requests to a server on this machine that listens at `host`."""
    return "127.0.0.1" if host in ("", "0.0.0.0", "::") else host


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
