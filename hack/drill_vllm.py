"""`make drill-vllm`: the drill with vLLM, its tokens compared with those of stock vLLM.

    python -m hack.drill_vllm [the drill's flags] [--runner v1|v2] [--json]
        [-- vLLM's flags]

Makes a random model, gets the answers to prompts that rounding cannot change from a stock server,
then drills a pod of two engines with those answers and measures what the pod takes of the machine.
The report is the drill's own; `--json` has the same keys and, under `vllm`, the figures.

The prompts are long and most share their beginning, so that blocks of the KV cache are published
and adopted. With `--kv-compare` a second pod, whose engines adopt none, is drilled in the same way;
what the pod takes of the machine is not measured then.

What other vLLM servers of this machine leave in /dev/shm meanwhile counts as the pod's. To keep it
apart: `unshare --mount sh -c 'mount -t tmpfs none /dev/shm && exec python -m hack.drill_vllm'`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.supervisor import leftovers
from hack import v2_on_cpu
from hack.rig import machine
from hack.vllm.figures import Figures, look_at, private_bytes, workers_below
from hack.vllm.pod import environment, make_pod, model_of, temporary
from hack.vllm.stock import Question, Stock
from plumbing.errors import UnderstudyError, UsageError
from plumbing.pod.cli import INTERRUPTED, fail, run_async
from plumbing.service.config import Option, Resolved, resolve
from plumbing.text import size
from understudy.cli.settings import DRILL_OPTIONS
from understudy.drill.clients import Target
from understudy.drill.page import check_destination
from understudy.drill.report import print_report
from understudy.drill.run import LENT_KV, NO_ADOPTION, Drill, DrillPlan
from understudy.pod.runner import PodRunner
from understudy.up.models import VLLM_RANDOM_MODEL
from understudy.up.pods import Say
from understudy.up.sessions import DrillResult, compare_adoption, run_drill

DEFAULTS: Mapping[str, Any] = {"kills": 15, "target": ("api", "core", "worker")}
TAKEN = (
    "model",
    "device_bytes",
    "tensor_parallel",
    "kills",
    "target",
    "clients",
    "expected",
    "report",
    "burn",
    "duration_s",
)
OPTIONS: tuple[Option, ...] = tuple(
    replace(option, default=DEFAULTS.get(option.name, option.default))
    for option in DRILL_OPTIONS
    if option.name in TAKEN
)

NO_ADOPTING = (*LENT_KV, *NO_ADOPTION)
KV_FLAG = "--kv-cache-memory-bytes"
LEFT_SHOWN = 5
# Headers that torch compiles once; they are there wherever its cache is.
CACHE = "/torchinductor_"


@dataclass(slots=True)
class Found:
    """What was measured besides the drill's own report."""

    runner: str
    questions: Sequence[Question] = ()
    stock_private_bytes: int | None = None
    figures: Figures | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "runner": self.runner,
            "prompts_compared_with_stock": len(self.questions),
            "smallest_gap": min((question.gap for question in self.questions), default=None),
            **(self.figures.to_dict() if self.figures else {}),
        }


@dataclass(frozen=True, slots=True)
class Run:
    """One drill: what to start and how; all its files are in the directory `base`."""

    base: Path
    config: Resolved
    idle_s: float | None
    compares_kv: bool
    vllm_flags: tuple[str, ...]
    runner: str | None
    say: Say

    @property
    def flags(self) -> tuple[str, ...]:
        """vLLM's, for stock and for ours; the last of duplicates counts."""
        return (*VLLM_RANDOM_MODEL.arguments, *self.vllm_flags)

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

    async def everything(self) -> tuple[DrillResult, Found] | None:
        """None: interrupted."""
        _ = self.kv_bytes  # refused before anything starts
        model = await model_of(self.base, self.config["model"])
        found = Found(v2_on_cpu.name_of(self.runner))
        expected = self.config["expected"]
        if expected is None:
            expected = self.base / "expected.json"
            if not await self._ask_stock(model, expected, found):
                return None
        if not self.compares_kv:
            result = await self._drill(model, Path(expected), found)
        else:
            result = await compare_adoption(
                partial(self._drill, model, Path(expected), None, "kept", LENT_KV),
                partial(self._drill, model, Path(expected), None, "empty", NO_ADOPTING),
                self.say,
            )
        return (result, found) if result is not None else None

    async def _ask_stock(self, model: Path, file: Path, found: Found) -> bool:
        """Write the expected answers into `file`; False: interrupted."""
        ranks = self.config["tensor_parallel"]
        temporary(self.base).mkdir()
        env = environment(self.base)
        stock = Stock(model, self.base / "stock", ranks, self.flags, env)

        def look() -> None:
            found.stock_private_bytes = private_bytes(workers_below(stock.tree()), self.kv_bytes)

        self.say(f"starting stock vLLM with {ranks} ranks, for its answers")
        # Short answers to short prompts fill no block, so no KV cache would be adopted.
        questions = await stock.write_answers(file, self.say, is_long=True, look=look)
        shutil.rmtree(temporary(self.base))
        found.questions = questions or ()
        return questions is not None

    async def _drill(
        self,
        model: Path,
        expected: Path,
        found: Found | None,
        name: str = "",
        more: tuple[str, ...] = (),
    ) -> DrillResult | None:
        """A pod in the directory `name`, with `more` of our own flags; `found`: measured in it."""
        config, before, base = self.config, leftovers.there_now(), self.base / name
        base.mkdir(exist_ok=True)
        plan = DrillPlan(
            config["kills"],
            config["target"],
            config["clients"],
            expected,
            burn=config["burn"],
            duration_s=config["duration_s"],
        )
        ranks = config["tensor_parallel"]
        pod = make_pod(base, model, ranks, (*self.flags, *more), config["device_bytes"])
        directory = pod.directory

        async def look(target: Target) -> None:
            if found is None:
                return
            found.figures = await look_at(
                directory, self.kv_bytes, found.stock_private_bytes, self.idle_s
            )

        self.say(f"starting a pod of two vLLM engines in {directory}")
        runner = PodRunner(pod.containers(), directory / "log")
        drill = Drill(directory, plan, self.say)
        result = await run_drill(drill, runner, plan, self.say, look)
        if result is not None:
            problems = result.report.problems
            if found is not None:
                problems += found.figures.problems() if found.figures else ["nothing was measured"]
            problems += self._leftovers(before, base)
        return result

    def _leftovers(self, before: frozenset[leftovers.Name], base: Path) -> list[str]:
        """Files that the pod has left behind; those that other processes hold do not count."""
        new = leftovers.there_now() - before
        left = [name.path for name in new - leftovers.still_held(new)]
        left += [
            str(path)
            for path in temporary(base).rglob("*")
            if not path.is_dir() and CACHE not in str(path)
        ]
        if not left:
            return []
        return [f"{len(left)} files were left behind: {', '.join(sorted(left)[:LEFT_SHOWN])}"]


def main() -> None:
    flags = _parser().parse_args()
    given = {option.name: getattr(flags, option.name) for option in OPTIONS}
    try:
        config = resolve(OPTIONS, given, os.environ)
        page = Path(config["report"]) if config["report"] else None
        if page is not None:
            check_destination(page)
    except UnderstudyError as error:
        fail(error)
    base = Path(tempfile.mkdtemp(prefix="understudy-vllm-"))

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    done = None
    try:
        os.environ.update(v2_on_cpu.environment(flags.runner))
        run = Run(
            base,
            config,
            flags.idle_s,
            flags.kv_compare,
            tuple(flags.vllm),
            flags.runner,
            say,
        )
        done = run_async(run.everything)
    finally:
        if done is not None and done[0].report.passed:
            shutil.rmtree(base, ignore_errors=True)
        else:
            say(f"the logs of all parts are kept in {base}")
    if done is None:
        sys.exit(INTERRUPTED)
    show(*done, as_json=flags.json)
    if page is not None:
        done[0].write_page(page, done[0].backend or "vllm")
        say(f"the report is in {page}")
    sys.exit(0 if done[0].report.passed else 1)


def show(result: DrillResult, found: Found, *, as_json: bool) -> None:
    """Print the drill's own report, and what was measured besides."""
    backend = result.backend or "vllm"
    if as_json:
        document = {**result.report.to_dict(backend, machine()), "vllm": found.to_dict()}
        print(json.dumps(document))
    else:
        from rich.console import Console

        console = Console()
        for line in _lines(found):
            console.print(line, highlight=False)
        print_report(result.report, console, backend, result.usages)
    for problem in result.report.problems:
        print(f"error: {problem}", file=sys.stderr)


def _lines(found: Found) -> list[str]:
    lines = [f"answers          {len(found.questions)} prompts, compared with stock vLLM"]
    figures = found.figures
    if figures is not None:
        lines += [
            f"weights          {size(figures.weights_committed_bytes)} committed, "
            f"{size(figures.weights_pss_bytes)} of memory in all processes together",
            f"engines          {size(figures.active_pss_bytes)} active (KV cache "
            f"{size(figures.active_kv_resident_bytes)}), {size(figures.standby_pss_bytes)} standby "
            f"(KV cache {size(figures.standby_kv_resident_bytes)})",
            f"idle standby     {figures.standby_cpu_percent:.1f} % of a core",
        ]
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hack.drill_vllm",
        description="the drill with vLLM, compared with stock's answers",
    )
    for option in OPTIONS:
        many: dict[str, Any] = {"action": "append"} if option.many else {}
        text = f"{option.help} [default: {option.default}]"
        parser.add_argument(option.flag, dest=option.name, help=text, **many)
    parser.add_argument(
        "--runner",
        choices=v2_on_cpu.RUNNERS,
        help="vLLM's model runner, stock's and ours [default: what vLLM chooses on a GPU]",
    )
    parser.add_argument(
        "--kv-compare",
        action="store_true",
        help="use long prompts, and drill a second pod whose engines adopt no KV blocks",
    )
    parser.add_argument(
        "--idle-s",
        type=float,
        help="how long to watch the idle standby's CPU [default: 300 s for each rank]",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("vllm", nargs="*", metavar="-- vLLM's flags", help="for stock and for ours")
    return parser


if __name__ == "__main__":
    main()
