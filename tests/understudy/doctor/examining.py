"""Asks `understudy doctor`, in this process and as people run it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.documents import mismatches
from tests.e2e.processes import free_offset
from tests.helpers import free_ports
from understudy.doctor.checks import CHECKS
from understudy.doctor.pod import Finding, look
from understudy.pod.ports import Ports
from understudy.schema import DoctorDocument

FAIL, WARN, PASS, SKIP = "fail", "warn", "pass", "skip"


def ports_of(first: int) -> Ports:
    return Ports(first, first + 1, first + 2, first + 3, (first + 4, first + 5))


def examined(directory: str, ports: Ports | None = None) -> dict[str, Finding]:
    """What every check finds, by its id."""
    ports = ports or ports_of(free_ports(5))
    pod = asyncio.run(look(Path(directory), ports, os.environ))
    return {judge.__name__: judge(pod) for _, judge in CHECKS}


def doctor(
    *flags: str, before: Sequence[str] = (), **env: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """The command as people run it: its exit code and the checks of its document, by id."""
    moved = f"--port-offset={free_offset()}"
    done = subprocess.run(
        [*before, sys.executable, "-m", "understudy.cli.main", "doctor", "--json", moved, *flags],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert mismatches(document, DoctorDocument) == []
    return done.returncode, {each["id"]: each for each in document["checks"]}
