"""The standard pod of one machine: lock server, GPU memory service, gateway, two engines.

What runs is the packaged manifest `pod.yaml`, which is `deploy/overlays/cpu` as it is rendered.
The flags of `understudy up` and `drill` become values of it, as `--set` would change them. Here the
parts meet in one directory instead of in volumes, and start faster than under a kubelet. In direct
mode there is no gateway: engines accept connections themselves.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from msgspec import structs

from engine.backends.registry import model_arguments
from plumbing.errors import UsageError
from plumbing.part.paths import lockserver_socket
from plumbing.service import init
from understudy.kubelet.containers import QUICK, Container, Kind, Pace, quick_startup
from understudy.manifest.files import read_manifest_file
from understudy.manifest.placement import INIT, Placement, place_containers
from understudy.manifest.spec import ContainerSpec, PodManifest, ProbeSpec
from understudy.manifest.values import Choices
from understudy.up.ports import Ports

POD_MANIFEST = Path(__file__).parent / "pod.yaml"
BACKEND_ARGUMENTS = "--"  # an engine's flags end here
GATEWAY = "gateway"  # the container that a pod in direct mode does not have


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
    pace: Pace = QUICK
    is_direct: bool = False
    hub_id: str | None = None

    def containers(self) -> list[Container]:
        """The pod, in the order in which it starts."""
        manifest = packaged_manifest()
        specs = (each for each in manifest.specs if not (self.is_direct and each.name == GATEWAY))
        return self.placed(structs.replace(manifest, specs=tuple(specs)), self.choices())

    def placed(
        self,
        manifest: PodManifest,
        choices: Choices,
        backend_arguments: Callable[[str], tuple[str, ...]] | None = None,
        ports: Mapping[str, int] | None = None,
    ) -> list[Container]:
        """A pod of containers like the packaged ones, on this machine.

        Args:
            backend_arguments: what the backend of a container is told, () for one without.
            ports: by name, if they are not those of the packaged pod.
        """
        told = backend_arguments or self._backend_arguments
        local = structs.replace(manifest, specs=tuple(map(self._local, manifest.specs)))
        place = Placement({}, ports or self.ports.by_name(), {}, choices, pace=self.pace)
        made = place_containers(local, place, program)
        return [self._quick(each, told(each.name)) for each in made]

    def _backend_arguments(self, name: str) -> tuple[str, ...]:
        if not name.startswith("engine-"):
            return ()
        model = model_arguments(self.backend, str(self.model), self.tensor_parallel)
        return (*model, *self.backend_args)

    def choices(self) -> Choices:
        """The values of the manifest that this pod changes; an empty flag is left out."""
        return Choices(
            env={
                "UNDERSTUDY_DIR": str(self.directory),
                "UNDERSTUDY_HTTP_HOST": self.http_host,
                "LOCKSERVER_SOCKET": lockserver_socket(str(self.directory)),
                "GMS_SOCKET_DIR": str(self.directory),
                "UNDERSTUDY_DIRECT": "yes" if self.is_direct else "no",
                **self.env,
            },
            config={"MODEL": str(self.model), "TENSOR_PARALLEL": str(self.tensor_parallel)},
            flag={
                "service": f"active={self.host}:{packaged_manifest().ports()['http']}",
                "backend": self.backend,
                "memory": self.memory,
                "device-bytes": self._sizes(),
                # GPUs are found; host memory has as many devices as are asked for.
                **({} if self.memory == "host" else {"devices": ""}),
            },
        )

    def _sizes(self) -> str:
        sizes = self.device_bytes
        return ",".join(map(str, sizes)) if isinstance(sizes, tuple) else str(sizes or "")

    def _local(self, spec: ContainerSpec) -> ContainerSpec:
        """`spec` without volumes and a home of its own, asked where its probes listen here. What an
        engine's backend is told comes from `model_arguments`: it depends on the backend."""
        command = spec.command
        if BACKEND_ARGUMENTS in command:
            command = command[: command.index(BACKEND_ARGUMENTS)]
        return structs.replace(
            spec,
            command=command,
            mounts=(),
            env=tuple(each for each in spec.env if each.name != "HOME"),
            startup=self._reachable(spec.startup),
            liveness=self._reachable(spec.liveness),
            readiness=None,  # nothing follows from it here
        )

    def _reachable(self, check: ProbeSpec | None) -> ProbeSpec | None:
        return check and structs.replace(check, host=reachable(self.http_host))

    def _quick(self, container: Container, arguments: tuple[str, ...]) -> Container:
        """`container` for users who wait: probed often, and started in order, so that engine-0
        serves first. It inherits their settings."""
        startup, command = container.startup, container.command
        return replace(
            container,
            command=(*command, BACKEND_ARGUMENTS, *arguments) if arguments else command,
            startup=startup and quick_startup(startup.url, startup.patience_s),
            starts_in_order=True,
            is_private=False,
        )


@cache
def packaged_manifest() -> PodManifest:
    """The pod as it is packaged, without the container that writes its model: `up` does that."""
    found = read_manifest_file(POD_MANIFEST)
    specs = (each for each in found.specs if each.kind is not Kind.INIT)
    return structs.replace(found, specs=tuple(specs))


def reachable(host: str) -> str:
    """Where to ask a server on this machine that listens at `host`."""
    return "127.0.0.1" if host in ("", "0.0.0.0", "::") else host


def program(name: str) -> tuple[str, ...]:
    """The command of one of our console scripts, the one that belongs to this interpreter."""
    if name == INIT:  # what its script would execute
        return (sys.executable, "-I", "-S", init.__file__)
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UsageError(
            "pod.not_installed",
            f"the command {name} is not installed beside {sys.executable}; run `pip install .`",
        )
    return (found,)
