"""Finds the processes of a pool's pod, kills them, and says when they work again.

Parts are found in /proc under the containers that the drill itself started, and held by pidfd
before the moment of the kill. An engine's process dies through its supervisor, as in every drill,
so that its death does not count towards a crash loop.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import messages as engine_messages
from gms.client import messages as gms_messages
from plumbing.errors import RemoteError
from plumbing.part.models import ACTIVE, lock_of, model_at
from plumbing.part.paths import KV, WEIGHTS, engine_socket, gms_socket
from plumbing.service.clock import SystemClock
from plumbing.service.procfs import children, descendants, inner_pid
from understudy.drill.killer import backend_processes, strike
from understudy.drill.observer import Observer, OldTree
from understudy.drill.part_killer import hold, until_gone
from understudy.drill.pool.records import (
    GMS_COPY,
    GMS_KEEPER,
    GMS_KV,
    OF_MODEL,
    POOL,
    SHADOW,
    PoolKill,
    process_of,
)
from understudy.drill.pool.watch import pool_status
from understudy.drill.records import (
    GATEWAY,
    GATEWAY_CHILD,
    GATEWAYS,
    GMS,
    GMS_SUPERVISOR,
    LOCKSERVER,
    SUPERVISOR,
    EngineKill,
)
from understudy.pod.runner import PodRunner
from understudy.status.gather import PodPart, gateway_part, lockserver_part, status_of

MEMORY = "gms"  # the container of the memory service
CONTAINERS = {
    POOL: POOL,
    LOCKSERVER: LOCKSERVER,
    GATEWAY: GATEWAY,
    GATEWAY_CHILD: GATEWAY,
    GMS_SUPERVISOR: MEMORY,
}
VERBS = {GMS: "serve-device", GMS_KV: "serve-kv", GMS_COPY: "serve-device", GMS_KEEPER: "keep-copy"}
COPIES = "OFFLOAD-"  # the devices of the host copies, as the memory service names them
WORKING = ("standby", "resting", "active")  # of an engine that has come back from its death
NOTHING_TO_KILL = "engine.unknown_target"
OFF: Mapping[str, Any] = {"error": "it does not run"}

clock = SystemClock()


@dataclass(frozen=True, slots=True)
class FoundPart:
    """A process that can be killed, and the pidfds of all that must end with it."""

    pid: int
    pidfds: tuple[int, ...]  # its own first
    child: int | None = None  # of a gateway: the one that has the clients' connections


class Victims:
    """The pod in `directory`, whose containers `runner` has started."""

    def __init__(self, directory: Path, runner: PodRunner) -> None:
        self._directory, self._runner = directory, runner

    # ------------------------------------------------------------------ parts

    async def find(self, target: str, model: str) -> tuple[int, int | None] | None:
        """The process of a part, and the gateway's child; `model`: whose, if each has one."""
        if target in OF_MODEL:
            found = self._server(target, model)
            return None if found is None else (found[0], None)
        first = self._runner.pids().get(CONTAINERS[target])
        if first is None or target not in GATEWAYS:
            return None if first is None else (first, None)
        child = _child_of(await status_of(gateway_part(self._directory)))
        if target == GATEWAY:
            return first, child
        pid = next((pid for pid in children(first) if inner_pid(pid) == child), None)
        return None if pid is None else (pid, child)

    def _server(self, target: str, model: str) -> tuple[int, str] | None:
        """A child of the memory service, and its place; of several devices the first one."""
        for pid in descendants(self._runner.pids().get(MEMORY) or 0):
            words = _words(pid)
            if VERBS[target] in words and "--device" in words:
                place = words[words.index("--device") + 1]
                is_copy = place.startswith(COPIES)
                is_kind = target == GMS_KEEPER or is_copy is (target == GMS_COPY)
                if model_at(place) == model and is_kind:
                    return pid, place
        return None

    @contextmanager
    def held(self, found: tuple[int, int | None], target: str) -> Iterator[FoundPart]:
        """
        Raises:
            UnderstudyError: `drill.not_here`.
        """
        pid, child = found
        with ExitStack() as stack:
            every = (pid, *descendants(pid))
            yield FoundPart(
                pid, tuple(stack.enter_context(hold(each, target)) for each in every), child
            )

    async def kill_part(self, target: str, found: FoundPart) -> tuple[float, float]:
        """When it was killed, and when all its processes were gone."""
        killed_ms = clock.now_ms()
        signal.pidfd_send_signal(found.pidfds[0], signal.SIGKILL)
        await until_gone(target, list(found.pidfds))
        return killed_ms, clock.now_ms()

    async def is_part_back(self, kill: PoolKill, pid: int | None, child: int | None) -> bool:
        """Whether another process than `pid` does the same work again."""
        if kill.target in GATEWAYS:
            gateway = await status_of(gateway_part(self._directory))
            is_same = kill.target == GATEWAY_CHILD and _child_of(gateway) == child
            return bool(gateway.get("accepting")) and not is_same
        found = await self.find(kill.target, kill.model)
        if found is None or found[0] == pid:
            return False
        match kill.target:
            case "pool":
                document = await pool_status(self._directory)
                return bool(document.get("gateways")) and not document.get("recovering")
            case "lockserver":
                return "error" not in await status_of(lockserver_part(self._directory))
            case "gms-keeper":
                return True  # it answers nobody
            case "gms-supervisor":
                models = await self._models()
                answers = [await self._memory(GMS, model) for model in models]
                return all("error" not in each for each in answers)
            case _:
                return "error" not in await self._memory(kill.target, kill.model)

    async def _models(self) -> list[str]:
        document = await pool_status(self._directory)
        return [each["model"] for each in document.get("models") or ()]

    async def _memory(self, target: str, model: str) -> Mapping[str, Any]:
        """The status of a model's memory server."""
        found = self._server(target, model)
        if found is None:
            return OFF
        tag = KV if target == GMS_KV else WEIGHTS
        path = gms_socket(str(self._directory), found[1], tag)
        return await status_of(PodPart(found[1], path, gms_messages.CATALOGUE))

    # ------------------------------------------------------------------ engines

    def supervisor(self, engine: str) -> int | None:
        return self._runner.pids().get(engine)

    async def kill_engine(
        self, kill: PoolKill, peers: tuple[str, ...], token: int, observer: Observer
    ) -> EngineKill | None:
        """Kill or stop a process of the engine; None: it has no such process."""
        assert kill.engine is not None
        supervisor = self.supervisor(kill.engine)
        if supervisor is None:
            return None
        target = kill.target.removeprefix(SHADOW)
        found = EngineKill(target, kill.engine, token, killed_ms=clock.now_ms())
        found.lock, found.peers = lock_of(ACTIVE, kill.model), peers
        found.incarnation = observer.incarnation_of(kill.engine)
        tree = backend_processes(supervisor)
        is_own = process_of(target) == SUPERVISOR
        observer.expect(found, OldTree.of([supervisor, *tree] if is_own else tree))
        path = engine_socket(str(self._directory), kill.engine)
        try:
            await strike(path, target, supervisor, found)
        except RemoteError as error:
            if error.code == NOTHING_TO_KILL:
                return None
            raise
        return found

    async def is_engine_back(self, kill: PoolKill, supervisor: int | None) -> bool:
        """Whether another incarnation stands by, rests or serves; or it is to be cold."""
        assert kill.engine is not None
        assert kill.failover is not None
        now = self.supervisor(kill.engine)
        is_own = process_of(kill.target) == SUPERVISOR
        if now is None or (is_own and now == supervisor):
            return False
        said = await self._said(kill)
        if said.get("connected") and said.get("goal") == "cold":
            return True
        return bool(said.get("connected")) and await self.is_up(kill)

    async def is_up(self, kill: PoolKill) -> bool:
        """Whether the next incarnation of the engine works."""
        assert kill.engine is not None
        assert kill.failover is not None
        path = engine_socket(str(self._directory), kill.engine)
        document = await status_of(PodPart(kill.engine, path, engine_messages.CONTROL))
        about = document.get("engine") or {}
        is_new = about.get("incarnation") != kill.failover.incarnation
        return is_new and about.get("state") in WORKING

    async def _said(self, kill: PoolKill) -> Mapping[str, Any]:
        """What the pool knows of the engine."""
        document = await pool_status(self._directory)
        for each in document.get("models") or ():
            if each["model"] == kill.model:
                return next((one for one in each["engines"] if one["engine"] == kill.engine), {})
        return {}


def holder_of(document: Mapping[str, Any], model: str) -> tuple[str | None, int]:
    """The engine that stands for a model and its token, as the pool says."""
    for each in document.get("models") or ():
        if each["model"] == model and each.get("holder"):
            return each["holder"]["engine"], int(each["holder"]["token"])
    return None, 0


def _child_of(gateway: Mapping[str, Any]) -> int | None:
    return (gateway.get("child") or {}).get("pid")


def _words(pid: int) -> list[str]:
    """The command line of `pid`; nothing if it is gone."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return []
    return text.split("\0")
