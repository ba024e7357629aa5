"""vLLM's own serving benchmark as a client of a pod whose engines are killed: none of its requests
may fail.

    python -m hack.serving_benchmark [--kills 30] [--backend vllm] [--json]

Run it with the Python of .venv-vllm, which has the benchmark, whatever the pod's backend. The
benchmark, `vllm bench serve --dataset-name random`, streams completions of a given length from a
pod with a gateway, and then, with fewer kills, from a pod in direct mode: what clients saw before.
Engines' processes, the lock server and the memory server are killed in turn.

The benchmark calls a stream complete that ends after its first token, so the tokens of each are
counted here: one with too few was cut. Its clock is the drill's, so that the requests in flight at
each kill are known; the benchmark runs again until all kills were made, and one that falls between
two runs met no request. Exits 1 if a request behind the gateway failed or was cut.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from hack.kept_logs import run_below
from hack.report import commit, machine, spread
from hack.stock_clients.kinds import APART_S
from hack.vllm.pod import environment, make_pod, model_of
from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.cli import fail
from plumbing.service.signals import SignalInbox
from understudy.drill.clients import Target
from understudy.drill.records import GMS, LOCKSERVER
from understudy.drill.run import Drill, DrillPlan
from understudy.drill.verdict import DrillReport, judge
from understudy.kubelet.runner import PodRunner, run_pod
from understudy.up.local_pod import LocalPod
from understudy.up.random_model import VLLM_RANDOM_MODEL, RandomModel

# What `vllm bench serve` runs. The command itself looks for a package called vllm, which the CPU
# build is not called, and ends.
START = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
COMMAND = (sys.executable, "-c", START)
STARTED = b"Starting main benchmark run"
INPUT_TOKENS = 24
# The reference backend computes four requests at once, and one of them is the drill's own.
CONCURRENCY = 3
MODES = ("gateway", "direct")
SHOWN_MAX = 10  # errors
ERROR_CHARS_MAX = 400


@dataclass(frozen=True, slots=True)
class Load:
    """What the benchmark is told, and how fast it loses its engines."""

    prompts: int
    concurrency: int
    tokens: int
    apart_s: float  # from kill to kill

    def flags(self, target: Target, model: str, tokenizer: Path, file: Path) -> list[str]:
        wanted = {
            "backend": "openai",
            "host": target.host,
            "port": target.port,
            "endpoint": "/v1/completions",
            "model": model,
            "tokenizer": tokenizer,
            "dataset-name": "random",
            "random-input-len": INPUT_TOKENS,
            "random-output-len": self.tokens,
            "num-prompts": self.prompts,
            "max-concurrency": self.concurrency,
            "temperature": 0,
            "result-dir": file.parent,
            "result-filename": file.name,
        }
        given = [f"--{name}={value}" for name, value in wanted.items()]
        return [*given, "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]


@dataclass(frozen=True, slots=True)
class Streamed:
    """One request of the benchmark. Times as CLOCK_MONOTONIC seconds."""

    began_s: float
    ended_s: float
    first_token_s: float
    gaps_s: Sequence[float]
    tokens: int
    error: str

    def is_in_flight(self, at_ms: float) -> bool:
        return self.began_s * 1000 <= at_ms <= self.ended_s * 1000


def streamed_of(document: Mapping[str, Any]) -> list[Streamed]:
    """The requests of one detailed result."""
    names = ("start_times", "latencies", "ttfts", "itls", "output_lens", "errors")
    return [
        Streamed(began_s, began_s + took_s, first_s, gaps_s, tokens, error)
        for began_s, took_s, first_s, gaps_s, tokens, error in zip(
            *(document[name] for name in names), strict=True
        )
    ]


def figures(
    requests: Sequence[Streamed], tokens: int, killed_ms: Sequence[float]
) -> dict[str, Any]:
    """What the benchmark saw, and how many kills it was there for."""
    errors = [each.error for each in requests if each.error]
    whole = [each for each in requests if not each.error and each.tokens == tokens]
    met = [sum(each.is_in_flight(at_ms) for each in requests) for at_ms in killed_ms]
    return {
        "requests": len(requests),
        "failed": len(errors),
        "cut": len(requests) - len(errors) - len(whole),
        "kills": len(met),
        "kills_under_load": sum(1 for each in met if each),
        "streams_over_a_kill": sum(met),
        "ttft_ms": spread([each.first_token_s * 1000 for each in whole] or [0.0]),
        "longest_gap_ms": spread([max(each.gaps_s, default=0.0) * 1000 for each in whole] or [0.0]),
        "first_errors": [_raised(error) for error in errors[:SHOWN_MAX]],
    }


def _raised(error: str) -> str:
    """The end of a traceback, which names what was raised; its files are of this machine only."""
    return error.strip().rpartition("\n")[2][:ERROR_CHARS_MAX]


class Benchmark:
    """The benchmark's process, run again until it is told to stop."""

    def __init__(self, load: Load, base: Path, env: Mapping[str, str]) -> None:
        self.requests: list[Streamed] = []
        self.started = asyncio.Event()
        self._load, self._base = load, base
        self._env = {**os.environ, **env}
        self._process: Process | None = None
        self._runs = 0

    async def run(self, target: Target, model: str, tokenizer: Path, stop: asyncio.Event) -> None:
        """Raises:
        UnderstudyError: `benchmark.failed`, it ended with an error of its own.
        """
        while not stop.is_set():
            self._runs += 1
            file = self._base / f"benchmark-{self._runs}.json"
            flags = self._load.flags(target, model, tokenizer, file)
            await self._run_once([*COMMAND, *flags], file.with_suffix(".log"))
            self.requests += streamed_of(json.loads(file.read_text()))

    async def _run_once(self, command: Sequence[str], log: Path) -> None:
        process = self._process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=PIPE, stderr=asyncio.subprocess.STDOUT, env=self._env
        )
        assert process.stdout is not None
        with log.open("wb") as file:
            async for line in process.stdout:
                file.write(line)
                if STARTED in line:
                    self.started.set()
        if await process.wait():
            raise UnderstudyError(
                "benchmark.failed", f"it ended with code {process.returncode}; see {log}"
            )

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


async def watch(drill: Drill, target: Target, benchmark: Benchmark, tokenizer: Path) -> None:
    """All kills of `drill` while the benchmark runs."""
    stop, model = asyncio.Event(), drill.prompts[0].body["model"]
    running = asyncio.create_task(benchmark.run(target, model, tokenizer, stop))
    started = asyncio.create_task(benchmark.started.wait())
    try:
        await asyncio.wait({running, started}, return_when=asyncio.FIRST_COMPLETED)
        if benchmark.started.is_set():
            await drill.run(target)
        stop.set()
        await running
    finally:
        started.cancel()
        running.cancel()
        benchmark.kill()
        await asyncio.gather(running, started, return_exceptions=True)


def pod_of(backend: str, base: Path, model: Path) -> LocalPod:
    """A pod below `base`."""
    if backend == "vllm":
        return make_pod(base, model, 1, VLLM_RANDOM_MODEL.arguments)
    random = RandomModel.of(backend)
    pod = make_pod(base, model, 1, random.arguments)
    return replace(pod, backend=backend, env={**random.env})


async def measure(
    mode: str, backend: str, base: Path, model: Path, load: Load, kills: int
) -> dict[str, Any] | None:
    """One pod, one benchmark. None: interrupted."""
    base.mkdir()
    pod = replace(pod_of(backend, base, model), is_direct=mode == "direct")
    runner = PodRunner(pod.containers(), pod.directory / "log")
    also = (LOCKSERVER, GMS)
    plan = DrillPlan(kills, clients=0, also=also, duration_s=kills * load.apart_s)
    drill = Drill(pod.directory, plan, _say, runner)
    benchmark = Benchmark(load, base, environment(base))
    ended_early: list[str] = []

    async def body() -> bool:
        try:
            await watch(drill, await drill.prepare(), benchmark, model)
        except UnderstudyError as error:
            ended_early.append(f"ended early: {error}")
        return True

    inbox = SignalInbox()
    try:
        if await run_pod(runner, body, inbox.get, _say) is None:
            return None
    finally:
        inbox.close()
    report = judge(drill.records, kills)
    report.problems += ended_early
    return document(mode, benchmark.requests, load, drill, report)


def document(
    mode: str, requests: Sequence[Streamed], load: Load, drill: Drill, report: DrillReport
) -> dict[str, Any]:
    """The figures of one mode."""
    records = drill.records
    killed_ms = [kill.killed_ms for kill in records.kills]
    killed_ms += [kill.killed_ms for kill in records.memory_kills]
    killed_ms += [kill.killed_ms for kill in records.part_kills]
    found = figures(requests, load.tokens, sorted(killed_ms))
    is_lossless = bool(found["requests"]) and not found["failed"] and not found["cut"]
    return {
        "passed": report.passed and (is_lossless or mode == "direct"),
        **found,
        "killed": report.killed,
        "failover_ms": report.failover_ms.to_dict(),
        "problems": report.problems,
    }


def vllm_version() -> str:
    """Of this interpreter, whatever its build is called.

    Raises:
        UsageError: `benchmark.no_vllm`.
    """
    names = metadata.packages_distributions().get("vllm")
    if not names:
        raise UsageError(
            "benchmark.no_vllm",
            f"{sys.executable} has no vLLM, whose benchmark this is; run `make setup-vllm`, and"
            " then .venv-vllm/bin/python -m hack.serving_benchmark",
        )
    return metadata.version(names[0])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def everything(base: Path, flags: argparse.Namespace) -> dict[str, Any] | None:
    """All modes in turn. None: interrupted."""
    (base / "model").mkdir()
    model = await model_of(base / "model", str(flags.model) if flags.model else None)
    load = Load(flags.prompts, flags.concurrency, flags.tokens, flags.apart_s)
    found: dict[str, Any] = {}
    for mode in flags.mode or MODES:
        _say(f"{mode}: a pod of two engines with backend {flags.backend}")
        kills = flags.direct_kills if mode == "direct" else flags.kills
        each = await measure(mode, flags.backend, base / mode, model, load, kills)
        if each is None:
            return None
        found[mode] = each
    return {
        "passed": all(each["passed"] for each in found.values()),
        "backend": flags.backend,
        "commit": commit(),
        "vllm": flags.version,
        "machine": machine(),
        "prompts_per_run": load.prompts,
        "concurrency": load.concurrency,
        "tokens": load.tokens,
        "apart_s": load.apart_s,
        **found,
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """The document as text."""
    shown = []
    for mode in MODES:
        if mode in found:
            each = found[mode]
            shown.append(
                f"{mode:<8} {each['requests']} requests, {each['failed']} failed, {each['cut']} cut"
                f"; {each['kills']} kills, {each['kills_under_load']} of them under load; longest"
                f" gap {each['longest_gap_ms']['max']} ms"
            )
            shown += [f"problem: {problem}" for problem in each["problems"]]
    return [*shown, "passed" if found["passed"] else "FAILED"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hack.serving_benchmark",
        description="vLLM's serving benchmark and kills",
    )
    parser.add_argument("--kills", type=int, default=30, help="behind the gateway")
    parser.add_argument("--direct-kills", type=int, default=8, help="in direct mode")
    parser.add_argument("--backend", choices=("reference", "vllm"), default="vllm")
    parser.add_argument("--apart-s", type=float, default=APART_S, help="from kill to kill")
    parser.add_argument("--mode", action="append", choices=MODES, help="[default: both]")
    parser.add_argument("--model", type=Path, help="a checkpoint [default: a random one]")
    parser.add_argument("--prompts", type=int, default=400, help="of one run of the benchmark")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    flags = parser.parse_args()
    try:
        flags.version = vllm_version()
    except UsageError as error:
        fail(error)
    found = run_below("understudy-serving-", partial(everything, flags=flags))
    print(json.dumps(found, indent=2) if flags.json else "\n".join(lines(found)))
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
