"""Other programs in the same scenarios, as far as they can run them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hack.bench_pool import llama, stock_vllm
from hack.bench_pool.plan import Plan
from hack.bench_pool.programs import Figures
from plumbing.errors import UnderstudyError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PeerRun:
    """What the others are told."""

    plan: Plan
    only: Sequence[str]
    base: Path
    llama_server: str | None
    say: Say


async def run_peers(peers: Sequence[str], run: PeerRun) -> dict[str, Figures]:
    """By program: its `scenarios`, or `absent` with the reason."""
    found: dict[str, Figures] = {}
    for name in peers:
        run.say(f"{name} …")
        try:
            found[name] = await _RUNS[name](run)
        except UnderstudyError as error:
            found[name] = {"absent": str(error)[:500]}
    return found


async def _llama(run: PeerRun) -> Figures:
    return await llama.run(run.llama_server, run.base / "llama", run.plan, run.only, run.say)


async def _stock_vllm(run: PeerRun) -> Figures:
    if "S1" not in run.only:
        return {"absent": "it runs S1 only"}
    found = await stock_vllm.in_turn(run.base / "stock", run.plan.stock_switches)
    return {"scenarios": {"S1": found}}


_RUNS: Mapping[str, Callable[[PeerRun], Awaitable[Figures]]] = {
    "llama.cpp": _llama,
    "stock-vllm": _stock_vllm,
}
PEERS = tuple(_RUNS)
