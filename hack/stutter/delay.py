"""The preloaded library `delay.c`: built, and the environment that a command needs for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("delay.c")
MOST_MS = 60.0  # less than any heartbeat or budget that a test sets


def build(directory: Path) -> Path:
    library = directory / "delay.so"
    flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE), "-ldl"], check=True)
    directory.chmod(0o755)  # tests drop their privileges
    return library


def environment(library: Path, who: str, percent: float, most_ms: float) -> dict[str, str]:
    return {
        "LD_PRELOAD": str(library),
        "STUTTER_WHO": who,
        "STUTTER_PERCENT": str(percent),
        "STUTTER_MOST_MS": str(most_ms),
    }
