"""Prepares a pod on this machine, of one model or of a pool file, and keeps it running.

Prints only through `say`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from plumbing.errors import UsageError
from plumbing.service.signals import SignalInbox
from pool.pool_file import read_pool_file
from pool.server.state_file import begin_new_pod
from pool.settings import PoolFile
from understudy.pod.ports import check_ports, free_pod_ports
from understudy.pod.runner import PodRunner, run_pod
from understudy.pod.table import HOST_PREFIX, Container, LocalPod, PoolModels
from understudy.up.directory import (
    claim,
    forget_engines,
    put_leftovers_aside,
    refuse_second_pod,
)
from understudy.up.models import (
    HUB_BACKEND,
    hub_directory,
    is_hub_id,
    with_hub_model,
    with_random_model,
)
from understudy.up.welcome import say_farewell, say_welcome

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PreparedPod:
    """A pod that can be started."""

    containers: Sequence[Container]
    title: str = "a pod"


# Prepares a pod in a directory. True: for a drill, beside other pods.
Prepare = Callable[[Path, Say, bool], Awaitable[PreparedPod]]


async def prepare_local(pod: LocalPod, directory: Path, say: Say, is_drilled: bool) -> PreparedPod:
    """Prepare the standard pod, with a random model unless it has one. A model of the Hub is
    downloaded once everything else is known to be right."""
    if is_drilled:
        pod = replace(pod, ports=free_pod_ports())
    else:
        await refuse_second_pod(directory)
        check_ports(pod.ports, pod.host, pod.http_host)
        _check_checkpoint(pod)
    pod = replace(pod, directory=directory)
    if pod.hub_id is not None:
        pod = await with_hub_model(pod, pod.hub_id, say)
    elif pod.model is None:
        if not is_drilled:
            say("no --model: serving a small random one, whose answers are gibberish")
        pod = await with_random_model(pod, directory / "random-model")
    containers = pod.containers()
    forget_engines(directory, containers)  # the lock server keeps its tokens
    return PreparedPod(containers)


def _check_checkpoint(pod: LocalPod) -> None:
    """An engine would find out only once everything before it has started."""
    if pod.backend == "reference" and pod.model and not (pod.model / "config.json").exists():
        raise UsageError(
            "pod.no_model",
            f"{pod.model} has no config.json; --model must be a Hugging Face checkpoint",
        )


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
    models = PoolModels(path, file)
    engines = len(models.engines)
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
    pod = replace(pod, directory=directory, memory=_memory(file, pod.memory), pool=models)
    containers = pod.containers()
    forget_engines(directory, containers)
    return PreparedPod(containers, f"the pool of {path}")


def _memory(file: PoolFile, wanted: str) -> str:
    """The kind that the file's names are of; of numbers alone, `wanted`."""
    names = [each for each in file.devices if not each.isdecimal()]
    kinds = {"host" if each.startswith(HOST_PREFIX) else "cuda" for each in names}
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


async def stay_up(prepare: Prepare, directory: Path, say: Say) -> int | None:
    """Run a pod in `directory` until a signal; `say` gets its output and where to send requests.
    The second signal, if it killed the pod.

    Raises:
        UnderstudyError: `pod.already_running`, and what the start of the pod raises.
    """
    with contextlib.closing(await claim(directory)):
        pod = await prepare(directory, say, False)
        for line in put_leftovers_aside(directory, pod.containers):
            say(line)

        async def body() -> None:
            await say_welcome(directory, pod.containers, say)
            await asyncio.Event().wait()

        async def while_stopping() -> None:
            await say_farewell(directory, say)

        runner = PodRunner(pod.containers, directory / "log", say)
        inbox = SignalInbox()
        try:
            await run_pod(runner, body, inbox.get, say, while_stopping=while_stopping)
        finally:
            inbox.close()
        return runner.killed_by
