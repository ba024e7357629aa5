"""The pod of a pool file that is measured: `understudy up --pool`, with random models.

A backend is a row here. Each model has its own weights, so that an answer of the wrong one shows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hack.bench_pool.programs import Program
from hack.bench_pool.watching import PoolWatch
from hack.rig import PATIENT
from plumbing.errors import UnderstudyError
from plumbing.part.paths import pool_socket
from plumbing.part.peers import ask
from plumbing.service.signals import SignalInbox
from pool import messages as msg
from pool.core.events import Order
from understudy.drill.clients import Target, clock
from understudy.kubelet.containers import Pace
from understudy.kubelet.runner import PodRunner, run_pod
from understudy.status.gather import engine_parts, status_of
from understudy.up.local_pod import LocalPod
from understudy.up.pool_pod import prepare_pool
from understudy.up.random_model import ONE_THREAD, VLLM_RANDOM_MODEL, make_random_model

T = TypeVar("T")
MIB = 1 << 20
DEVICE = "HOST-0"
DEVICE_BYTES = "64GiB"  # a limit on what is booked, not on what the machine has
HOST_MEMORY = "2GiB"  # for copies of the weights; a limit, not a size
# Every death is the bench's, and a restart shall not wait for a back-off.
AT_ONCE = Pace(base_ms=10.0, max_ms=10.0, reset_ms=1000.0)
DEATHS_MAX = "1000"


class Interrupted(Exception):
    """A signal ended a pod."""


@dataclass(frozen=True, slots=True)
class PooledBackend:
    """How one model of it is served."""

    arguments: tuple[str, ...]
    shape: tuple[str, ...]
    env: Mapping[str, str]


# So much KV memory that what else an engine takes, which differs by some MiB from start to start,
# is small beside it.
BACKENDS: Mapping[str, PooledBackend] = {
    "reference": PooledBackend(("--cache-tokens", "600000"), (), ONE_THREAD),
    "vllm": PooledBackend(
        (*VLLM_RANDOM_MODEL.arguments, f"--kv-cache-memory-bytes={256 * MIB}"),
        VLLM_RANDOM_MODEL.shape,
        VLLM_RANDOM_MODEL.env,
    ),
}


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pod: `models`, of which `awake` fit at the same time. `defaults` of the pool file, and
    what its backend is told on top."""

    backend: str
    models: int
    awake: int = 1
    defaults: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    has_shadows: bool = False

    def names(self) -> tuple[str, ...]:
        return tuple(f"m{number}" for number in range(self.models))

    def document(self, directories: Mapping[str, Path]) -> dict[str, Any]:
        """The pool file."""
        backend = BACKENDS[self.backend]
        shadow = {"shadow": "follows"} if self.has_shadows else {}
        return {
            "devices": [DEVICE],
            "host_memory": HOST_MEMORY,
            "margin": 0,
            "queue": {"max": 512, "per_model": 256, "wait": "600s"},
            "defaults": {"backend": self.backend, **self.defaults, **shadow},
            "models": {
                name: {
                    "model": str(directory),
                    "args": [*backend.arguments, *self.arguments],
                }
                for name, directory in directories.items()
            },
        }


class BenchedPool(Program):
    """The running pod."""

    def __init__(self, directory: Path, runner: PodRunner, target: Target, plan: PoolPlan) -> None:
        super().__init__("understudy", target, plan.names())
        self.directory, self.runner, self.plan = directory, runner, plan
        self.watch = PoolWatch(directory)

    async def status(self) -> dict[str, Any]:
        """Raises UnderstudyError: no pool answers."""
        path = pool_socket(str(self.directory))
        answer: Any = (await ask(path, msg.CATALOGUE, msg.StatusMsg())).message
        document: dict[str, Any] = answer.document
        return document

    async def of(self, model: str) -> dict[str, Any]:
        """What the pool says of one model."""
        found = (await self.status())["models"]
        return next(dict(each) for each in found if each["model"] == model)

    async def bound_s(self, model: str, kind: str = "bound_ms") -> float | None:
        """How long a request can wait; `measured_bound_ms`: if every step takes what it took."""
        bound_ms = (await self.of(model))[kind]
        return None if bound_ms is None else bound_ms / 1000

    async def change(self, setting: str, value: str | None, model: str | None = None) -> None:
        """As `understudy pool set`."""
        path = pool_socket(str(self.directory))
        await ask(path, msg.CATALOGUE, msg.SetMsg(setting, value, model))

    async def order(self, model: str, order: str) -> None:
        """As `understudy pool load`, `sleep` and `unload`."""
        path = pool_socket(str(self.directory))
        await ask(path, msg.CATALOGUE, msg.OrderMsg(model, Order(order)))

    async def tighten(self) -> None:
        """From now on the KV memory of `plan.awake` models fits, and half of another one's."""
        for model in self.models[self.plan.awake :]:
            began_ms = clock.now_ms()
            if (await self.of(model))["state"] != "warm":
                await self.order(model, "sleep")
                await self.watch.until_state(model, "warm", began_ms)
        await self.ask(self.short[self.models[0]])
        status = await self.status()
        (device,) = (each for each in status["devices"] if each["device"] == DEVICE)
        awake = [each for each in status["models"] if each["state"] == "awake"]
        kv_bytes = awake[0]["bytes"][DEVICE]["kv"]
        spare = self.plan.awake - len(awake)
        free_bytes = device["free_bytes"] - spare * kv_bytes
        await self.change("margin", str(free_bytes - kv_bytes // 2))

    async def incarnations(self) -> dict[str, str]:
        """Of all engines that answer."""
        found = [await status_of(part) for part in engine_parts(self.directory)]
        return {
            each["engine"]["id"]: each["engine"]["incarnation"]
            for each in found
            if "engine" in each
        }


async def with_pool(
    base: Path,
    plan: PoolPlan,
    inbox: SignalInbox,
    say: Callable[[str], None],
    body: Callable[[BenchedPool], Awaitable[T]],
) -> T:
    """`body` while the pod of `plan` runs in `base`, every model of which has answered.

    Raises:
        Interrupted: by a signal.
    """
    base.mkdir(mode=0o700, parents=True)
    backend = BACKENDS[plan.backend]
    directories = {name: base / name for name in plan.names()}
    await asyncio.gather(
        *(
            make_random_model(each, (*backend.shape, f"--seed={number}"))
            for number, each in enumerate(directories.values())
        )
    )
    file = base / "pool.yaml"
    file.write_text(json.dumps(plan.document(directories), indent=1))
    directory = base / "pod"
    directory.mkdir(mode=0o700)
    env = {**backend.env, **PATIENT, "UNDERSTUDY_DEATHS_MAX": DEATHS_MAX}
    local = LocalPod(Path(), None, device_bytes=DEVICE_BYTES, env=env, pace=AT_ONCE)
    pod = await prepare_pool(local, file, 0, directory, say, is_drilled=True)
    service = next(word for each in pod.containers for word in each.command if "active=" in word)
    target = Target("127.0.0.1", int(service.rpartition(":")[2]))
    runner = PodRunner(pod.containers, base / "log")
    done = list[T]()

    async def run() -> bool:
        pool = BenchedPool(directory, runner, target, plan)
        try:
            await pool.learn([*pool.short.values()])
            if plan.models > plan.awake:
                await pool.tighten()
            done.append(await body(pool))
        finally:
            await pool.watch.close()
        return True

    try:
        if not await run_pod(runner, run, inbox.get, say):
            raise Interrupted
    except UnderstudyError as error:
        raise UnderstudyError("bench.pod", f"{error.message}; see {base / 'log'}") from error
    return done[0]
