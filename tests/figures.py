"""What the reports of the long runs say about where they were made."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn

from understudy import host

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, Any]


def commit() -> str:
    """The commit of this working tree; empty where git does not know it."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> dict[str, Any]:
    """The machine, and how busy it was."""
    return {**host.machine(), "load_1min": os.getloadavg()[0]}


def document(figures: Figures, problems: Sequence[str]) -> Figures:
    """What is committed: the figures, whether the run passed, and what it ran on."""
    about = {"problems": list(problems), "commit": commit(), "machine": machine()}
    return {"passed": not problems, **figures, **about}


def report(measure: Callable[[Path], Coroutine[Any, Any, Figures]]) -> NoReturn:
    """Print the document that `measure` makes below a new directory, and exit with its verdict."""
    with tempfile.TemporaryDirectory(prefix="us-") as base:
        found = asyncio.run(measure(Path(base)))
    print(json.dumps(found, indent=1))
    sys.exit(0 if found["passed"] else 1)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
