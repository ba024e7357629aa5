"""How long it takes to fence an engine, by whose memory its KV cache is in.

    python -m hack.bench_fence [--json] [--mib 1024] [--rounds 20] [--kills 12] [--kv-mib 3072]

First bare processes that have touched so much memory: private, slabs in 4 KiB pages, slabs in huge
pages. Then two pods of vLLM engines with a full KV cache of `--kv-mib`, one in the memory service,
the other private, of each of which `--kills` are killed in turns (0: none; they need the Python of
.venv-vllm, and memory for both caches and four engines of 1 GiB). Host memory only: on a GPU the
driver frees. Says what it finds as it goes; a SIGTERM or SIGINT ends it with the results so far.
Exits 1 if the fence is not shorter with the memory service.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hack.bench_fence import bare, pods
from hack.report import commit, machine
from plumbing.service.cli import run_async

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


async def everything(flags: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"bare": bare.measure(flags.mib, flags.rounds, _say), "pods": None}
    if flags.kills:
        with tempfile.TemporaryDirectory(prefix="bench-fence-") as base:
            found["pods"] = await pods.measure(flags.kv_mib, flags.kills, Path(base), _say)
    kinds = found["bare"]["kinds"]
    is_shorter = [kinds[bare.FILLED]["died_ms"]["p50"] < kinds[bare.PRIVATE]["died_ms"]["p50"]]
    if found["pods"]:
        is_shorter += [found["pods"]["is_shorter"], found["pods"]["is_complete"]]
    settings = {name: _setting(name) for name in ("enabled", "shmem_enabled")}
    return {
        "passed": all(is_shorter),
        **found,
        "transparent_hugepage": settings,
        "commit": commit(),
        "machine": machine(),
    }


def _setting(name: str) -> str:
    """The one in brackets."""
    try:
        return (SETTINGS / name).read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{found['bare']['mib']} MiB, {kind:<18} dies in {took['died_ms']['p50']:>7.1f} ms (p50)"
        for kind, took in found["bare"]["kinds"].items()
    ]
    measured = found["pods"] or {"modes": {}, "problem": ""}
    for mode, of_mode in measured["modes"].items():
        if of_mode["kills"]:
            fence, wake = of_mode["fence_ms"]["p50"], of_mode["wake_ms"]["p50"]
            kills = f"{of_mode['kills']:>3} kills of vLLM"
            lines.append(f"{kills}, {mode:<8} fence {fence:>7.1f} ms, wake {wake:>7.1f} ms (p50)")
    if measured["modes"]:
        lines.append(f"shorter in {measured['pairs_shorter']} of {measured['pairs']} pairs")
    if measured["problem"]:
        lines.append(f"not complete: {measured['problem']}")
    return lines


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hack.bench_fence")
    parser.add_argument("--mib", type=int, default=1024, help="touched by the bare processes")
    parser.add_argument("--rounds", type=int, default=20, help="of bare processes")
    parser.add_argument("--kills", type=int, default=12, help="of vLLM engines of each kind")
    parser.add_argument("--kv-mib", type=int, default=3072, help="KV cache of the engines")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    flags = parser.parse_args()
    found = run_async(partial(everything, flags))
    print(json.dumps(found, indent=1) if flags.json else "\n".join(_lines(found)))
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
