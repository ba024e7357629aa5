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
    runs: dict[str, list[dict[str, float]]] = {"base": [], "now": []}
    for number in range(options.rounds):
        for name in turns(number, runs):
            say(f"round {number + 1} of {options.rounds}: {name}")
            checkout = ROOT if name == "now" else options.base.resolve()
            runs[name].append(run_bench(checkout, options.bench, options.flags))
    table: dict[str, dict[str, Any]] = {}
    measured = (set(each) for found in runs.values() for each in found)
    for path in sorted(set.intersection(*measured)):
        values = {name: [each[path] for each in found] for name, found in runs.items()}
        table[path] = {name: statistics.median(found) for name, found in values.items()}
        table[path] |= {f"{name}_runs": found for name, found in values.items()}
    print(json.dumps({"bench": options.bench, "figures": table, "machine": machine()}, indent=1))


if __name__ == "__main__":
    main()
