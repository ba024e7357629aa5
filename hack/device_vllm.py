"""vLLM with a standby on a real GPU: what would refute the design first, then what it costs.

    python -m hack.device_vllm [--part NAME]… [--model DIRECTORY] [--tensor-parallel 2]
        [-- vLLM's flags]

| part | question |
|---|---|
| `kinds` | Is every kind of request right when it is cut and resumed, 32 at once? |
| `sampler` | Are seeded requests right beside unseeded ones, for which vLLM has another sampler? |
| `long` | Is a request with 50,000 tokens right when it is resumed beside 16 streams? |
| `pod` | Do sleeps under load and kills of each process lose nothing, and what do they cost? |

The model runner, asynchronous scheduling and CUDA graphs are what vLLM chooses by itself. Each part
takes less than ten minutes and is written to bench/device/vllm-<device>-<date>.json when it ends;
the file keeps the other parts of the same commit. Without a GPU, or without vLLM for it, one
sentence names what is missing. `--rehearse` runs everything with the CPU build on host memory; its
report is marked, and never written to bench/device.

Part `pod` starts stock vLLM for its answers; then two engines on the same devices: their memory on
each device, the sleeps, and a drill that kills the API process, the engine core and a worker under
load. Answers in bfloat16 depend on what else is in a batch, so only prompts
whose two best candidates lie far apart are compared; `--load-format dummy` has none, so the pod's
own first answers are compared instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hack.bench_sleep import across_sleeps
from hack.device.find import find_devices
from hack.device.part import Nvml
from hack.rig import ROOT, commit, machine
from hack.standing_pod import StandingPod
from hack.vllm.stock import Stock
from plumbing.errors import UnderstudyError
from plumbing.pod.cli import INTERRUPTED, run_async
from understudy.drill.clients import Target
from understudy.drill.run import Drill, DrillPlan
from understudy.pod.ports import free_pod_ports
from understudy.pod.runner import PodRunner
from understudy.pod.table import LocalPod
from understudy.status.gather import gather
from understudy.up.models import VLLM_RANDOM_MODEL, make_random_model
from understudy.up.sessions import DrillResult, run_drill

GRAPHS_FLAG = "--no-enforce-eager"  # graphs and compiled code, as vLLM runs on a GPU
BENCH = ROOT / "bench" / "device"
SCHEMA = 2
PART_S = 590.0  # a machine that is lent may be lent for ten minutes at a time
GAP_MIN = 0.25  # of log probabilities in bfloat16, whose step near 1 is 2^-8
STILL_S = 0.5  # how long a device's memory in use must not change to count
SLEEPS = 3
# The random model: heads of 256, the widest that attention kernels take.
SHAPE = ("--hidden=1024", "--layers=16")
REHEARSED_SHAPE = ("--hidden=128",)
KV_BYTES, REHEARSED_KV_BYTES = 4 << 30, 64 << 20
WHOLE_DEVICE = "1TiB"  # more than any device has: the memory service takes what there is
TARGETS = ("api", "core", "worker")
PLATFORM = (
    "from vllm.platforms import current_platform as p; import vllm, torch, json\n"
    "print(json.dumps([p.is_cuda(), p.is_cpu(), vllm.__version__, torch.__version__]))"
)
# The resume matrix's flags for each part: on a GPU, and in a rehearsal. It is a
# program of the tests, which nothing here imports.
MATRIX: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "kinds": (("--at-once=32",), ("--at-once=8", "--row=seed")),
    "sampler": (
        ("--at-once=16", "--beside=8"),
        ("--at-once=8", "--beside=2", "--row=seed, top k and p"),
    ),
    "long": (
        ("--only=long", "--long-tokens=50000", "--beside=16", "--cuts=2"),
        ("--only=long", "--long-tokens=600", "--beside=2", "--cuts=1"),
    ),
}
POD = "pod"
PARTS = (*MATRIX, POD)


@dataclass(frozen=True)
class Place:
    """Where to run: GPUs by UUID (none in a rehearsal), and the versions."""

    devices: list[str]
    versions: dict[str, str]


def main() -> int:
    flags = _flags()
    place, missing = find_place(flags)
    if place is None:
        print(f"device run of vLLM: nothing was measured, since {missing}")
        return 1 if flags.require else 0

    base = Path(tempfile.mkdtemp(prefix="us-dv-"))
    run = Run(place, flags, base)
    about = run.about()
    path = flags.out or _report_path(about)
    report = _begun(path, about)
    for name in flags.part or PARTS:
        _say(f"{name} ...")
        began = time.monotonic()
        found = run.matrix(name) if name in MATRIX else run_async(run.pod)
        if found is None:
            return INTERRUPTED
        report["parts"][name] = {**found, "seconds": round(time.monotonic() - began, 1)}
        parts = report["parts"].values()
        report["passed"] = all(part["passed"] for part in parts)
        _print_part(name, report["parts"][name])
        if path is not None:  # after each: the machine may be taken away
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path}" if path else "nothing was written: a rehearsal without --out")
    is_good = all(report["parts"][name]["passed"] for name in flags.part or PARTS)
    if is_good:
        shutil.rmtree(base, ignore_errors=True)
    else:
        _say(f"the logs of all processes are kept in {base}")
    return 0 if is_good else 1


def _report_path(about: dict[str, Any]) -> Path | None:
    if not about["devices"]:
        return None
    name = str(about["devices"][0]["name"]).lower().replace(" ", "-")
    return BENCH / f"vllm-{name}-{about['date']}.json"


def _begun(path: Path | None, about: dict[str, Any]) -> dict[str, Any]:
    """The report at `path` if it is of the same commit, else a new one."""
    if path is not None and path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        if found.get("commit") == about["commit"]:
            return found
    return {**about, "passed": False, "parts": {}}


def find_place(flags: argparse.Namespace) -> tuple[Place | None, str]:
    """Where to run, or what is missing, as part of a sentence."""
    done = subprocess.run(
        [sys.executable, "-c", PLATFORM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    is_cuda = is_cpu = False
    vllm = torch = ""
    if done.returncode == 0:
        is_cuda, is_cpu, vllm, torch = json.loads(done.stdout.strip().rpartition("\n")[2])
    versions = {"vllm": vllm, "torch": torch}
    if flags.rehearse:
        wanted = "vLLM's CPU build is not installed beside this Python; run `make setup-vllm`"
        return (Place([], versions), "") if is_cpu else (None, wanted)
    missing = []
    devices, reason = find_devices(flags.device.split(","), str(ROOT))
    if len(devices) < flags.tensor_parallel:
        missing.append(reason or f"{flags.tensor_parallel} GPUs are needed and there is one")
    if not is_cuda:
        found = f"vLLM {vllm} is not built for CUDA" if vllm else "vLLM is not installed"
        missing.append(f"{found}; pip install -e '.[vllm,cuda]'")
    if missing:
        return None, ", and ".join(missing)
    return Place(devices[: flags.tensor_parallel], versions), ""


class Run:
    """One device run in the directory `base`."""

    def __init__(self, place: Place, flags: argparse.Namespace, base: Path) -> None:
        self.place, self.flags, self.base = place, flags, base
        self.gpus = [Nvml(uuid, STILL_S) for uuid in place.devices]
        self.kv_bytes = flags.kv_bytes or (REHEARSED_KV_BYTES if flags.rehearse else KV_BYTES)
        self.expected: Path | None = None
        self.found: dict[str, Any] = {"memory": {}}
        self.problems: list[str] = []

    @property
    def shape(self) -> tuple[str, ...]:
        return REHEARSED_SHAPE if self.flags.rehearse else SHAPE

    @property
    def vllm_flags(self) -> tuple[str, ...]:
        """For stock and for ours; of one given twice the last counts."""
        small = VLLM_RANDOM_MODEL.arguments if self.flags.rehearse else ()
        return (*small, f"--kv-cache-memory-bytes={self.kv_bytes}", *self.flags.vllm)

    @property
    def env(self) -> dict[str, str]:
        if self.flags.rehearse:
            return dict(VLLM_RANDOM_MODEL.env)
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.place.devices)}

    def about(self) -> dict[str, Any]:
        """What every part is of."""
        return {
            "schema": SCHEMA,
            "date": time.strftime("%Y-%m-%d"),
            "is_rehearsal": bool(self.flags.rehearse),
            "commit": commit(),
            "machine": machine(),
            "devices": [gpu.facts() for gpu in self.gpus],
            "versions": self.place.versions,
            "model": self.flags.model or f"random {' '.join(self.shape)}",
            "flags": list(self.vllm_flags),
            "tensor_parallel": self.flags.tensor_parallel,
            "kv_bytes": self.kv_bytes,
        }

    # ------------------------------------------------------------------ kinds of requests

    def matrix(self, part: str) -> dict[str, Any]:
        """Requests that are cut and resumed, with the model runner that vLLM chooses."""
        real, rehearsed = MATRIX[part]
        words = rehearsed if self.flags.rehearse else real
        vllm = [] if self.flags.rehearse else [GRAPHS_FLAG]
        command = [
            *(sys.executable, "-m", "tests.vllm.resume_matrix", "--json=-"),
            *(*words, "--", *vllm),
        ]
        env = {**os.environ, **self.env}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=env, stdout=subprocess.PIPE, timeout=PART_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"passed": False, "problems": [f"no end after {PART_S:g} s"]}
        try:
            report: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            problem = f"no answer was compared: exit code {done.returncode}"
            return {"passed": False, "problems": [problem]}
        wrong = [name for name, row in report["rows"].items() if row["wrong"]]
        return {**report, "problems": [f"resumed and wrong: {name}" for name in wrong]}

    # ------------------------------------------------------------------ stock, then the pod

    async def pod(self) -> dict[str, Any] | None:
        """Speed, memory, sleeps and kills; None: interrupted."""
        model = (
            Path(self.flags.model).absolute()
            if self.flags.model
            else await make_random_model(self.base / "model", self.shape)
        )
        self._note_memory("nothing")
        result = await self._drill(model) if await self._ask_stock(model) else None
        if result is None:
            return None
        problems = [*result.report.problems, *self.problems]
        return {
            "drill": result.report.to_dict("vllm", machine()),
            "failovers_ms": result.report.failovers_ms,
            **self.found,
            "passed": result.report.passed and not problems,
            "problems": problems,
        }

    async def _ask_stock(self, model: Path) -> bool:
        """Write a file of the answers that the pod must give, if there are any that rounding cannot
        change. False: interrupted."""
        stock = Stock(
            model, self.base / "stock", self.flags.tensor_parallel, self.vllm_flags, self.env
        )
        self.expected, gap_min = self.base / "expected.json", 0 if self.flags.rehearse else GAP_MIN
        look = partial(self._note_memory, "stock")
        try:
            questions = await stock.write_answers(self.expected, _say, gap_min=gap_min, look=look)
        except UnderstudyError as error:
            self.expected, questions = None, []
            self.found["answers"] = f"the pod's own, since {error.message}"
        if questions:
            self.found["answers"] = f"stock vLLM's, to {len(questions)} prompts"
            self.found["smallest_gap"] = min(each.gap for each in questions)
        return questions is not None

    async def _drill(self, model: Path) -> DrillResult | None:
        directory = self.base / "pod"
        directory.mkdir(mode=0o700)
        plan = DrillPlan(self.flags.kills, TARGETS, self.flags.clients, self.expected)
        pod = LocalPod(
            directory,
            model,
            free_pod_ports(),
            backend="vllm",
            backend_args=(*self.vllm_flags, *(["--self-test"] if self.flags.rehearse else [])),
            memory="host" if self.flags.rehearse else "cuda",
            device_bytes="4GiB" if self.flags.rehearse else WHOLE_DEVICE,
            tensor_parallel=self.flags.tensor_parallel,
            env={**self.env, "UNDERSTUDY_WAKE": "manual"},  # it sleeps although requests wait
        )

        async def look(target: Target) -> None:
            self._note_memory("pod")
            self._note_self_test(directory)
            await self._note_engines(directory)
            await self._sleep_under_load(await StandingPod.of(directory, drill, target))

        runner = PodRunner(pod.containers(), directory / "log")
        drill = Drill(directory, plan, _say)
        return await run_drill(drill, runner, plan, _say, look)

    async def _sleep_under_load(self, pod: StandingPod) -> None:
        """Sleeps and wakes: graphs then run over memory that was unmapped and mapped again."""
        try:
            self.found["sleeps"] = await across_sleeps(pod, self.flags.clients, SLEEPS)
            self.problems += self.found["sleeps"]["problems"]
        except UnderstudyError as error:
            self.problems.append(str(error))
        finally:
            pod.close()

    # ------------------------------------------------------------------ figures

    def _note_memory(self, when: str) -> None:
        """Bytes of each device in use, once they do not change."""
        self.found["memory"][f"with_{when}"] = [gpu.settled() for gpu in self.gpus]

    def _note_self_test(self, directory: Path) -> None:
        """What the engines found of themselves while they were prepared."""
        from engine.backends.vllm.api.self_test import NAME

        try:
            results = json.loads((directory / NAME).read_text()).values()
        except (OSError, ValueError) as error:
            self.problems.append(f"no result of a self-test: {error}")
            return
        self.found["self_tests"] = [*results]
        wrong = [each["problem"] for each in results if each["problem"] != ""]
        self.problems += [f"self-test: {problem or 'it did not end'}" for problem in wrong]

    async def _note_engines(self, directory: Path) -> None:
        """What each engine's workers take of their device, beside the shared weights."""
        view = await gather(directory)
        by_pid: dict[int, int] = {}
        for gpu in self.gpus:
            by_pid |= gpu.by_process()
        for part in view["engines"]:
            role = "active" if part["engine"]["id"] == view["active"] else "standby"
            pids = {name: by_pid.get(pid) for name, pid in part["backend"]["pids"].items()}
            self.found["memory"][role] = {name: size for name, size in pids.items() if size}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_part(name: str, part: dict[str, Any]) -> None:
    print(f"{name}: {'passed' if part['passed'] else 'FAILED'}, {part['seconds']} s")
    if name == POD:
        spread = part["drill"]["failover_ms"]
        print(f"  failover       {spread['p50']} ms (p50), {spread['max']} ms (max)")
        for phase, found in part["drill"]["phases_ms"].items():
            print(f"    {phase:<12} {found['p50']} ms (p50), {found['max']} ms (max)")
        print(f"  memory         {json.dumps(part['memory'])}")
    elif "resumed" in part:
        print(f"  resumed        {part['resumed_right']} of {part['resumed']} right")
    for problem in part["problems"]:
        print(f"  error: {problem}")


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="vLLM with a standby, on a GPU")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; repeatable")
    parser.add_argument("--model", default="", help="a checkpoint; random by default")
    parser.add_argument("--device", default="", help="UUIDs, with commas; default: all visible")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--kv-bytes", type=int, default=0, help=f"per rank ({KV_BYTES})")
    parser.add_argument("--kills", type=int, default=3, help="api, core and worker in turn")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--out", type=Path, help="instead of bench/device/vllm-<device>-<date>.json"
    )
    parser.add_argument("--require", action="store_true", help="fail if anything is missing")
    parser.add_argument("--rehearse", action="store_true", help="use the CPU build, on host memory")
    parser.add_argument("vllm", nargs="*", metavar="-- vLLM's flags", help="for stock and for ours")
    flags = parser.parse_args()
    if flags.rehearse and flags.out and flags.out.resolve().is_relative_to(BENCH):
        parser.error("bench/device holds reports of real devices only")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    return flags


if __name__ == "__main__":
    sys.exit(main())
