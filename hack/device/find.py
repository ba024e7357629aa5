"""Finds the GPUs to check, without opening the driver in this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

PROGRAM = (
    "import sys; from gms.server.devices import devices_to_serve; from plumbing.errors import *\n"
    "try: print(*devices_to_serve([w for w in sys.argv[1:] if w]))\n"
    "except UnderstudyError as error: sys.exit(error.message)"
)


def find_devices(wanted: Sequence[str], root: str) -> tuple[list[str], str]:
    """The UUIDs of the devices to check, or none and the reason. `root` is the repository."""
    words = [sys.executable, "-c", PROGRAM, *wanted]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        return [], done.stderr.strip().rpartition("\n")[2]
    return done.stdout.split(), ""
