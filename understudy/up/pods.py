"""Prepares a pod on this machine, of one model or of a pool file, and keeps it running.

Prints only through `say`. `understudy up` holds `up.lock` for as long as it runs, so a second one
knows whose pod it meets, even before the first part of that pod is up. The welcome waits without a
deadline: a pod may serve long before its status says that it is whole, and `understudy up` must not
stop it for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from plumbing.errors import UnderstudyError, UsageError
from plumbing.pod.paths import engine_states, pool_state, up_guard
from plumbing.service.clock import SystemClock
from plumbing.text import counted, join_address
from plumbing.wire.server import PathGuard, guard_holder
from pool.pool_file import PoolFile, read_pool_file
from understudy.drill.clients import Target, inside_target
from understudy.drill.killer import Say, service_of, wait_for, whole_of
from understudy.drill.prompts import model_name
from understudy.pod.ports import (
    FLEET_APART,
    GATEWAY_PORT,
    HOP_PORT,
    SERVICE_FLAGS,
    UI_PORT,
    check_port,
    check_ports,
)
from understudy.pod.runner import PodRunner, run_pod
from understudy.pod.table import (
    BEHIND_FRONT,
    HOST_PREFIX,
    PODS_FILE,
    POOL,
    UI,
    Container,
    LocalPod,
    PoolModels,
    program,
)
from understudy.status.gather import gather, part_of, pids_of, pod_parts, status_of
from understudy.status.view import awaited, is_open, is_reachable
from understudy.up.models import (
    DEVICE_BYTES,
    ONE_THREAD,
    checkpoint_of,
    hub_directory,
    make_random_pool,
    with_hub_model,
    with_random_model,
)

GIVEN = frozenset(("host", "service_port"))  # what may win over a pool file's `listen`


@dataclass(frozen=True, slots=True)
class PreparedPod:
    """A pod, or a fleet of them, that can be started. `file`: that of its pool, if it has one."""

    containers: Sequence[Container]
    title: str = "a pod"
    file: PoolFile | None = None
    replicas: int = 0  # of a fleet


Prepare = Callable[[Path, Say], Awaitable[PreparedPod]]  # a pod in a directory

NO_MODEL = "no --model: serving a small random one, whose answers are gibberish"


async def prepare_local(pod: LocalPod, directory: Path, say: Say) -> PreparedPod:
    """Prepare the standard pod, with a random model unless it has one. A model of the Hub is
    downloaded once everything else is known to be right."""
    check_ports(pod.ports, pod.host, pod.http_host)
    pod = replace(pod, directory=directory)
    if pod.hub_id is not None:
        pod = await with_hub_model(pod, pod.hub_id, say)
    elif pod.model is None:
        say(NO_MODEL)
        pod = await with_random_model(pod, directory / "random-model")
    return PreparedPod(pod.containers())


async def prepare_pool(
    pod: LocalPod,
    path: Path,
    directory: Path,
    say: Say,
    *,
    given: Collection[str] = GIVEN,
    port_offset: int = 0,
) -> PreparedPod:
    """Prepare the pod of the pool file at `path`; `pod` has what the flags say. `given`: `host`,
    `service_port` if they were said, and win over `listen`, whose port `port_offset` moves.

    Raises:
        UsageError: a fault in the file, or a device that `up` cannot give to an engine.
    """
    file = read_pool_file(str(path))
    models = PoolModels(path, file)
    first, *_ = pod.ports.engines
    host, service = file.address
    ports = replace(
        pod.ports,
        service=pod.ports.service if "service_port" in given else service + port_offset,
        engines=tuple(range(first, first + len(models.engines))),
    )
    pod = replace(pod, ports=ports, host=pod.host if "host" in given else host)
    check_ports(pod.ports, pod.host, pod.http_host)
    await _fill_cache(file, say)
    pod = replace(pod, directory=directory, memory=_memory(file, pod.memory), pool=models)
    return PreparedPod(pod.containers(), f"the pool of {path}", file)


async def prepare_random_pool(pod: LocalPod, directory: Path, say: Say) -> PreparedPod:
    """Prepare a pool of three random models; the user's own settings win."""
    env = {name: os.environ.get(name, value) for name, value in ONE_THREAD.items()}
    pod = replace(pod, env={**env, **pod.env}, device_bytes=pod.device_bytes or DEVICE_BYTES)
    return await prepare_pool(pod, await make_random_pool(directory), directory, say)


async def prepare_fleet(
    front: LocalPod,
    replicas: int,
    flags: Sequence[str],
    port_offset: int,
    directory: Path,
    say: Say,
    *,
    is_pool: bool = False,
) -> PreparedPod:
    """Prepare pods with these flags of `understudy up`, and a front with the ports of `front`. They
    have one random model: two would have two names, and no stream could move."""
    check_port(front.ports.service, front.host, SERVICE_FLAGS)
    check_port(front.ports.gateway, front.http_host)
    if front.hub_id is not None:  # once, not in each pod
        say(f"{front.hub_id} is in {await hub_directory(front.hub_id, front.backend_args)}")
    elif front.model is None and not is_pool:
        say(NO_MODEL)
        front = await with_random_model(front, directory / "random-model")
        flags = (f"--model={front.model}", *flags)
    front = replace(front, directory=directory)
    apart = (FLEET_APART * (number + 1) for number in range(replicas))
    names = "".join(f"127.0.0.1:{HOP_PORT + port_offset + each}\n" for each in apart)
    (directory / PODS_FILE).write_text(names, encoding="utf-8")
    containers = front.fleet(replicas, port_offset, flags)
    return PreparedPod(containers, f"{replicas} pods and a front", replicas=replicas)


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


async def _fill_cache(file: PoolFile, say: Say) -> None:
    """Download the Hub's models that the cache lacks, so that no request waits for a download. The
    engines find them there by their ids."""
    for name, each in file.models.items():
        if checkpoint_of(each.model, each.backend)[1] is not None:
            arguments = [str(argument) for argument in each.args]
            say(f"{name}: {each.model} is in {await hub_directory(each.model, arguments)}")


async def stay_up(prepare: Prepare, directory: Path, say: Say) -> int | None:
    """Run a pod in `directory` until a signal; `say` gets its output and where to send requests.
    The second signal, if it killed the pod.

    Raises:
        UnderstudyError: `pod.already_running`, and what the start of the pod raises.
    """
    with contextlib.closing(await claim(directory)):
        await refuse_second_pod(directory)
        pod = await prepare(directory, say)
        forget_last_pod(directory)

        async def body() -> None:
            if pod.replicas:
                await say_fleet(directory, pod, say)
            elif BEHIND_FRONT not in os.environ:
                await say_welcome(directory, pod.containers, runner, say)
            await asyncio.Event().wait()

        farewell = None if pod.replicas else partial(say_farewell, directory, say)
        runner = PodRunner(pod.containers, directory / "log", say)
        await run_pod(runner, body, say, while_stopping=farewell)
        return runner.killed_by


# --- the directory: which pod runs there, and what another one has left

ASK_S = 1.0  # a part answers in milliseconds, and the user waits
# How long the parts of a killed `up` may take to exit: the kernel frees their memory first.
DYING_S = 5.0
POLL_S = 0.05


async def claim(directory: Path) -> PathGuard:
    """Make `directory` this process's, until the guard is closed or the process ends.

    Raises:
        UnderstudyError: `pod.already_running`, with the pod that runs there.
    """
    path = up_guard(str(directory))
    try:
        return PathGuard(path, "understudy up")
    except UnderstudyError as error:
        if error.code != "wire.address_in_use":
            raise
        pid = str(error.details.get("holder") or "an unknown process").removeprefix("pid ")
        since_s = Path(path).stat().st_mtime  # its holder has written its pid then
        began = datetime.fromtimestamp(since_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        who = f"`understudy up` with pid {pid} has run a pod since {began}"
        raise _already_running(directory, who, f"`kill {pid}`") from error


async def refuse_second_pod(directory: Path) -> None:
    """Raise if parts of a pod run in `directory`, whatever started them.

    Raises:
        UnderstudyError: `pod.already_running`.
    """
    end_s, own = time.monotonic() + DYING_S, up_guard(str(directory))
    while True:
        locks = (str(each) for each in sorted(directory.glob("*.lock")))
        held = [each for each in locks if each != own and guard_holder(each) is not None]
        if not held:
            return
        if is_reachable(await gather(directory, ASK_S)) or time.monotonic() > end_s:
            pids = (await pids_of(pod_parts(directory))).items()
            named = [f"pid {pid} is {name}" for name, pid in pids]
            named = named or [f"{each} is locked" for each in held]
            who = f"parts of a pod run: {', '.join(named)}"
            raise _already_running(directory, who, "what started them")
        await asyncio.sleep(POLL_S)


def _already_running(directory: Path, who: str, stop: str) -> UnderstudyError:
    return UnderstudyError(
        "pod.already_running",
        f"in {directory} {who}; look at it with `understudy status --dir {directory}`, stop it with"
        f" {stop}, or start another one with --dir OTHER --port-offset 100",
    )


def forget_last_pod(directory: Path) -> None:
    """Remove what the parts of the last pod in `directory` left of themselves: sockets, and what
    engines and pool wrote last. Call it while no part runs; each start of a part makes its own
    anew, and the lock server keeps its tokens."""
    pool = Path(pool_state(str(directory)))
    for path in (*directory.glob("*.sock"), *engine_states(directory), pool):
        path.unlink(missing_ok=True)


# --- how to use it, and what a pod that stops waits for

SAID_EVERY_S = 10.0
ALONE_AFTER_S = 10.0  # a pod that serves is announced without a standby then
FAREWELL_POLL_S = 0.1  # until the engines know that they are to exit, and count what is left

clock = SystemClock()


async def say_welcome(
    directory: Path, containers: Sequence[Container], runner: PodRunner, say: Say
) -> None:
    """Once the pod in `directory` serves, say where to send requests and how to look at it.

    Raises:
        UnderstudyError: `pod.start_failed`, a part gave up before that.
    """
    began_ms, has_pool = clock.now_ms(), any(each.name == POOL for each in containers)

    async def look() -> list[str] | str:
        runner.check()
        view = await gather(directory)
        address = service_of(view["lockserver"])
        target = inside_target(address) if address else None  # while the lock server does not say
        missing = "; ".join(view["problems"]) or "no standby is queued"
        if has_pool:  # no engine needs to be active: a request raises its model
            pool = view["pool"] or {}
            models = [str(each["model"]) for each in pool.get("models", ())]
            if not (target and models and pool.get("gateways") and is_open(view["gateway"])):
                return missing
            who = f"Models: {', '.join(models)}. A request wakes its model."
            return _lines(who, target, models[-1], directory, "pool status", "pool explain")
        whole = whole_of(view)
        is_time = whole is not None or clock.now_ms() - began_ms > ALONE_AFTER_S * 1000
        if not (target and view["active"] and is_open(view["gateway"]) and is_time):
            return missing
        standby = (
            f"{', '.join(whole.standbys)} is in standby" if whole else f"NO standby ({missing})"
        )
        if not is_open(view["gateway"], is_resting=view["resting"]):  # it answers nothing now
            who = f"{view['active']} is asleep until `understudy wake`, {standby}."
            return _lines(who, target, "", directory, "wake", "status")
        who = f"{view['active']} is active, {standby}."
        try:
            model = await model_name(target)
        except UnderstudyError as error:  # it has ended since
            return error.message
        return _lines(who, target, model, directory, "status", "drill --attach")

    lines = await wait_for(look, math.inf, "pod.not_serving", "the pod serves", say, POLL_S)
    for line in ("", *lines, *_page(containers), ""):
        say(line)


def _lines(who: str, target: Target, model: str, directory: Path, *commands: str) -> list[str]:
    """`model`: empty while no engine tells its name, which a request need not have."""
    url = f"http://{target.address}"
    named = {"model": model} if model else {}
    body = json.dumps({**named, "prompt": "Hello", "max_tokens": 16})
    command = " ".join(program("understudy"))
    return [
        f"{who} Send requests to {url}; Ctrl-C stops it. Try:",
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'",
        *(f"  {command} {each} --dir {directory}" for each in commands),
    ]


async def say_fleet(directory: Path, pod: PreparedPod, say: Say) -> None:
    """Say where to send requests: the front has heard a pod, and each pod has served. Its address
    is the last one, after those of the pods' pages."""
    target = inside_target(service_of(await status_of(part_of(directory, "gateway"))))
    who = f"{pod.title} are up; each pod has its directory in {directory}."
    probes = ((each.name, each.startup) for each in pod.containers if each.is_engine)
    gateways = [(name, urlsplit(probe.url)) for name, probe in probes if probe is not None]
    pages = [
        f"  {name}: http://{join_address(str(each.hostname), port - GATEWAY_PORT + UI_PORT)}/"
        for name, each in gateways
        if (port := each.port)
    ]
    lines = _lines(who, target, await model_name(target), directory, "status")
    for line in ("", *pages, *lines, ""):
        say(line)


def _page(containers: Sequence[Container]) -> list[str]:
    """The address of the page, where there is one."""
    probes = [each.startup for each in containers if each.name == UI]
    return [f"  http://{urlsplit(each.url).netloc}/" for each in probes if each is not None]


async def say_farewell(directory: Path, say: Say) -> None:
    """Say how many requests the pod in `directory` waits for while it stops, every ten seconds."""
    began_ms = clock.now_ms()
    while True:
        view = await gather(directory)
        requests, most_ms = awaited(view)
        if not (view["stopping"] and requests):
            await asyncio.sleep(FAREWELL_POLL_S)
            continue
        left_s = max(0.0, most_ms - clock.now_ms() + began_ms) / 1000
        say(f"waiting up to {left_s:.0f} s for {counted(requests, 'request')}")
        await asyncio.sleep(SAID_EVERY_S)
