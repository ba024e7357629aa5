"""Let every system call of the pod that makes a descriptor, process, thread or file fail once.

    python -m tests.sweep_faults [--phase grant] [--process lockserver] [--kind descriptor]
        [--site TEXT] [--sample N] [--json]

Starts a pod with the reference backend, records which calls its processes make at rest and while
something happens, and lets each of them fail once: EMFILE, EAGAIN or ENOSPC. After each, the pod
must be whole by itself within 30 s, or its status must name a problem; and the next death of the
active engine must lead to a takeover. Exit code 1 if any case fails.

The command that repeats a single case is printed with its result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plumbing.pod.cli import INTERRUPTED
from tests.sweep_faults.phases import PHASES
from tests.sweep_faults.pod import ROLES
from tests.sweep_faults.shim import KINDS, SweepError, build
from tests.sweep_faults.sweep import Case, Outcome, Sweep, Verdict, chosen
from tests.vllm.about import commit, machine
from understudy.up.models import make_random_model

DEADLINE_S = 30.0
SITE_SHOWN = 150
ERRORS_SHOWN = 8
SAMPLE_SEED = 1
UNEXPECTED = "Exception in callback"  # what asyncio says of an error that reached the loop


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sweep_faults", description="each system call of the pod fails once"
    )
    parser.add_argument("--phase", action="append", choices=PHASES, help="repeatable; default: all")
    parser.add_argument("--process", default="", choices=ROLES, help="default: all")
    parser.add_argument("--kind", default="", choices=KINDS, help="what there is no more of")
    parser.add_argument("--site", default="", help="only sites with this text")
    parser.add_argument("--sample", type=int, default=0, help="that many cases, chosen at random")
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S, help="to be whole again")
    parser.add_argument("--list", action="store_true", help="print the cases, run none")
    parser.add_argument("--json", action="store_true", help="the report on stdout, as JSON")
    return parser.parse_args()


async def cases_of(sweep: Sweep, flags: argparse.Namespace) -> list[Case]:
    """The cases that the flags choose, in the order of the phases; each call in the first phase in
    which it is made."""
    if flags.site and flags.process and flags.kind and len(flags.phase or ()) == 1:
        return [Case(flags.phase[0], flags.process, flags.kind, flags.site)]
    found: list[Case] = []
    swept: set[tuple[str, str, str]] = set()
    for phase in flags.phase or PHASES:
        recorded = [each for each in await sweep.sites(phase) if each.place not in swept]
        swept.update(each.place for each in recorded)
        found += chosen(recorded, flags.process, flags.kind, flags.site)
    if flags.sample and flags.sample < len(found):
        kept = random.Random(SAMPLE_SEED).sample(range(len(found)), flags.sample)
        found = [found[number] for number in sorted(kept)]
    return found


async def _run(directory: Path, flags: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """Run the cases that the flags choose; Ctrl-C leaves the outcomes so far."""
    model = await make_random_model(directory / "model")
    sweep = Sweep(directory, model, build(directory), flags.deadline_s, _say)
    try:
        cases = await cases_of(sweep, flags)
        for number, case in enumerate(cases, 1):
            if flags.list:
                print(case.flags())
                continue
            outcome = await sweep.run(case)
            if outcome.verdict is Verdict.NOT_REACHED and case.nearer() != case:
                outcome = await sweep.run(case.nearer())
            outcomes.append(outcome)
            _say(f"{number}/{len(cases)}  {line_of(outcome)}")
            _say_more(outcome)
    except SweepError as error:
        _say(f"error: {error}")
    finally:
        await sweep.close()


def line_of(outcome: Outcome) -> str:
    """One line for one case."""
    case = outcome.case
    took = f"{outcome.whole_ms:.0f} ms" if outcome.whole_ms is not None else "-"
    cost = f"  [{'; '.join(outcome.cost)}]" if outcome.cost else ""
    where = f"{case.phase} {case.role} {case.kind} {case.site[:SITE_SHOWN]}"
    return f"{outcome.verdict.value:<11} {took:>8}  {where}{cost}"


def _say_more(outcome: Outcome) -> None:
    """What failed and how to repeat it; of a whole pod, only exceptions that nobody expected."""
    if outcome.verdict in (Verdict.WHOLE, Verdict.NOT_REACHED):
        for line in outcome.errors:
            if UNEXPECTED in line:
                _say(f"      {line}")
        return
    for line in (outcome.detail, *outcome.named, *outcome.errors[:ERRORS_SHOWN]):
        _say(f"      {line}")
    _say(f"      {outcome.case.flags()}")


def report(outcomes: list[Outcome], took_s: float) -> dict[str, Any]:
    """The document of `--json`."""
    return {
        "machine": machine(),
        "commit": commit(),
        "took_s": round(took_s),
        "cases": len(outcomes),
        "verdicts": dict(Counter(each.verdict.value for each in outcomes)),
        "outcomes": [{**asdict(each), "repeat": each.case.flags()} for each in outcomes],
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    flags = _flags()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sweep-") as directory:
        outcomes: list[Outcome] = []
        is_interrupted = False
        try:
            asyncio.run(_run(Path(directory), flags, outcomes))
        except KeyboardInterrupt:
            is_interrupted = True
    if flags.list:
        return
    found = report(outcomes, time.monotonic() - began_s)
    _say(f"{found['cases']} cases in {found['took_s']} s: {found['verdicts']}")
    if flags.json:
        print(json.dumps(found, indent=1))
    if is_interrupted:
        sys.exit(INTERRUPTED)
    if not outcomes or not all(each.verdict.passes for each in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
