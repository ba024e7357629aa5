"""What all benches share: their arguments, pods, turns, deadlines, logs, and the JSON document.

A bench is one module: a `measure` that fills a document, and a `main` of a few lines. Machines
differ and are shared, so compare figures of one run with each other, and two commits only by runs
in turns (`python -m hack.pairs`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from plumbing.errors import UnderstudyError, WaitTimeoutError
from plumbing.pod.cli import INTERRUPTED, fail, run_async
from understudy import host
from understudy.drill.clients import clock
from understudy.drill.killer import Whole, wait_whole
from understudy.pod.runner import PodRunner, run_pod
from understudy.pod.table import Container

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")
Figures = dict[str, Any]

POLL_S = 0.02
WHOLE_S, WHOLE_POLL_S = 600.0, 0.2  # a status of all parts takes CPU from an engine that starts
# Every death is the bench's, also where others use the machine: that is not what is measured.
PATIENT = {"UNDERSTUDY_HANG_MS": "60000", "UNDERSTUDY_HANG_ALONE_MS": "60000"}
DEATHS_MAX = "1000"


def machine() -> dict[str, Any]:
    """The machine, and how busy it was."""
    return {**host.machine(), "load_1min": os.getloadavg()[0]}


def commit() -> str:
    """The commit of this working tree; empty where git does not know it."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def spread(values_ms: Sequence[float], digits: int = 2) -> dict[str, float]:
    """p50, p99 and max, rounded."""
    values = [*values_ms] if len(values_ms) > 1 else [*values_ms] * 2
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    named = {"p50": cuts[49], "p99": cuts[98], "max": max(values)}
    return {name: round(value, digits) for name, value in named.items()}


class Interrupted(Exception):
    """A signal ended a pod."""


def arguments(name: str, about: str) -> argparse.ArgumentParser:
    """The parser of the bench NAME, with the flags that every bench has."""
    parser = argparse.ArgumentParser(prog=f"python -m hack.{name}", description=about)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--quick", action="store_true", help="a few rounds: shows that it runs")
    return parser


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def turns(number: int, kinds: Iterable[T]) -> list[T]:
    """The order of round `number`: reversed every second time, so that whatever else the machine
    does affects all kinds alike."""
    order = list(kinds)
    return order[::-1] if number % 2 else order


def document(figures: Figures, problems: Sequence[str]) -> Figures:
    """What is committed: the figures, whether the run passed, and what it ran on."""
    return {
        "passed": not problems,
        **figures,
        "problems": list(problems),
        "commit": commit(),
        "machine": machine(),
    }


def run(prefix: str, measure: Callable[[Path], Awaitable[Figures | None]]) -> Figures:
    """What `measure` finds below a new directory, which is removed if that has `passed`. The
    process ends if `measure` fails or is interrupted."""
    base = Path(tempfile.mkdtemp(prefix=prefix))
    found: Figures | None = None

    async def body() -> Figures | None:
        try:
            return await measure(base)
        except Interrupted:
            return None

    try:
        found = run_async(body)
    except UnderstudyError as error:
        fail(error)
    finally:
        if found is not None and found["passed"]:
            shutil.rmtree(base, ignore_errors=True)
        else:
            say(f"the logs of all parts are kept in {base}")
    if found is None:
        sys.exit(INTERRUPTED)
    return found


def finish(found: Figures, *, is_json: bool) -> NoReturn:
    """Print the document and exit with its verdict."""
    if is_json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(lines(found)))
    for problem in found["problems"]:
        say(f"problem: {problem}")
    sys.exit(0 if found["passed"] else 1)


def lines(figures: Figures, indent: str = "") -> list[str]:
    """The figures for people: a line each, groups indented."""
    shown: list[str] = []
    for name, value in figures.items():
        if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
            shown += [f"{indent}{name}", *lines(value, f"{indent}  ")]
        elif name not in ("machine", "problems"):
            shown.append(f"{indent}{name:<{34 - len(indent)}} {value}")
    return shown


async def with_pod(
    containers: Sequence[Container],
    log: Path,
    body: Callable[[PodRunner], Awaitable[T]],
) -> T:
    """`body` while the containers run, which log below `log`.

    Raises:
        Interrupted: by a signal.
        UnderstudyError: a container or `body` failed.
    """
    done = list[T]()
    runner = PodRunner(list(containers), log)

    async def run() -> bool:
        done.append(await body(runner))
        return True

    if not await run_pod(runner, run, say):
        raise Interrupted
    return done[0]


async def whole_after(directory: Path, token: int) -> Whole:
    """Once the pod in `directory` has a standby and an active engine under a newer token.

    Raises:
        TimeoutError: it has not within `WHOLE_S`.
    """
    async with asyncio.timeout(WHOLE_S):
        while True:
            whole = await wait_whole(directory, say, WHOLE_S, poll_s=WHOLE_POLL_S)
            if whole.token > token:
                return whole
            await asyncio.sleep(WHOLE_POLL_S)


async def until(
    missing: Callable[[], Awaitable[str]], what: str, deadline_s: float, every_s: float = POLL_S
) -> float:
    """Poll until nothing is missing; a part that does not answer is missing. How long it took, in
    ms.

    Raises:
        WaitTimeoutError: `bench.late`, with what is missing.
    """
    began_ms, why = clock.now_ms(), "nobody answers"
    while True:
        with contextlib.suppress(UnderstudyError):
            why = await missing()
            if not why:
                return clock.now_ms() - began_ms
        if clock.now_ms() - began_ms > 1000 * deadline_s:
            raise WaitTimeoutError("bench.late", f"no {what} within {deadline_s:g} s: {why}")
        await asyncio.sleep(every_s)
