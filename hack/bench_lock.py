"""The lock server beside what people use today: one run, one machine, the same small processes.

    python -m hack.bench_lock [--json] [--quick] [--table FILE [--into PAGE]]

SIGKILL of the holder → the next waiter knows that it holds the lock; acquiring a lock that nobody
wants; very many waiters; memory and start. docs/benchmarks.md says what each contender does.
Contenders whose program is not installed are skipped, with the reason. Machines differ and are
shared: compare figures of one run with each other, not with another day's.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: the repository is where its neighbours are
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

from hack import bench_lock_crowd, bench_lock_rates
from hack.bench_lock_clients import ETCD_TTL_S, REDIS_PX_MS, REDIS_RETRY_S
from hack.bench_lock_race import Lane, race, race_apart
from hack.bench_lock_servers import Servers, missing, start_to_grant, versions
from hack.bench_lock_table import markdown, put_into, text
from hack.bench_lock_trees import spread
from hack.machine import machine
from lockserver.members.leases import LEASE_MS, MARGIN_MS

CONTENDERS = ("unix", "tcp", "flock", "flock_poll_100ms", "redis", "etcd")
VARIANTS = (
    *("unix_disk", "unix_python", "unix_supervisor", "unix_tree", "unix_handback"),
    *("tcp_handback", "flock_python"),
)
VARIANT_EVERY = 3  # rounds: what they add is a comparison, and their processes are slow to start
LEASED = ("tcp", "redis", "etcd")  # a kill leaves a lease that must run out
STARTED = ("unix", "redis", "etcd")
CROWD = 1000


def main() -> None:
    flags = _flags()
    if flags.table is not None:
        tables = markdown(json.loads(Path(flags.table).read_text()))
        put_into(flags.into, tables) if flags.into else print(tables)
        return
    report = measure(flags)
    print(json.dumps(report) if flags.json else text(report))


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the lock server beside its peers")
    parser.add_argument("--json", action="store_true", help="one document")
    parser.add_argument("--quick", action="store_true", help="a minute or so; the full run: five")
    parser.add_argument("--kills", type=int, help="of each contender without leases")
    parser.add_argument("--leased-kills", type=int, help="of each lane of those with leases")
    parser.add_argument("--lanes", type=int, default=6, help="locks of each contender with leases")
    parser.add_argument("--cycles", type=int, help="acquisitions of a free lock")
    parser.add_argument("--only", help="these contenders, separated by commas")
    parser.add_argument("--table", metavar="FILE", help="the Markdown table of a report, and end")
    parser.add_argument("--into", metavar="PAGE", help="between the marks in this page")
    flags = parser.parse_args()
    flags.kills = flags.kills or (30 if flags.quick else 150)
    flags.leased_kills = flags.leased_kills or (1 if flags.quick else 4)
    flags.cycles = flags.cycles or (200 if flags.quick else 1000)
    return flags


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """The whole report."""
    began = time.monotonic()
    wanted = flags.only.split(",") if flags.only else [*CONTENDERS, *VARIANTS]
    skipped = {name: why for name in wanted if (why := missing(name)) is not None}
    racers = [name for name in wanted if name not in skipped]
    report: dict[str, Any] = {
        "schema": 1,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": _settings(flags),
        "skipped": skipped,
    }
    took_ms = _races(racers, flags)
    spreads = {name: spread(values) for name, values in took_ms.items()}
    report["kill_to_grant_ms"] = {n: spreads.get(n) for n in CONTENDERS if n in wanted}
    report["kill_to_grant_variants_ms"] = {n: spreads[n] for n in VARIANTS if n in spreads}
    report["kills"] = {name: len(values) for name, values in took_ms.items()}
    report["times_slower_than_unix"] = _ratios(report["kill_to_grant_ms"])
    if flags.only is None:
        report["free_lock"] = bench_lock_rates.measure(flags.cycles)
        report["crowd"] = bench_lock_crowd.measure(CROWD, kills=10)
        report["start"] = _starts(2 if flags.quick else 10)
    report["took_s"] = round(time.monotonic() - began, 1)
    return report


def _races(racers: Sequence[str], flags: argparse.Namespace) -> dict[str, list[float]]:
    """The fast ones side by side, then those with leases: these wait, and would only disturb."""
    took_ms: dict[str, list[float]] = defaultdict(list)
    fast = [name for name in racers if name not in LEASED]
    leased = [name for name in racers if name in LEASED for _ in range(flags.lanes)]
    for names, run, rounds in ((fast, race, flags.kills), (leased, race_apart, flags.leased_kills)):
        if not names:
            continue
        with Servers() as servers, ExitStack() as stack:
            lanes = [
                Lane(name, servers.address(name, n), n, VARIANT_EVERY if name in VARIANTS else 1)
                for n, name in enumerate(names)
            ]
            for lane in lanes:
                stack.callback(lane.close)
            run(lanes, rounds)
            for lane in lanes:
                took_ms[lane.contender] += lane.took_ms
    return took_ms


def _ratios(spreads: dict[str, Any]) -> dict[str, Any]:
    """p50 and p99 of each contender over those of `unix`."""
    ours = spreads.get("unix")
    if ours is None:
        return {}
    others = {name: values for name, values in spreads.items() if name != "unix" and values}
    return {
        name: {key: round(values[key] / ours[key], 2) for key in ("p50", "p99")}
        for name, values in others.items()
    }


def _starts(rounds: int) -> dict[str, Any]:
    """From the command that starts a server to the first lock held, in turns."""
    took_ms: dict[str, list[float]] = defaultdict(list)
    rss_mib: dict[str, float] = {}
    names = [name for name in STARTED if missing(name) is None]
    for _ in range(rounds):
        for name in names:
            start_ms, rss_mib[name] = start_to_grant(name)
            took_ms[name].append(start_ms)
    return {
        "to_first_grant_ms": {name: spread(values) for name, values in took_ms.items()},
        "server_mib": {name: round(value, 1) for name, value in rss_mib.items()},
    }


def _settings(flags: argparse.Namespace) -> dict[str, Any]:
    return {
        "kills": flags.kills,
        "leased_kills": flags.leased_kills,
        "lanes": flags.lanes,
        "cycles": flags.cycles,
        "tcp_lease_ms": LEASE_MS,
        "tcp_lease_margin_ms": MARGIN_MS,
        "redis_px_ms": REDIS_PX_MS,
        "redis_retry_ms": REDIS_RETRY_S * 1000,
        "etcd_ttl_s": ETCD_TTL_S,
    }


if __name__ == "__main__":
    main()
