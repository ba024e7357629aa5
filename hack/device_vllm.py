"""vLLM with a standby on a real GPU: start it, kill it, measure it, write a report.

    python -m hack.device_vllm [--model DIRECTORY] [--tensor-parallel 2] [-- vLLM's flags]

First stock vLLM, for the answers and its speed; then a pod of two engines on the same devices: its
speed, what both engines take of each device, and a drill that kills the API process, the engine
core and a worker in turn under load. The report is bench/device/vllm-<device>-<date>.json. Only
plain allocations, no setting is changed. Without a GPU, or without vLLM for it, one sentence names
what is missing. `--rehearse` runs everything with the CPU build on host memory; its report is
marked, and never written to bench/device.

Surprising: answers in bfloat16 depend on what else is in a batch. Only prompts whose two best
candidates lie far apart are compared; `--load-format dummy` has none, so the pod's own first
answers are compared instead.
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
from pathlib import Path
from typing import Any

from hack.device.find import find_devices
from hack.device.part import Nvml
from hack.report import ROOT, commit, machine
from hack.vllm.stock import Question, Stock, measure
from plumbing.errors import UnderstudyError
from plumbing.service.cli import INTERRUPTED, run_async
from plumbing.service.signals import SignalInbox
from understudy.drill.clients import Target
from understudy.drill.prompts import write_expected
from understudy.drill.run import Drill, DrillPlan
from understudy.kubelet.runner import PodRunner, run_pod
from understudy.status.gather import gather
from understudy.up.local_pod import LocalPod
from understudy.up.ports import free_pod_ports
from understudy.up.random_model import VLLM_RANDOM_MODEL, make_random_model
from understudy.up.sessions import DrillResult, run_drill

BENCH = ROOT / "bench" / "device"
SCHEMA = 1
GAP_MIN = 0.25  # of log probabilities in bfloat16, whose step near 1 is 2^-8
STILL_S = 0.5  # how long a device's memory in use must not change to count
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
    report = run_async(lambda: Run(place, flags, base).everything())
    if report is None:
        return INTERRUPTED
    is_good = report["passed"]
    if is_good:
        shutil.rmtree(base, ignore_errors=True)
    else:
        print(f"the logs of all parts are kept in {base}", file=sys.stderr)
    _write(report, flags)
    return 0 if is_good else 1


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
        self.questions: list[Question] = []
        self.expected: Path | None = None
        self.found: dict[str, Any] = {"memory": {}, "speed": {}}

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

    async def everything(self) -> dict[str, Any] | None:
        """The report; None: interrupted."""
        began = time.monotonic()
        shape = REHEARSED_SHAPE if self.flags.rehearse else SHAPE
        model = (
            Path(self.flags.model).absolute()
            if self.flags.model
            else await make_random_model(self.base / "model", shape)
        )
        self._note_memory("nothing")
        result = await self._drill(model) if await self._ask_stock(model) else None
        if result is None:
            return None
        about, resumed = machine(), self._resume()
        return {
            "schema": SCHEMA,
            "date": time.strftime("%Y-%m-%d"),
            "is_rehearsal": bool(self.flags.rehearse),
            "commit": commit(),
            "machine": about,
            "devices": [gpu.facts() for gpu in self.gpus],
            "versions": self.place.versions,
            "model": self.flags.model or f"random {' '.join(shape)}",
            "flags": list(self.vllm_flags),
            "tensor_parallel": self.flags.tensor_parallel,
            "kv_bytes": self.kv_bytes,
            "drill": result.report.to_dict("vllm", about),
            "failovers_ms": result.report.failovers,
            **self.found,
            "resumed": resumed,
            "passed": result.report.passed and resumed["passed"],
            "problems": [*result.report.problems, *resumed["problems"]],
            "seconds": round(time.monotonic() - began, 1),
        }

    # ------------------------------------------------------------------ stock, then the pod

    async def _ask_stock(self, model: Path) -> bool:
        """Measure stock, and write a file of the answers that the pod must give, if there are any
        that rounding cannot change. False: interrupted."""
        ranks = self.flags.tensor_parallel
        stock = Stock(model, self.base / "stock", ranks, self.vllm_flags, self.env)

        async def body() -> bool:
            self._note_memory("stock")
            stock.note_leftovers()
            try:
                await self._learn(stock)
            except UnderstudyError as error:
                self.found["answers"] = f"the pod's own, since {error.message}"
            return True

        inbox = SignalInbox()
        try:
            done = await run_pod(stock.runner, body, inbox.get, _say)
        finally:
            inbox.close()
        stock.remove_leftovers()
        return bool(done)

    async def _learn(self, stock: Stock) -> None:
        gap_min = 0.0 if self.flags.rehearse else GAP_MIN
        asked = [each for each in await stock.questions() if each.gap >= gap_min]
        if not asked:
            raise UnderstudyError("drill.no_answers", "rounding could change every answer")
        prompts, answers = await stock.answers(asked)
        self.questions = [each for each in asked if each.prompt.key in answers]
        self.found["answers"] = f"stock vLLM's, to {len(self.questions)} prompts"
        self.found["smallest_gap"] = min(each.gap for each in self.questions)
        self.found["speed"]["stock"] = await self._speed(stock.target)
        self.expected = self.base / "expected.json"
        write_expected(self.expected, prompts, answers, source="stock vLLM")

    async def _drill(self, model: Path) -> DrillResult | None:
        directory = self.base / "pod"
        directory.mkdir(mode=0o700)
        plan = DrillPlan(self.flags.kills, TARGETS, self.flags.clients, self.expected)
        pod = LocalPod(
            directory,
            model,
            free_pod_ports(),
            backend="vllm",
            backend_args=self.vllm_flags,
            memory="host" if self.flags.rehearse else "cuda",
            device_bytes="4GiB" if self.flags.rehearse else WHOLE_DEVICE,
            tensor_parallel=self.flags.tensor_parallel,
            env=self.env,
        )

        async def look(target: Target) -> None:
            self._note_memory("pod")
            await self._note_engines(directory)
            if self.questions:
                self.found["speed"]["understudy"] = await self._speed(target)

        runner = PodRunner(pod.containers(), directory / "log")
        return await run_drill(Drill(directory, plan, _say), runner, plan, _say, look)

    def _resume(self) -> dict[str, Any]:
        """Kinds of requests that are cut and resumed, with the model runner that vLLM chooses."""
        command = [sys.executable, "-m", "hack.resume_matrix", "--json", "-"]
        command += ["--", f"--kv-cache-memory-bytes={REHEARSED_KV_BYTES}"]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **self.env}, stdout=subprocess.PIPE, check=False
        )
        try:
            report: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            return {"passed": False, "problems": [f"no resume was tried: exit {done.returncode}"]}
        wrong = [name for name, row in report["rows"].items() if row["wrong"]]
        problems = [f"resumed and wrong: {', '.join(wrong)}"] if wrong else []
        return {**report, "problems": problems}

    # ------------------------------------------------------------------ figures

    async def _speed(self, target: Target) -> dict[str, Any]:
        await measure(target, self.questions, self.flags.clients, 2.0)
        speed = await measure(target, self.questions, self.flags.clients, self.flags.seconds)
        return speed.to_dict()

    def _note_memory(self, when: str) -> None:
        """Bytes of each device in use, once they do not change."""
        self.found["memory"][f"with_{when}"] = [gpu.settled() for gpu in self.gpus]

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


def _write(report: dict[str, Any], flags: argparse.Namespace) -> None:
    spread = report["drill"]["failover_ms"]
    print(f"failover         {spread['p50']} ms (p50), {spread['max']} ms (max)")
    for name, phase in report["drill"]["phases_ms"].items():
        print(f"  {name:<14} {phase['p50']} ms (p50), {phase['max']} ms (max)")
    print(f"memory           {json.dumps(report['memory'])}")
    print(f"speed            {json.dumps(report['speed'])}")
    for problem in report["problems"]:
        print(f"error: {problem}", file=sys.stderr)
    path = flags.out
    if path is None and report["devices"]:
        name = str(report["devices"][0]["name"]).lower().replace(" ", "-")
        path = BENCH / f"vllm-{name}-{report['date']}.json"
    if path is None:
        print("nothing was written: this was a rehearsal without --out")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="vLLM with a standby, on a GPU")
    parser.add_argument("--model", default="", help="a checkpoint; random by default")
    parser.add_argument("--device", default="", help="UUIDs, with commas; default: all visible")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--kv-bytes", type=int, default=0, help=f"per rank ({KV_BYTES})")
    parser.add_argument("--kills", type=int, default=9, help="api, core and worker in turn")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of speed")
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
