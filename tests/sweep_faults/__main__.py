"""Let every system call of the pod that makes a descriptor, process, thread or file fail once.

    python -m tests.sweep_faults [--phase grant] [--process lockserver] [--kind descriptor]
        [--site TEXT] [--json]

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
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from plumbing.pod.cli import INTERRUPTED
from tests.figures import commit, machine
from tests.sweep_faults.phases import PHASES
from tests.sweep_faults.pod import ROLES
from tests.sweep_faults.shim import KINDS, SweepError, build
from tests.sweep_faults.sweep import Case, Outcome, Sweep, Verdict
from understudy.up.models import make_random_model

DEADLINE_S = 30.0
SITE_SHOWN, ERRORS_SHOWN = 150, 8
UNEXPECTED = "Exception in callback"  # what asyncio says of an error that reached the loop


async def cases_of(sweep: Sweep, flags: argparse.Namespace) -> list[Case]:
    """The cases that the flags choose, in the order of the phases; each call in the first phase in
    which it is made."""
    if flags.site and flags.process and flags.kind and len(flags.phase) == 1:
        return [Case(flags.phase[0], flags.process, flags.kind, flags.site)]
    found: dict[tuple[str, str, str], Case] = {}
    for phase in flags.phase:
        for each in await sweep.sites(phase):
            found.setdefault(each.place, each)
    return [
        each
        for each in found.values()
        if flags.process in ("", each.role)
        and flags.kind in ("", each.kind)
        and flags.site in each.site
    ]


async def _run(directory: Path, flags: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """Run the cases that the flags choose; Ctrl-C leaves the outcomes so far."""
    model = await make_random_model(directory / "model")
    sweep = Sweep(directory, model, build(directory), DEADLINE_S, _say)
    try:
        cases = await cases_of(sweep, flags)
        for number, case in enumerate(cases, 1):
            outcome = await sweep.run(case)
            if outcome.verdict is Verdict.NOT_REACHED and case.nearer() != case:
                outcome = await sweep.run(case.nearer())
            outcomes.append(outcome)
            head, *more = lines_of(outcome)
            _say(f"{number}/{len(cases)}  {head}")
            for line in more:
                _say(f"      {line}")
    except SweepError as error:
        _say(f"error: {error}")
    finally:
        await sweep.close()


def lines_of(outcome: Outcome) -> list[str]:
    """The case; what failed and how to repeat it. Of a whole pod, only exceptions that nobody
    expected."""
    case = outcome.case
    took = f"{outcome.whole_ms:.0f} ms" if outcome.whole_ms is not None else "-"
    cost = f"  [{'; '.join(outcome.cost)}]" if outcome.cost else ""
    where = f"{case.phase} {case.role} {case.kind} {case.site[:SITE_SHOWN]}"
    head = f"{outcome.verdict.value:<11} {took:>8}  {where}{cost}"
    if outcome.verdict in (Verdict.WHOLE, Verdict.NOT_REACHED):
        return [head, *(line for line in outcome.errors if UNEXPECTED in line)]
    errors = outcome.errors[:ERRORS_SHOWN]
    return [head, outcome.detail, *outcome.named, *errors, case.flags()]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sweep_faults", description="each system call of the pod fails once"
    )
    parser.add_argument("--phase", action="append", choices=PHASES, help="repeatable; default: all")
    parser.add_argument("--process", default="", choices=ROLES, help="default: all")
    parser.add_argument("--kind", default="", choices=KINDS, help="what there is no more of")
    parser.add_argument("--site", default="", help="only sites with this text")
    parser.add_argument("--json", action="store_true", help="the report on stdout, as JSON")
    flags = parser.parse_args()
    flags.phase = flags.phase or [*PHASES]
    began_s, is_interrupted = time.monotonic(), False
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="sweep-") as directory:
        try:
            asyncio.run(_run(Path(directory), flags, outcomes))
        except KeyboardInterrupt:
            is_interrupted = True
    verdicts = dict(Counter(each.verdict.value for each in outcomes))
    head = {"took_s": round(time.monotonic() - began_s), "cases": len(outcomes)}
    _say(f"{head['cases']} cases in {head['took_s']} s: {verdicts}")
    if flags.json:
        each = [{**asdict(each), "repeat": each.case.flags()} for each in outcomes]
        about = {"machine": machine(), "commit": commit(), **head, "verdicts": verdicts}
        print(json.dumps({**about, "outcomes": each}, indent=1))
    if is_interrupted:
        sys.exit(INTERRUPTED)
    if not outcomes or not all(each.verdict.passes for each in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
