"""Pods of two vLLM engines whose KV cache is full, killed in turns: the fence, and the next wake.

Owns that the cache is used before each kill, by prompts that nobody has asked before: what was
never touched costs nothing to unmap.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import messages as engine_messages
from engine.messages import CONTROL
from hack.bench_kv.plan import LONGEST, MADE, Plan, Prompts, Shape
from hack.report import spread
from plumbing.errors import UnderstudyError
from plumbing.part.paths import engine_sockets
from plumbing.part.peers import ask
from plumbing.service.signals import SignalInbox
from understudy.drill.clients import Target, send
from understudy.drill.killer import Whole, wait_whole
from understudy.drill.records import End, asked_of_engine
from understudy.kubelet.runner import PodRunner, run_pod
from understudy.status.gather import engine_parts, gather, status_of
from understudy.up.random_model import make_random_model

MODES = ("private", "gms")
KILLED = "worker"  # it has the KV memory
WHOLE_S, TAKEOVER_S, POLL_S = 900.0, 120.0, 0.2
SHAPE = Shape(512, 8, 4)  # little to compute for its KV memory: 16 KiB for a token
PHASES = ("fence_ms", "wake_ms")

Say = Callable[[str], None]
Figures = dict[str, list[float]]


async def measure(mib: int, rounds: int, kills: int, base: Path, say: Say) -> dict[str, Any] | None:
    """By mode: from the SIGKILL until all of the engine is gone, and from the grant until the next
    engine has woken and passed its canary. None: interrupted."""
    inbox = SignalInbox()
    found: dict[str, Figures] = {mode: {phase: [] for phase in PHASES} for mode in MODES}
    plan = Plan(backend="vllm", shape=SHAPE)
    try:
        model = await make_random_model(base / "model", SHAPE.flags)
        for number in range(rounds):
            for mode in MODES if number % 2 else reversed(MODES):
                flags = (*plan.flags(mode, SHAPE), f"--kv-cache-memory-bytes={mib << 20}")
                pod = plan.pod(base / f"{mode}-{number}", model, flags)
                say(f"pods, round {number + 1} of {rounds}: {mode}")
                killed = _Pod(pod.directory, mib, found[mode], say)

                async def body(killed: _Pod = killed) -> bool:
                    for _ in range(kills):
                        await killed.once()
                    return True

                runner = PodRunner(pod.containers(), pod.directory / "log")
                if not await run_pod(runner, body, inbox.get, say):
                    return None
    finally:
        inbox.close()
    return document(mib, found)


def document(mib: int, found: dict[str, Figures]) -> dict[str, Any]:
    modes = {
        mode: {phase: {"min": min(took), **spread(took)} for phase, took in phases.items()}
        for mode, phases in found.items()
    }
    private, gms = (statistics.median(found[mode]["fence_ms"]) for mode in MODES)
    kills = {mode: len(found[mode]["fence_ms"]) for mode in MODES}
    return {"kv_mib": mib, "kills": kills, "modes": modes, "is_shorter": gms < private}


class _Pod:
    """One pod that is killed again and again."""

    def __init__(self, directory: Path, mib: int, found: Figures, say: Say) -> None:
        self._directory, self._found, self._say = directory, found, say
        self._prompts = Prompts(seed=mib)
        self._asked = (mib << 20) // SHAPE.kv_bytes(LONGEST + MADE) + 1
        self._token = 0

    async def once(self) -> None:
        whole = await self._whole()
        host, _, port = whole.service.rpartition(":")
        target = Target(host, int(port))
        for _ in range(self._asked):
            await self._fill(target)
        path = engine_sockets(self._directory)[whole.engine]
        reply = (await ask(path, CONTROL, asked_of_engine(KILLED))).message
        assert isinstance(reply, engine_messages.KillingMsg)
        self._token = whole.token
        grant, failover = await self._takeover(whole)
        took = {
            "fence_ms": grant["fenced_mono_ms"] - reply.mono_ms,
            "wake_ms": failover["canary_mono_ms"] - failover["granted_mono_ms"],
        }
        self._say(", ".join(f"{name} {value:.1f}" for name, value in took.items()))
        for name, value in took.items():
            self._found[name].append(round(value, 2))

    async def _whole(self) -> Whole:
        """Under a newer token than at the last kill."""
        async with asyncio.timeout(WHOLE_S):
            while True:
                whole = await wait_whole(self._directory, self._say, WHOLE_S, poll_s=POLL_S)
                if whole.token > self._token:
                    return whole
                await asyncio.sleep(POLL_S)

    async def _fill(self, target: Target) -> None:
        exchange = await send(target, self._prompts.fresh(LONGEST))
        if exchange.end is not End.DONE or exchange.status != 200:
            raise UnderstudyError("bench.no_answer", f"{exchange.status} {exchange.detail}")

    async def _takeover(self, before: Whole) -> tuple[dict[str, Any], dict[str, Any]]:
        """The lock server's record of the grant, and the next engine's of its wake."""
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
                    failover = (await status_of(part)).get("last_failover") or {}
                    if failover.get("active_mono_ms") is not None:
                        return grants[0], failover
                await asyncio.sleep(POLL_S)
