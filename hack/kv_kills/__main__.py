"""Kill engines at every point of a step; no successor may believe a block that is not true.

    python -m hack.kv_kills [--backend reference] [--kills N] [--ranks N] [--point running]
        [--seed N] [--json] [-- the backend's flags]

A pod of two engines answers clients through its gateway. Again and again the active engine's
process kills itself at a chosen point of a step: when the step was sent, between two layers, when
it is done and not processed, between two stores to the index, when it was processed. Its successor
adopts what it can, audits it where the backend can (`--kv-audit`), and goes on with the streams;
every answer must be the one that an engine gave which was never killed. Exit code 1 if one is not,
if an audit found a block that is not what was published, or if nothing was adopted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from hack.kv_kills.pod import ARGUMENTS, SeamPod, Standing
from hack.kv_kills.seams import SEAMS, any_skip
from hack.processes import ProcessError
from hack.report import commit, machine, spread
from understudy.drill.clients import stream_without_pause
from understudy.drill.records import Exchange, Outcome, Prompt
from understudy.drill.verdict import classify
from understudy.up.random_model import RandomModel, make_random_model

CLIENTS = 4
FIRE_S = 20.0  # for a point to be passed so often
FIRE_POLL_S = 0.01
DETAIL_SHOWN = 200
AUDIT_FLAG = "--kv-audit"


@dataclass(slots=True)
class Kill:
    """One kill, and what the successor made of it. `torn`: blocks whose bytes are not those that
    were published; `whole_s`: until the pod could stand the next kill."""

    point: str
    rank: int
    skip: int
    engine: str
    adopted: int = 0
    torn: int = 0
    note: str = ""
    memory: str = ""
    whole_s: float = 0.0


@dataclass(slots=True)
class Found:
    """Everything that was seen."""

    kills: list[Kill] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def torn(self) -> int:
        return sum(each.torn for each in self.kills)

    @property
    def passed(self) -> bool:
        is_good = not self.wrong and not self.torn and not self.problem
        return is_good and sum(each.adopted for each in self.kills) > 0

    def to_dict(self) -> dict[str, Any]:
        by_point = {
            point: {
                "kills": len(mine),
                "adopted_blocks": sum(each.adopted for each in mine),
                "empty": sum(not each.adopted for each in mine),
            }
            for point in dict.fromkeys(each.point for each in self.kills)
            for mine in [[each for each in self.kills if each.point == point]]
        }
        return {
            "passed": self.passed,
            "problem": self.problem or None,
            "kills": len(self.kills),
            "adopted_blocks": sum(each.adopted for each in self.kills),
            "torn_blocks": self.torn,
            "answers": dict(self.outcomes),
            "wrong": self.wrong,
            "points": by_point,
            "why_empty": dict(Counter(each.note for each in self.kills if not each.adopted)),
            "whole_s": spread([each.whole_s for each in self.kills]) if self.kills else None,
            "each": [asdict(each) for each in self.kills],
        }


class Run:
    """`kills` kills of one pod."""

    def __init__(self, pod: SeamPod, backend: str, ranks: int, rng: Random) -> None:
        self._pod, self._backend, self._ranks, self._rng = pod, backend, ranks, rng
        self.found = Found()
        self._prompts: Sequence[Prompt] = ()
        self._answers: dict[str, Exchange] = {}

    async def kill(self, points: Sequence[str], kills: int) -> None:
        """Raises:
        ProcessError: the pod did not become whole, or a point was not passed.
        """
        standing = await self._pod.start()
        self._prompts, self._answers = await self._pod.learn(self._rng)
        say(f"{len(self._prompts)} questions; the KV memory is {dict(standing.kv)}")
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(self._ask(number, stopping))
            try:
                for number in range(kills):
                    point = points[number % len(points)]
                    standing = await self._once(point, standing)
                    say(f"{number + 1}/{kills}  {_line(self.found.kills[-1])}")
                    if self.found.wrong or self.found.torn:
                        return
            finally:
                stopping.set()

    async def _ask(self, number: int, stopping: asyncio.Event) -> None:
        prompts = list(self._prompts)
        Random(number).shuffle(prompts)
        await stream_without_pause(self._pod.target, prompts, 0, self._note, stopping)

    def _note(self, exchange: Exchange) -> None:
        outcome = classify(exchange, self._answers)
        self.found.outcomes[outcome.value] += 1
        if outcome is Outcome.WRONG:
            expected = self._answers[exchange.prompt].text
            said = f"{exchange.prompt}: {exchange.text!r} instead of {expected!r}"
            self.found.wrong.append(f"{said} {exchange.status} {exchange.detail[:DETAIL_SHOWN]}")

    async def _once(self, point: str, standing: Standing) -> Standing:
        rank = self._rng.randrange(self._ranks) if point == "running" else 0
        kill = Kill(point, rank, any_skip(self._rng, self._backend, point), standing.active)
        began_s = time.monotonic()
        self._pod.control.arm(kill.engine, point, kill.skip, rank)
        if not await self._fired():
            kill.skip = 0
            self._pod.control.arm(kill.engine, point, 0, rank)
            if not await self._fired():
                raise ProcessError(f"{kill.engine} was never at the point {point!r}")
        new = await self._pod.whole(standing.token)
        kill.whole_s = round(time.monotonic() - began_s, 1)
        kill.adopted = int(new.kv.get("adopted_blocks") or 0)
        kill.torn = int(new.kv.get("torn_blocks") or 0)
        kill.note, kill.memory = str(new.kv.get("note") or ""), str(new.kv.get("memory"))
        self.found.kills.append(kill)
        return new

    async def _fired(self) -> bool:
        end_s = time.monotonic() + FIRE_S
        while True:
            if self._pod.control.fired or time.monotonic() > end_s:
                return self._pod.control.fired > 0
            await asyncio.sleep(FIRE_POLL_S)


def _line(kill: Kill) -> str:
    where = kill.point + (f" on rank {kill.rank}" if kill.rank else "")
    took = f"whole after {kill.whole_s:g} s"
    blocks = f"{kill.adopted} adopted, {kill.torn} torn"
    return f"{kill.engine} {where} (+{kill.skip}): {blocks}, {took}  {kill.note}"


async def run(base: Path, flags: argparse.Namespace) -> Found:
    """One pod, and all of its kills; what was found when it ended, however it did."""
    random = RandomModel.of(flags.backend)
    model = await make_random_model(base / "model", random.shape)
    audit = () if flags.no_audit else (AUDIT_FLAG,)
    pod = SeamPod(base, model, flags.backend, flags.ranks, (*audit, *flags.flags))
    work = Run(pod, flags.backend, flags.ranks, Random(flags.seed))
    try:
        await work.kill(flags.point or [*SEAMS[flags.backend]], flags.kills)
    except ProcessError as error:
        work.found.problem = str(error)
    finally:
        await pod.stop()
    return work.found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hack.kv_kills", description="kill engines at every point of a step"
    )
    points = sorted({point for points in SEAMS.values() for point in points})
    parser.add_argument("--backend", choices=ARGUMENTS, default="reference")
    parser.add_argument("--kills", type=int, default=21, help="how many [default: %(default)s]")
    parser.add_argument("--ranks", type=int, default=1, help="devices [default: %(default)s]")
    parser.add_argument("--point", action="append", choices=points, help="repeatable; default: all")
    parser.add_argument(
        "--no-audit",
        action="store_true",
        help="publish no checksums: each of them is one more call to the workers of vLLM",
    )
    parser.add_argument("--seed", type=int, default=1, help="[default: %(default)s]")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("flags", nargs="*", metavar="-- flags", help="for the backend")
    return parser.parse_args()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    flags = parse()
    base = Path(tempfile.mkdtemp(prefix="kv-kills-"))
    began_s = time.monotonic()
    found = asyncio.run(run(base, flags))
    document = {
        "machine": machine(),
        "commit": commit(),
        "backend": flags.backend,
        "ranks": flags.ranks,
        "seed": flags.seed,
        "has_audit": not flags.no_audit,
        "took_s": round(time.monotonic() - began_s),
        **found.to_dict(),
    }
    if flags.json:
        print(json.dumps(document, indent=1))
    if found.passed:
        shutil.rmtree(base, ignore_errors=True)
    else:
        say(f"the logs of all parts are kept in {base}")
    for line in (*found.wrong, *filter(None, [found.problem])):
        say(f"error: {line}")
    say(
        f"{len(found.kills)} kills: {document['adopted_blocks']} blocks adopted,"
        f" {found.torn} torn, answers {dict(found.outcomes)}"
    )
    sys.exit(0 if found.passed else 1)


if __name__ == "__main__":
    main()
