"""The lock server beside its peers: one run, one machine, equally small processes.

    python -m hack.bench_lock [--json] [--quick] [--table FILE [--into PAGE]]

SIGKILL of the holder → the next waiter knows that it holds the lock; acquiring a free lock; very
many waiters; memory and start. docs/benchmarks.md describes each contender. A contender that is not
installed, does not start or fails on the way is skipped, with the reason. Machines differ and are
shared: compare the figures of one run with each other, not with another day's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from hack.bench_lock import crowd, free_lock
from hack.bench_lock.clients import ETCD_TTL_S, REDIS_PX_MS, REDIS_RETRY_S
from hack.bench_lock.race import Lane, race, race_apart
from hack.bench_lock.servers import Servers, missing, versions
from hack.bench_lock.table import markdown, put_into, text
from hack.processes import ProcessError
from hack.report import machine, spread
from lockserver.members.leases import LEASE_MS, MARGIN_MS

T = TypeVar("T")

CONTENDERS = ("unix", "tcp", "flock", "flock_poll_100ms", "redis", "etcd")
VARIANTS = (
    *("unix_disk", "unix_python", "unix_supervisor", "unix_tree", "unix_handback"),
    *("tcp_handback", "flock_python"),
)
VARIANT_EVERY = 3  # rounds: they add a comparison, and their processes are slow to start
LEASED = ("tcp", "redis", "etcd")  # a kill leaves a lease that must run out
CROWD, CROWD_KILLS = 1000, 10


def main() -> None:
    flags = _flags()
    if flags.table is not None:
        tables = markdown(json.loads(Path(flags.table).read_text()))
        put_into(flags.into, tables) if flags.into else print(tables)
        return
    report = Bench(flags).measure()
    print(json.dumps(report) if flags.json else text(report))


def _flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the lock server beside its peers")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--quick", action="store_true", help="about a minute instead of five")
    parser.add_argument("--kills", type=int, help="of each contender without leases")
    parser.add_argument("--leased-kills", type=int, help="of each lane of those with leases")
    parser.add_argument("--lanes", type=int, default=6, help="locks of each contender with leases")
    parser.add_argument("--cycles", type=int, help="acquisitions of a free lock")
    parser.add_argument("--only", help="these contenders, separated by commas")
    parser.add_argument("--table", metavar="FILE", help="print a report as Markdown, and exit")
    parser.add_argument("--into", metavar="PAGE", help="write it between the marks of this page")
    flags = parser.parse_args(arguments)
    flags.kills = flags.kills or (30 if flags.quick else 150)
    flags.leased_kills = flags.leased_kills or (1 if flags.quick else 4)
    flags.cycles = flags.cycles or (200 if flags.quick else 1000)
    return flags


class Bench:
    """One run. `skipped`: why there is no figure, by contender (`redis`) or by contender and
    section (`redis, free lock`)."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags = flags
        self._wanted = flags.only.split(",") if flags.only else [*CONTENDERS, *VARIANTS]
        self.skipped = {name: why for name in self._wanted if (why := missing(name)) is not None}

    def measure(self) -> dict[str, Any]:
        """The whole report."""
        began = time.monotonic()
        report: dict[str, Any] = {
            "schema": 1,
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "settings": self._settings(),
            "skipped": self.skipped,
        }
        took_ms = self._races()
        spreads = {name: spread(values) for name, values in took_ms.items()}
        report["kill_to_grant_ms"] = {n: spreads.get(n) for n in CONTENDERS if n in self._wanted}
        report["kill_to_grant_variants_ms"] = {n: spreads[n] for n in VARIANTS if n in spreads}
        report["kills"] = {name: len(values) for name, values in took_ms.items()}
        report["times_slower_than_unix"] = _ratios(report["kill_to_grant_ms"])
        if self._flags.only is None:
            report["free_lock"] = self._free_lock()
            report["crowd"] = self._attempt("crowd", crowd.measure, CROWD, CROWD_KILLS)
            report["start"] = self._starts(2 if self._flags.quick else 10)
        report["took_s"] = round(time.monotonic() - began, 1)
        return report

    def _attempt(self, what: str, action: Callable[..., T], *arguments: Any) -> T | None:
        """What `action` returns; None if it failed, and then `skipped` has the reason."""
        try:
            return action(*arguments)
        except (ProcessError, OSError) as error:
            self.skipped[what] = str(error)
            return None

    def _races(self) -> dict[str, list[float]]:
        """Kill → grant (ms). The fast ones side by side, then those with leases: these take long,
        and would only disturb. A contender with a lane that failed is skipped."""
        flags, took_ms = self._flags, defaultdict[str, list[float]](list)
        racers = [name for name in self._wanted if name not in self.skipped]
        fast = [name for name in racers if name not in LEASED]
        leased = [name for name in racers if name in LEASED for _ in range(flags.lanes)]
        for names, run, rounds in (
            (fast, race, flags.kills),
            (leased, race_apart, flags.leased_kills),
        ):
            with Servers() as servers, ExitStack() as stack:
                lanes = []
                for number, name in enumerate(names):
                    address = self._attempt(name, servers.address, name, number)
                    if address is not None:
                        every = VARIANT_EVERY if name in VARIANTS else 1
                        lanes.append(Lane(name, address, number, every))
                        stack.callback(lanes[-1].close)
                if lanes:
                    run(lanes, rounds)
                self.skipped |= {each.contender: each.failure for each in lanes if each.failure}
                for lane in lanes:
                    if lane.contender not in self.skipped:
                        took_ms[lane.contender] += lane.took_ms
        return took_ms

    def _free_lock(self) -> dict[str, Any]:
        """What `free_lock.measure` finds, by figure and contender."""
        found: dict[str, dict[str, Any]] = {
            figure: {}
            for figure in (
                *("acquire_ms", "durable_write_ms"),
                *("writes_per_grant", "acquire_and_release_per_s"),
            )
        }
        for name in free_lock.CONTENDERS:
            figures = None
            if missing(name) is None:
                what = f"{name}, free lock"
                figures = self._attempt(what, free_lock.measure, name, self._flags.cycles)
            if figures is None:
                figures = {"acquire_ms": None, "acquire_and_release_per_s": None}
            for figure, value in figures.items():
                found[figure][name] = value
        return found

    def _starts(self, rounds: int) -> dict[str, Any]:
        """From the command that starts a server to the first lock held, in turns."""
        took_ms: dict[str, list[float]] = defaultdict(list)
        rss_mib: dict[str, float] = {}
        for _ in range(rounds):
            for name in free_lock.STARTED:
                if missing(name) is not None or f"{name}, start" in self.skipped:
                    continue
                found = self._attempt(f"{name}, start", free_lock.start_to_grant, name)
                if found is not None:
                    took_ms[name].append(found[0])
                    rss_mib[name] = found[1]
        return {
            "to_first_grant_ms": {name: spread(values) for name, values in took_ms.items()},
            "server_mib": rss_mib,
        }

    def _settings(self) -> dict[str, Any]:
        return {
            "kills": self._flags.kills,
            "leased_kills": self._flags.leased_kills,
            "lanes": self._flags.lanes,
            "cycles": self._flags.cycles,
            "tcp_lease_ms": LEASE_MS,
            "tcp_lease_margin_ms": MARGIN_MS,
            "redis_px_ms": REDIS_PX_MS,
            "redis_retry_ms": REDIS_RETRY_S * 1000,
            "etcd_ttl_s": ETCD_TTL_S,
        }


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


if __name__ == "__main__":
    main()
