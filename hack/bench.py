"""`make bench`: what the parts cost, side by side in one run.

    python -m hack.bench [--json] [--kills N] [--sessions N]

The memory service alone: `python -m hack.bench_gms`. The lock beside its peers: `make bench-lock`.

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

from hack.bench_gms import SESSIONS, measure
from hack.bench_lock_trees import kill_to_grant
from hack.machine import machine

DIRTY_MIB = 256  # enough for the death of a process to take visibly longer than the grant


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
