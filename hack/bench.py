"""`make bench`: what the parts cost, side by side in one run.

    python -m hack.bench [--json] [--kills N] [--sessions N]

The memory service alone: `python -m hack.bench_gms`.

Machines differ and are shared: compare figures of one run with each other, not with another day's.
The whole failover is measured by `understudy drill`.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: the repository is where its neighbours are
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import os
import platform
from typing import Any

from hack.bench_gms import SESSIONS, measure
from hack.bench_lock import kill_to_grant

DIRTY_MIB = 256  # enough for the death of a process to take visibly longer than the grant


def machine() -> dict[str, Any]:
    """What a reader of the figures must know of the machine."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="what the parts cost")
    parser.add_argument("--json", action="store_true", help="one line")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    flags = parser.parse_args()
    report = {
        "machine": machine(),
        "lock": [kill_to_grant(flags.kills), kill_to_grant(flags.kills // 5, DIRTY_MIB)],
        "gms": measure(flags.sessions),
    }
    print(json.dumps(report, indent=None if flags.json else 2))


if __name__ == "__main__":
    main()
