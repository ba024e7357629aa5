"""Two pods of two vLLM engines each, whose KV cache is full: the fence of a killed one, and the
next one's wake.

One pod has its KV memory in the memory service, in the other each engine has its own; all else is
the same. Both stay up, and are killed in turns. While a killed engine comes back, the next one is
made to use all of its KV memory, by prompts that nobody has asked before: what was never touched
costs nothing to unmap. The model has large heads and little else, for that takes most of the time.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine import messages as engine_messages
from engine.messages import CONTROL
from hack.bench_kv.plan import BLOCK_TOKENS, Plan, Prompts, Shape
from hack.report import spread
from plumbing.errors import UnderstudyError
from plumbing.part.paths import engine_sockets
from plumbing.part.peers import ask
from plumbing.service import procfs
from plumbing.service.signals import SignalInbox
from understudy.drill.clients import Target, send
from understudy.drill.killer import Whole, backend_processes, wait_whole
from understudy.drill.records import End, asked_of_engine
from understudy.kubelet.runner import PodRunner, run_pod
from understudy.status.gather import engine_parts, gather, status_of
from understudy.up.random_model import make_random_model

OWN, GMS = "private", "gms"
MODES = (GMS, OWN)
KILLED = "worker"  # it has the KV memory
WHOLE_S, TAKEOVER_S, POLL_S = 900.0, 120.0, 0.2
# What the standby has just done to be one (it moves its memory, the page cache settles) is over.
SETTLE_S = 1.0
SHAPE = Shape(64, 4, 8, kv_heads=8, head_dim=256)  # 64 KiB of KV memory for a token
PROMPT_TOKENS = 8 * BLOCK_TOKENS  # whole blocks; the attention of a longer one costs more
ASKED_AT_ONCE = 8
WEIGHTS_MIB = 1024  # more than there are, and other models' share of the device: none
PHASES = ("fence_ms", "wake_ms")
MIB = 1 << 20

Say = Callable[[str], None]


@dataclass
class Figures:
    """Of the kills of one kind, in order. `resident_mib`: of the process with the KV memory, when
    it is killed."""

    fence_ms: list[float] = field(default_factory=list)
    wake_ms: list[float] = field(default_factory=list)
    resident_mib: list[int] = field(default_factory=list)
    adopted_blocks: list[int] = field(default_factory=list)


async def measure(mib: int, kills: int, base: Path, say: Say) -> dict[str, Any]:
    """By mode: from the SIGKILL until all of the engine is gone, and from the grant until the next
    engine has woken and passed its canary. What there is after an interrupt or an error is marked
    as such."""
    inbox = SignalInbox()
    found = {mode: Figures() for mode in MODES}
    problem = "interrupted"
    try:
        model = await make_random_model(base / "model", SHAPE.flags)
        plan = Plan(backend="vllm", shape=SHAPE)
        killed, runners = [], []
        for mode in MODES:
            flags = (*plan.flags(mode, SHAPE), f"--kv-cache-memory-bytes={mib * MIB}")
            pod = replace(
                plan.pod(base / mode, model, flags), device_bytes=f"{mib + WEIGHTS_MIB}MiB"
            )
            killed.append(_Pod(mode, pod.directory, mib, found[mode], say))
            runners.append(PodRunner(pod.containers(), pod.directory / "log"))
        body: Callable[[], Awaitable[bool | None]] = partial(_in_turns, killed, kills, say)
        for runner in runners:
            body = partial(run_pod, runner, body, inbox.get, say)
        say("starting two pods of two engines")
        if await body():
            problem = ""
    except (UnderstudyError, TimeoutError) as error:
        problem = str(error) or "timed out"
    finally:
        inbox.close()
    return document(mib, kills, found, problem)


async def _in_turns(pods: list[_Pod], kills: int, say: Say) -> bool:
    for number in range(kills):
        for pod in pods if number % 2 else pods[::-1]:
            began_s = time.monotonic()
            line = await pod.once()
            say(f"kill {number + 1} of {kills}, {line}; {time.monotonic() - began_s:.0f} s")
    return True


def document(mib: int, kills: int, found: dict[str, Figures], problem: str = "") -> dict[str, Any]:
    """`problem`: why there are fewer kills than asked for."""
    pairs = list(zip(found[GMS].fence_ms, found[OWN].fence_ms, strict=False))
    gms, own = [statistics.median(times) for times in zip(*pairs, strict=True)] or [0.0, 0.0]
    return {
        "kv_mib": mib,
        "kills_asked": kills,
        "is_complete": not problem,
        "problem": problem,
        "modes": {mode: _shown(figures) for mode, figures in found.items()},
        "pairs": len(pairs),
        "pairs_shorter": sum(one < other for one, other in pairs),
        "is_shorter": gms < own,
    }


def _shown(figures: Figures) -> dict[str, Any]:
    shown: dict[str, Any] = {"kills": len(figures.fence_ms)}
    for phase in PHASES:
        each: list[float] = getattr(figures, phase)
        shown[phase] = {"min": min(each), **spread(each), "each": each} if each else None
    return {
        **shown,
        "resident_mib": figures.resident_mib,
        "adopted_blocks": figures.adopted_blocks,
    }


class _Pod:
    """One pod that is killed again and again."""

    def __init__(self, mode: str, directory: Path, mib: int, found: Figures, say: Say) -> None:
        self._mode, self._directory, self._mib = mode, directory, mib
        self._found, self._say = found, say
        self._prompts = Prompts(seed=mib)
        self._asked = mib * MIB // SHAPE.kv_bytes(PROMPT_TOKENS) + 1
        self._token = 0

    async def once(self) -> str:
        """Kill the active engine once its KV memory is full and it has a standby; what was
        found."""
        await self._fill()
        whole = await self._whole()
        await asyncio.sleep(SETTLE_S)
        path = engine_sockets(self._directory)[whole.engine]
        resident_mib = await self._resident_mib(path)
        reply = (await ask(path, CONTROL, asked_of_engine(KILLED))).message
        assert isinstance(reply, engine_messages.KillingMsg)
        self._token = whole.token
        grant, status = await self._takeover(whole)
        failover, found = status["last_failover"], self._found
        found.fence_ms.append(round(grant["fenced_mono_ms"] - reply.mono_ms, 2))
        found.wake_ms.append(round(failover["canary_mono_ms"] - failover["granted_mono_ms"], 2))
        found.resident_mib.append(resident_mib)
        found.adopted_blocks.append(status["backend"]["kv"]["adopted_blocks"])
        return (
            f"{self._mode}: {resident_mib} MiB resident, fence {found.fence_ms[-1]:.1f} ms,"
            f" wake {found.wake_ms[-1]:.1f} ms with {found.adopted_blocks[-1]} blocks"
        )

    async def _fill(self) -> None:
        """Of whichever engine is active, also while the other one still comes back."""
        target = await self._target()
        numbers = iter(range(self._asked))

        async def asking() -> None:
            for _ in numbers:
                exchange = await send(target, self._prompts.fresh(PROMPT_TOKENS, 1))
                if exchange.end is not End.DONE or exchange.status != 200:
                    detail = f"{exchange.status} {exchange.detail}"
                    raise UnderstudyError("bench.no_answer", f"{self._mode}: {detail}")

        await asyncio.gather(*(asking() for _ in range(ASKED_AT_ONCE)))

    async def _target(self) -> Target:
        async with asyncio.timeout(WHOLE_S):
            while True:
                view = await gather(self._directory)
                service = (view["lockserver"].get("service") or {}).get("active") or {}
                if view["active"] is not None and view["token"] > self._token:
                    host, _, port = str(service["address"]).rpartition(":")
                    return Target(host, int(port))
                await asyncio.sleep(POLL_S)

    async def _whole(self) -> Whole:
        """Under a newer token than at the last kill."""
        async with asyncio.timeout(WHOLE_S):
            while True:
                whole = await wait_whole(self._directory, self._say, WHOLE_S, poll_s=POLL_S)
                if whole.token > self._token:
                    return whole
                await asyncio.sleep(POLL_S)

    async def _resident_mib(self, path: str) -> int:
        """Of the engine's largest process.

        Raises:
            UnderstudyError: `bench.not_used`, that is less than its KV memory.
        """
        supervisor = (await ask(path, CONTROL, engine_messages.StatusMsg())).pid
        sizes = [procfs.rss_bytes(pid) or 0 for pid in backend_processes(supervisor)]
        resident_mib = max(sizes, default=0) // MIB
        if resident_mib < self._mib:
            text = f"{self._mode}: {resident_mib} MiB resident, with {self._mib} of KV memory"
            raise UnderstudyError("bench.not_used", text)
        return resident_mib

    async def _takeover(self, before: Whole) -> tuple[dict[str, Any], dict[str, Any]]:
        """The lock server's record of the grant, and the next engine's status once it serves."""
        async with asyncio.timeout(TAKEOVER_S):
            while True:
                view = await gather(self._directory)
                grants = [
                    each
                    for each in view["lockserver"].get("last_grants") or ()
                    if each["lock"] == "active" and each["token"] > before.token
                ]
                if grants:
                    (part,) = (
                        each
                        for each in engine_parts(self._directory)
                        if each.name == grants[0]["engine"]
                    )
                    status = await status_of(part)
                    if (status.get("last_failover") or {}).get("active_mono_ms") is not None:
                        return grants[0], status
                await asyncio.sleep(POLL_S)
