"""Asks `understudy doctor`, in this process and as people run it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.documents import mismatches
from tests.helpers import run_command
from understudy.doctor import CHECKS, Finding, look
from understudy.schema import DoctorDocument

FAIL, WARN, PASS, SKIP = "fail", "warn", "pass", "skip"


def examined(directory: str) -> dict[str, Finding]:
    """What every check finds, by its id."""
    pod = asyncio.run(look(Path(directory), os.environ))
    return {judge.__name__: judge(pod) for judge in CHECKS.values()}


def doctor(
    *flags: str, before: Sequence[str] = (), **env: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """The command as people run it: its exit code and the checks of its document, by id."""
    done = run_command(
        [*before, sys.executable, "-m", "understudy.cli.main", "doctor", "--json", *flags],
        env={**os.environ, **env},
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert mismatches(document, DoctorDocument) == []
    return done.returncode, {each["id"]: each for each in document["checks"]}
