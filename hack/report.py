"""What every report says: the machine that was measured, and percentiles."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from understudy import host

ROOT = Path(__file__).resolve().parent.parent


def machine() -> dict[str, Any]:
    """The machine, and how busy it was."""
    return {**host.machine(), "load_1min": os.getloadavg()[0]}


def commit() -> str:
    """The commit of this working tree; empty where git does not know it."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def spread(values_ms: Sequence[float], digits: int = 2) -> dict[str, float]:
    """p50, p99 and max, rounded."""
    values = [*values_ms] if len(values_ms) > 1 else [*values_ms] * 2
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    named = {"p50": cuts[49], "p99": cuts[98], "max": max(values)}
    return {name: round(value, digits) for name, value in named.items()}
