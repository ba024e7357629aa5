"""What a KV cache that outlives its engine is worth, and what it costs.

    python hack/bench_kv.py [--json] [--backend vllm|reference] [--kills 5] [--quick]

A pod is killed again and again: how long is the first token of a prompt away once the next engine
serves, if it adopts the prompt's blocks, beside a warm cache and a prompt that nobody has asked.
A second pod publishes a checksum of every block and is killed under streams: blocks that are not
adopted, and those whose bytes have changed. Then throughput with publication and without. Exits 1
if a goal is missed. With vLLM for CUDA it runs on the GPU, else on host memory; vLLM needs the
Python of .venv-vllm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hack.bench_kv.kills import KilledPod, KillFigures
from hack.bench_kv.plan import QUICK, QUICK_VLLM, Plan
from hack.bench_kv.throughput import KINDS, alone, measure, target_of
from hack.report import ROOT, commit, machine
from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.cli import INTERRUPTED, fail, run_async
from plumbing.service.signals import SignalInbox
from understudy.kubelet.containers import Container
from understudy.kubelet.runner import PodRunner, run_pod
from understudy.up.random_model import make_random_model

# What the feature has to reach (docs/kv.md), and what --json judges.
WARM_RATIO_MAX = 1.3
RECOMPUTED_RATIO_MIN = 5.0
ADOPTED_MIN = 0.99
THROUGHPUT_MIN = 0.99
COMPUTED_FROM_TOKENS = 900  # what shorter prompts save is lost in the rest

DURATIONS = """\
With vLLM on two idle cores this takes about half an hour, and much longer on a busy machine. The
kills take most of it: 30 for first tokens (2 kinds, 3 lengths, --kills 5) and 10 under streams
(--audited 10), and before each the engine that was killed last has to be back, which takes half a
minute; one of the reference backend is back after a few seconds. Then 20 pairs of throughput
(--pairs 20). 0 leaves a part out. --quick: two minutes.
"""
PLATFORM = "from vllm.platforms import current_platform as p; print(p.is_cuda())"

T = TypeVar("T")


class Interrupted(Exception):
    """A signal ended a pod."""


async def everything(plan: Plan) -> dict[str, Any] | None:
    """None: interrupted."""
    found, inbox = KillFigures(), SignalInbox()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-kv-") as base:
            await _kills(plan, Path(base), found, inbox)
            pairs = await _throughput(plan, Path(base), inbox) if plan.pairs else []
    except Interrupted:
        return None
    finally:
        inbox.close()
    return document(plan, found, pairs)


async def _kills(plan: Plan, base: Path, found: KillFigures, inbox: SignalInbox) -> None:
    model = await make_random_model(base / "model", plan.shape.flags)
    plain, audited = plan.flags("gms", plan.shape), plan.flags("gms", plan.shape, "--kv-audit")
    if plan.kills:
        pod = plan.pod(base / "a", model, plain)
        killed = KilledPod(pod.directory, plan, found, _say)
        await _with(pod.containers(), pod.directory, inbox, killed.first_tokens)
    if plan.audited:
        pod = plan.pod(base / "b", model, audited)
        killed = KilledPod(pod.directory, plan, found, _say)
        await _with(pod.containers(), pod.directory, inbox, killed.under_streams)


async def _throughput(plan: Plan, base: Path, inbox: SignalInbox) -> list[dict[str, float]]:
    shape = plan.quick_shape
    model = await make_random_model(base / "quick-model", shape.flags)
    pods = {
        kind: plan.pod(base / kind, model, plan.flags(memory, shape))
        for kind, memory in KINDS.items()
    }

    async def both() -> list[dict[str, float]]:
        targets = {kind: await target_of(pod.directory) for kind, pod in pods.items()}
        return await measure(plan, targets, _say)

    async def second() -> list[dict[str, float]]:
        off = pods["off"]
        return await _with(alone(off.containers()), off.directory, inbox, both)

    on = pods["on"]
    return await _with(alone(on.containers()), on.directory, inbox, second)


async def _with(
    containers: Sequence[Container],
    directory: Path,
    inbox: SignalInbox,
    body: Callable[[], Awaitable[T]],
) -> T:
    """`body` while the containers run.

    Raises:
        Interrupted: by a signal.
    """
    done = list[T]()

    async def run() -> bool:
        done.append(await body())
        return True

    # An engine that starts alone is one that imports vLLM on one core for most of its time.
    at_once = [replace(each, starts_in_order=False) for each in containers]
    if not await run_pod(PodRunner(at_once, directory / "log"), run, inbox.get, _say):
        raise Interrupted
    return done[0]


# ---------------------------------------------------------------------- the report


def document(plan: Plan, found: KillFigures, pairs: list[dict[str, float]]) -> dict[str, Any]:
    """What was measured, judged."""
    ratios = [pair["on"] / pair["off"] for pair in pairs]
    ratio = round(statistics.median(ratios), 4) if ratios else None
    share = found.adopted_blocks / found.published_blocks if found.published_blocks else None
    missed = [
        *_missed_times(found.ttft_ms),
        *(
            [f"adopted {share:.4f} of the blocks"]
            if share is not None and share < ADOPTED_MIN
            else []
        ),
        *([f"{found.torn_blocks} blocks were torn"] if found.torn_blocks else []),
        *([f"throughput ratio {ratio}"] if ratio is not None and ratio < THROUGHPUT_MIN else []),
    ]
    return {
        "ttft_ms": {
            str(length): {kind: _p50_and_max(times) for kind, times in of_kinds.items()}
            for length, of_kinds in found.ttft_ms.items()
        },
        "adopted_blocks": found.adopted_blocks,
        "published_blocks": found.published_blocks,
        "torn_blocks": found.torn_blocks,
        "throughput_ratio": ratio,
        "passed": not found.problems and not (missed and plan.is_judged),
        "missed": missed,
        "problems": found.problems,
        "throughput": {"pairs": pairs, "ratios": [round(each, 4) for each in ratios]},
        "backend": plan.backend,
        "memory": "cuda" if plan.is_cuda else "host",
        "kills_of_each": plan.kills,
        "kills_audited": plan.audited,
        "model": {"kills": plan.shape.flags, "throughput": plan.quick_shape.flags},
        "commit": commit(),
        "machine": machine(),
    }


def _missed_times(ttft_ms: dict[int, dict[str, list[float]]]) -> list[str]:
    missed = []
    for length, times in ttft_ms.items():
        if not all(times.values()):
            continue
        warm, adopted, recomputed = (
            statistics.median(times[kind]) for kind in ("warm", "adopted", "recomputed")
        )
        if adopted > WARM_RATIO_MAX * warm:
            missed.append(f"{length} tokens: adopted takes {adopted / warm:.2f} of warm")
        if length >= COMPUTED_FROM_TOKENS and adopted * RECOMPUTED_RATIO_MIN > recomputed:
            missed.append(f"{length} tokens: only {recomputed / adopted:.1f} times as fast")
    return missed


def _p50_and_max(times_ms: list[float]) -> dict[str, float] | None:
    if not times_ms:
        return None
    return {"p50": round(statistics.median(times_ms), 1), "max": round(max(times_ms), 1)}


def is_on_cuda() -> bool:
    """Whether the vLLM beside this Python runs on GPUs.

    Raises:
        UsageError: `bench.no_vllm`.
    """
    command = [sys.executable, "-c", PLATFORM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(
            "bench.no_vllm",
            f"{sys.executable} has no vLLM; use the Python of .venv-vllm, or --backend reference",
        )
    return done.stdout.strip().endswith("True")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{length:>5} tokens, {kind:<10} {times['p50']:>9.1f} ms (p50) {times['max']:>9.1f} (max)"
        for length, of_kinds in found["ttft_ms"].items()
        for kind, times in of_kinds.items()
        if times
    ]
    lines.append(f"adopted {found['adopted_blocks']} of {found['published_blocks']} blocks")
    lines.append(f"torn {found['torn_blocks']}, throughput ratio {found['throughput_ratio']}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python hack/bench_kv.py",
        description="What a KV cache that outlives its engine is worth, and what it costs.",
        epilog=DURATIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", choices=("vllm", "reference"), default="vllm")
    parser.add_argument("--kills", type=int, help="for each length, adopted and recomputed")
    parser.add_argument("--audited", type=int, help="kills under streams, with checksums")
    parser.add_argument("--pairs", type=int, help="of throughput with publication and without")
    parser.add_argument("--quick", action="store_true", help="a small model, once; nothing judged")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    flags = parser.parse_args()
    quick = QUICK_VLLM if flags.backend == "vllm" else QUICK
    plan = quick if flags.quick else Plan()
    named = {name: getattr(flags, name) for name in ("kills", "audited", "pairs")}
    given = {name: value for name, value in named.items() if value is not None}
    try:
        is_cuda = flags.backend == "vllm" and is_on_cuda()
        plan = replace(plan, backend=flags.backend, is_cuda=is_cuda, **given)
        found = run_async(partial(everything, plan))
    except UnderstudyError as error:
        fail(error)
    if found is None:
        sys.exit(INTERRUPTED)
    print(json.dumps(found, indent=1) if flags.json else "\n".join(_lines(found)))
    for line in (*found["missed"], *found["problems"]):
        print(f"missed: {line}", file=sys.stderr)
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
