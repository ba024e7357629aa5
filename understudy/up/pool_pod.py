"""The pod of a pool file: many models on one machine, with the parts of the packaged manifest.

Its lock server, memory service and gateway are those of every pod, told the models' names. The
pool and each model's engines are made after the gateway's and an engine's example. All engines
begin cold: the pool says which of them starts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from plumbing.errors import UsageError
from pool.pool_file import read_pool_file
from pool.server.state_file import begin_new_pod
from pool.settings import PoolFile, engines_of
from understudy.kubelet.containers import Container
from understudy.manifest.placement import INIT
from understudy.manifest.spec import ContainerSpec, ProbeSpec, Variable
from understudy.up.directory import forget_engines, refuse_second_pod
from understudy.up.hub_model import HUB_BACKEND, hub_directory, is_hub_id
from understudy.up.local_pod import GATEWAY, LocalPod, packaged_manifest
from understudy.up.ports import check_ports, free_pod_ports
from understudy.up.sessions import PreparedPod, Say

POOL = "pool"
EXAMPLE = "engine-0"  # the engine of the packaged pod that all engines are made after
DEVICES = "TENSOR_PARALLEL"  # what the packaged manifest calls their number
HOST_PREFIX = "HOST-"


async def prepare_pool(
    pod: LocalPod,
    path: Path,
    port: int,
    directory: Path,
    say: Say,
    is_drilled: bool,
    *,
    given: Collection[str] = (),
    port_offset: int = 0,
) -> PreparedPod:
    """Prepare the pod of the pool file at `path`; `pod` has what the flags say, `port` is the
    pool's own. `given`: `host`, `service_port` if they were said, and win over `listen`,
    whose port `port_offset` moves.

    Raises:
        UsageError: a fault in the file, or a device that `up` cannot give to an engine.
    """
    file = read_pool_file(str(path))
    engines = sum(len(engines_of(name, each)) for name, each in file.models.items())
    if is_drilled:
        pod = replace(pod, ports=free_pod_ports(engines, has_pool=True))
    else:
        _check_directories(file)
        first, *_ = pod.ports.engines
        numbers = tuple(range(first, first + engines))
        host, service = file.address
        service = pod.ports.service if "service_port" in given else service + port_offset
        ports = replace(pod.ports, service=service, engines=numbers, pool=port)
        pod = replace(pod, ports=ports, host=pod.host if "host" in given else host)
        await refuse_second_pod(directory)
        check_ports(pod.ports, pod.host, pod.http_host)
        begin_new_pod(str(directory))
    await _fill_cache(file, say)
    memory = _memory(file, pod.memory)
    made = PoolPod(replace(pod, directory=directory, memory=memory), path, file)
    containers = made.containers()
    forget_engines(directory, containers)
    return PreparedPod(containers, directory, f"the pool of {path}")


class PoolPod:
    """A local pod, with the models of a pool file instead of its own."""

    def __init__(self, pod: LocalPod, path: Path, file: PoolFile) -> None:
        self._pod, self._path, self._file = pod, path.absolute(), file

    def containers(self) -> list[Container]:
        """The pod, in the order in which it starts."""
        manifest = packaged_manifest()
        by_name = {each.name: each for each in manifest.specs}
        servers = [self._server(each) for name, each in by_name.items() if not _is_engine(name)]
        pool = self._pool(by_name[GATEWAY])
        engines = [
            self._engine(by_name[EXAMPLE], engine)
            for model, settings in self._file.models.items()
            for engine in engines_of(model, settings)
        ]
        made = structs.replace(manifest, specs=(*servers, pool, *engines))
        # A flag that is set goes to every container, and each engine has a backend of its own.
        choices = self._pod.choices()
        flags = {name: value for name, value in choices.flag.items() if name != "backend"}
        config = {**choices.config, DEVICES: str(self._devices)}
        choices = replace(choices, flag=flags, config=config)
        ports = self._pod.ports.by_name(engine.name for engine in engines)
        return self._pod.placed(made, choices, lambda name: (), ports)

    @property
    def _devices(self) -> int:
        """How many devices of the host the memory service serves."""
        numbers = [each.removeprefix(HOST_PREFIX) for each in self._file.devices]
        return max((int(each) for each in numbers if each.isdecimal()), default=0) + 1

    def _server(self, spec: ContainerSpec) -> ContainerSpec:
        models = tuple(f"--model={name}" for name in self._file.models)
        match spec.name:
            case "lockserver":
                more = models
            case "gms":
                host_bytes = int(self._file.host_memory)
                copies = (f"--host-memory={host_bytes}",) if host_bytes else ()
                more = (*models, *copies)
            case "gateway":
                more = (f"--pool={self._path}",)
            case _:
                more = ()
        return structs.replace(spec, command=(*spec.command, *more))

    def _pool(self, gateway: ContainerSpec) -> ContainerSpec:
        return _renamed(gateway, POOL, (INIT, POOL, "serve", f"--file={self._path}"))

    def _engine(self, example: ContainerSpec, engine: str) -> ContainerSpec:
        command = (INIT, "engine", "run", f"--pool={self._path}")
        kept = [each for each in example.env if each.name != "ENGINE_ID"]
        env = (*kept, Variable("ENGINE_ID", engine))
        return structs.replace(_renamed(example, engine, command), env=env)


def _memory(file: PoolFile, wanted: str) -> str:
    """The kind that the file's names are of; of numbers alone, `wanted`."""
    names = [each for each in file.devices if not each.isdecimal()]
    kinds = {"host" if _is_host(each) else "cuda" for each in names}
    if len(kinds) > 1:
        raise UsageError(
            "pool.mixed_devices",
            f"{', '.join(file.devices)}: a pod uses either GPUs or host memory; name one kind",
        )
    return kinds.pop() if kinds else wanted


def _check_directories(file: PoolFile) -> None:
    """A request would find out only once others have made room for its model."""
    for name, each in file.models.items():
        if each.model.startswith("/") and not Path(each.model).is_dir():
            raise UsageError(
                "pool.no_model_directory",
                f"{name}: there is no directory {each.model}; correct `model` in the pool file",
            )


async def _fill_cache(file: PoolFile, say: Say) -> None:
    """Download the Hub's models that the cache lacks, so that no request waits for a download. The
    engines find them there by their ids."""
    for name, each in file.models.items():
        if each.backend == HUB_BACKEND and is_hub_id(each.model) and not Path(each.model).is_dir():
            arguments = [str(argument) for argument in each.args]
            say(f"{name}: {each.model} is in {await hub_directory(each.model, arguments)}")


def _renamed(spec: ContainerSpec, name: str, command: tuple[str, ...]) -> ContainerSpec:
    """Another container like it, with a port of its own name."""

    def here(check: ProbeSpec | None) -> ProbeSpec | None:
        return check and structs.replace(check, port=name)

    (number,) = spec.ports.values()
    return structs.replace(
        spec,
        name=name,
        command=command,
        ports={name: number},
        startup=here(spec.startup),
        liveness=here(spec.liveness),
        readiness=None,
    )


def _is_host(device: str) -> bool:
    return device.startswith(HOST_PREFIX)


def _is_engine(name: str) -> bool:
    return name.startswith("engine-")
