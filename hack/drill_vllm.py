"""`make drill-vllm`: the drill with vLLM, its tokens compared with those of stock vLLM.

    python -m hack.drill_vllm [the drill's flags] [--runner v1|v2] [--device all] [--json]
        [-- vLLM's flags]

Makes a random model, gets the answers to prompts that rounding cannot change from a stock server,
then drills a pod of two engines with those answers and measures what the pod takes of the machine.
The report is the drill's own; `--json` has the same keys and, under `vllm`, the figures.

The prompts are long and most share their beginning, so that blocks of the KV cache are published
and adopted. With `--no-adoption` the engines adopt none, for comparison.

With `--device` it runs on GPUs, with the model runner, the scheduling and the graphs that vLLM
chooses by itself, and measures each device's memory. Before the kills the active engine sleeps and
wakes under load: graphs then run over memory that was unmapped and mapped again. Answers in
bfloat16 depend on what else is in a batch, so only prompts whose two best candidates lie far apart
are compared; `--load-format dummy` has none, so the pod's own first answers are compared instead.

What other vLLM servers of this machine leave in /dev/shm meanwhile counts as the pod's. To keep it
apart: `unshare --mount sh -c 'mount -t tmpfs none /dev/shm && exec python -m hack.drill_vllm'`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from engine.supervisor import leftovers
from hack import rig, v2_on_cpu
from hack.bench_sleep import across_sleeps
from hack.device.part import Nvml, find_devices
from hack.standing_pod import StandingPod
from hack.vllm.figures import Figures, look_at, private_bytes, problems_of, workers_below
from hack.vllm.pod import MODEL_SHAPE, environment, make_pod, model_of, temporary
from hack.vllm.stock import GAP_MIN, Question, Stock
from plumbing.errors import UnderstudyError, UsageError
from plumbing.pod.cli import json_flag, options
from plumbing.service.config import Option, Resolved
from understudy.cli.drill import run_drill
from understudy.cli.settings import DRILL_OPTIONS
from understudy.drill.clients import Target
from understudy.drill.records import Exchange, Prompt
from understudy.drill.run import Drill, DrillPlan
from understudy.drill.verdict import DrillReport
from understudy.pod.runner import PodRunner
from understudy.status.gather import gather
from understudy.up.models import VLLM_RANDOM_MODEL

DEFAULTS: Mapping[str, Any] = {"kills": 15, "target": ("api", "core", "worker")}
TAKEN = (
    "model",
    "device_bytes",
    "tensor_parallel",
    "kills",
    "target",
    "clients",
    "duration_s",
)
OPTIONS: tuple[Option, ...] = tuple(
    replace(option, default=DEFAULTS.get(option.name, option.default))
    for option in DRILL_OPTIONS
    if option.name in TAKEN
)

Expected = tuple[Sequence[Prompt], dict[str, Exchange]]
KV_FLAG = "--kv-cache-memory-bytes"
LEFT_SHOWN = 5
# On GPUs. The random model has heads of 256, the widest that attention kernels take.
DEVICE_SHAPE = ("--hidden=1024", "--layers=16")
DEVICE_FLAGS = (f"{KV_FLAG}={4 << 30}",)
WHOLE_DEVICE = "1TiB"  # more than any device has: the memory service takes what there is
DEVICE_GAP_MIN = 0.25  # of log probabilities in bfloat16, whose step near 1 is 2^-8
STILL_S = 0.5  # how long a device's memory in use must not change to count
SLEEPS, SLEEPING_CLIENTS = 3, 8
# Headers that torch compiles once; they are there wherever its cache is.
CACHE = "/torchinductor_"


@dataclass(slots=True)
class Found:
    """What was measured besides the drill's own report."""

    runner: str
    questions: Sequence[Question] = ()
    stock_private_bytes: int | None = None
    figures: Figures | None = None
    devices: dict[str, Any] = field(default_factory=dict)  # on GPUs

    def to_dict(self) -> dict[str, Any]:
        return {
            "runner": self.runner,
            "prompts_compared_with_stock": len(self.questions),
            "smallest_gap": min((question.gap for question in self.questions), default=None),
            **(self.figures or {}),
            **self.devices,
        }


@dataclass(frozen=True, slots=True)
class Run:
    """One drill: what to start and how; all its files are in the directory `base`."""

    base: Path
    config: Resolved
    idle_s: float | None
    adopts: bool
    vllm_flags: tuple[str, ...]
    runner: str | None
    gpus: tuple[Nvml, ...]  # () : on the CPU

    @property
    def flags(self) -> tuple[str, ...]:
        """vLLM's, for stock and for ours; the last of duplicates counts."""
        ours = DEVICE_FLAGS if self.gpus else VLLM_RANDOM_MODEL.arguments
        return (*ours, *self.vllm_flags)

    @property
    def env(self) -> dict[str, str]:
        """Of stock and of ours."""
        if not self.gpus:
            return environment(self.base)
        uuids = ",".join(each.uuid for each in self.gpus)
        return {"CUDA_VISIBLE_DEVICES": uuids, "TMPDIR": str(temporary(self.base))}

    @property
    def kv_bytes(self) -> int:
        """The KV cache of each rank: its mapping is found in the processes by this size.

        Raises:
            UsageError: `drill.kv_bytes`, it is not a number of bytes.
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument(KV_FLAG)
        given = parser.parse_known_args(self.flags)[0].kv_cache_memory_bytes
        if not str(given).isdigit():
            raise UsageError("drill.kv_bytes", f"{KV_FLAG} is {given!r}: here it takes bytes")
        return int(given)

    async def everything(self) -> tuple[DrillReport, Found] | None:
        """None: interrupted."""
        _ = self.kv_bytes  # refused before anything starts
        shape = DEVICE_SHAPE if self.gpus else MODEL_SHAPE
        model = await model_of(self.base, self.config["model"], shape)
        found = Found(v2_on_cpu.name_of(self.runner))
        self._note_memory(found, "nothing")
        is_done, expected = await self._ask_stock(model, found)
        result = await self._drill(model, expected, found) if is_done else None
        return (result, found) if result is not None else None

    async def _ask_stock(self, model: Path, found: Found) -> tuple[bool, Expected | None]:
        """Whether it was not interrupted, and the expected answers; None: the pod's own."""
        ranks = self.config["tensor_parallel"]
        temporary(self.base).mkdir()
        stock = Stock(model, self.base / "stock", ranks, self.flags, self.env)

        def look() -> None:
            self._note_memory(found, "stock")
            if not self.gpus:
                tree = workers_below(stock.tree())
                found.stock_private_bytes = private_bytes(tree, self.kv_bytes)

        rig.say(f"starting stock vLLM with {ranks} ranks, for its answers")
        gap_min = DEVICE_GAP_MIN if self.gpus else GAP_MIN
        done: tuple[list[Question], Expected] | None
        try:
            done = await stock.answers(rig.say, gap_min=gap_min, look=look)
        except UnderstudyError as error:
            if not self.gpus or error.code != "drill.no_answers":
                raise
            rig.say(f"the pod's own answers are compared: {error.message}")
            return True, None
        finally:
            shutil.rmtree(temporary(self.base))
        if done is None:
            return False, None
        found.questions, expected = done
        return True, expected

    async def _drill(
        self, model: Path, expected: Expected | None, found: Found
    ) -> DrillReport | None:
        """Drill a pod, and measure it."""
        config, base = self.config, self.base
        plan = DrillPlan(
            config["kills"],
            config["target"],
            config["clients"],
            expected,
            duration_s=config["duration_s"],
        )
        ranks = config["tensor_parallel"]
        more = () if self.adopts else ("--no-kv-adoption",)
        pod = make_pod(base, model, ranks, (*self.flags, *more), config["device_bytes"])
        if self.gpus:
            env = {**self.env, "UNDERSTUDY_WAKE": "manual"}  # it sleeps although requests wait
            size = config["device_bytes"] or WHOLE_DEVICE
            pod = replace(pod, memory="cuda", device_bytes=size, env=env)
        directory, seen = pod.directory, list[str]()

        async def look(target: Target) -> None:
            if self.gpus:
                seen.extend(await self._look_at_devices(drill, target, found))
            else:
                found.figures = await look_at(
                    directory, self.kv_bytes, found.stock_private_bytes, self.idle_s
                )

        rig.say(f"starting a pod of two vLLM engines in {directory}")
        runner = PodRunner(pod.containers(), directory / "log")
        drill = Drill(directory, plan, rig.say, runner)
        result = await run_drill(drill, look)
        if result is None or result.is_interrupted:
            return None
        problems = result.problems
        if not self.gpus:
            problems += problems_of(found.figures) if found.figures else ["nothing was measured"]
        problems += [*seen, *self._leftovers(base)]
        return result

    # ------------------------------------------------------------------ on GPUs

    def _note_memory(self, found: Found, when: str) -> None:
        """Bytes of each device in use, once they do not change."""
        if self.gpus:
            memory = found.devices.setdefault("memory", {})
            memory[f"with_{when}"] = [gpu.settled() for gpu in self.gpus]

    async def _look_at_devices(self, drill: Drill, target: Target, found: Found) -> list[str]:
        """Note what each engine takes of its device beside the shared weights; then sleep and wake
        under load. What is wrong, also of the self-tests."""
        self._note_memory(found, "pod")
        view = await gather(drill.directory)
        by_pid = {pid: size for gpu in self.gpus for pid, size in gpu.by_process().items()}
        for part in view["engines"]:
            role = "active" if part["engine"]["id"] == view["active"] else "standby"
            pids = {name: by_pid.get(pid) for name, pid in part["backend"]["pids"].items()}
            found.devices["memory"][role] = {name: size for name, size in pids.items() if size}
        said = (problem for part in view["engines"] for problem in part["problems"])
        problems = [problem for problem in said if "self-test" in problem]
        pod = await StandingPod.of(drill.directory, drill, target)
        try:
            sleeps = await across_sleeps(pod, SLEEPING_CLIENTS, SLEEPS)
        finally:
            await pod.close()
        found.devices |= {"sleeps": sleeps}
        return [*problems, *sleeps["problems"]]

    def _leftovers(self, base: Path) -> list[str]:
        """Files that a pod has left behind."""
        left = [name for name in os.listdir(leftovers.SHM) if leftovers.PREFIX in name]
        left += [
            str(path)
            for path in temporary(base).rglob("*")
            if not path.is_dir() and CACHE not in str(path)
        ]
        if not left:
            return []
        return [f"{len(left)} files were left behind: {', '.join(sorted(left)[:LEFT_SHOWN])}"]


@click.command()
@options(OPTIONS)
@click.argument("vllm_flags", metavar="[-- vLLM's flags]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--runner",
    type=click.Choice(v2_on_cpu.RUNNERS),
    help="vLLM's model runner, stock's and ours [default: what vLLM chooses on a GPU]",
)
@click.option("--device", metavar="UUIDS", help="Run on these GPUs, or on all.")
@click.option("--no-adoption", is_flag=True, help="Drill engines that adopt no KV blocks.")
@click.option(
    "--idle-s",
    type=float,
    help="How long to watch the idle standby's CPU [default: 300 s for each rank].",
)
@json_flag
def main(
    config: Resolved,
    vllm_flags: tuple[str, ...],
    runner: str | None,
    device: str | None,
    no_adoption: bool,
    idle_s: float | None,
    as_json: bool,
) -> None:
    """The drill with vLLM, compared with stock's answers."""
    gpus = gpus_of(device) if device else ()
    os.environ.update({} if gpus else v2_on_cpu.environment(runner))

    async def measure(base: Path) -> Figures | None:
        shown = gpus[: config["tensor_parallel"]]
        more = (vllm_flags, runner, shown)
        done = await Run(base, config, idle_s, not no_adoption, *more).everything()
        if done is None:
            return None
        report, found = done
        return {
            **report.to_dict(),
            "machine": rig.machine(),
            "vllm": found.to_dict(),
        }

    rig.finish(rig.run("understudy-vllm-", measure), is_json=as_json)


def gpus_of(asked: str) -> tuple[Nvml, ...]:
    """The GPUs of these UUIDs, or all.

    The process ends with a sentence if there are none.
    """
    devices, reason = find_devices([] if asked == "all" else asked.split(","), str(rig.ROOT))
    if not devices:
        sys.exit(f"nothing was measured, since {reason}")
    return tuple(Nvml(uuid, STILL_S) for uuid in devices)


if __name__ == "__main__":
    main()
