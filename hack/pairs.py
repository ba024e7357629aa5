"""Two commits in one run: a bench of each checkout in turns, and the medians side by side.

    python -m hack.pairs --base DIR [--rounds 3] bench_failover --kills 6

DIR is a checkout of the other commit with its own `.venv`, such as `git worktree add DIR HASH` and
`make -C DIR setup` make. Each checkout runs its own code of the bench. A figure that only one of
them has is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hack.rig import ROOT, machine, say, turns


def figures(found: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a bench's document, by its path."""
    if isinstance(found, dict):
        for name, each in found.items():
            if name != "machine":
                yield from figures(each, f"{path}.{name}" if path else name)
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield path, float(found)


def run_bench(checkout: Path, bench: str, flags: list[str]) -> dict[str, float]:
    """The figures of one run. A bench whose goals are missed has figures, too."""
    command = [str(checkout / ".venv/bin/python"), "-m", f"hack.{bench}", "--json", *flags]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise SystemExit(f"{checkout}: {bench} ended with {done.returncode}: {done.stderr[-2000:]}")
    return dict(figures(json.loads(done.stdout)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hack.pairs", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each commit")
    parser.add_argument("bench", help="a module of hack, such as bench_failover")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the bench")
    options = parser.parse_args()
    checkouts = {"base": options.base.resolve(), "now": ROOT}
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in checkouts}
    for number in range(options.rounds):
        for name, checkout in turns(number, checkouts.items()):
            say(f"round {number + 1} of {options.rounds}: {name}")
            for path, value in run_bench(checkout, options.bench, options.flags).items():
                found[name][path].append(value)
    both = {path: (found["base"][path], found["now"][path]) for path in found["base"]}
    table = {
        path: {
            "base": statistics.median(base),
            "now": statistics.median(now),
            "base_runs": base,
            "now_runs": now,
        }
        for path, (base, now) in both.items()
        if base and now
    }
    print(json.dumps({"bench": options.bench, "figures": table, "machine": machine()}, indent=1))


if __name__ == "__main__":
    main()
