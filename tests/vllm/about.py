"""What the reports of the long runs say about where they were made."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from understudy import host

ROOT = Path(__file__).resolve().parents[2]


def commit() -> str:
    """The commit of this working tree; empty where git does not know it."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> dict[str, Any]:
    """The machine, and how busy it was."""
    return {**host.machine(), "load_1min": os.getloadavg()[0]}
