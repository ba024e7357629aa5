"""What the gateway costs: time, CPU and memory, through it and past it in turns, in one run.

    python -m hack.bench_gateway [--json] [--streams 1,64,256,1000] [--events-per-s 20000]

The stub upstream sends one token and one write for each event, at a rate that takes the gateway
so many `cores`; `at_half_a_core` has the rate at which that is half of one. `events_per_s` is what
passes through when nothing paces the stub. The CPU of an event is counted while all streams are
under way, that of a request by itself. `copying` is a proxy that only copies, on the gateway's loop
(`copier.py`), and `copying_c` one in C (`copier.c`, left out without a compiler): what no process
can do without. `over_unix` is without the clients' TCP, of which loopback counts both halves as the
gateway's. `cores_lacked` is how long the gateway waited for a CPU that others had. *Added* is the
difference between the percentiles through the gateway and past it. The reference backend is a whole
pod of each kind, asked in turns. With `--tls`, a child that serves TLS is measured beside the plain
one, where each request by itself has a handshake.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from hack.bench_gateway.load import DEADLINE_S, Seen, one_by_one, request, stream
from hack.bench_gateway.paced import ROUNDS, added, at_half_a_core, paced, steady
from hack.bench_gateway.rig import (
    BenchChild,
    Doors,
    Usage,
    doors_of_stub,
    idle_rss_mib,
    pod,
    secure_child,
)
from hack.report import commit, machine, spread
from plumbing.service.process import raise_fd_limit

Report = dict[str, Any]

SHOWN = 256  # streams: the first keys of the report are theirs
AT_HALF_A_CORE = (64, 256)  # streams
WARM_UP = 20
ASKED_ALONE = 300  # requests, one after the other
REFERENCE_ASKED = 150
UNPACED_EVENTS = 40_000  # of all streams together
MEMORY_TOKENS = 100  # that a stream has delivered when its memory is looked at
HELD_EVENTS_PER_S = 5000  # while memory is looked at
LOOK_S = 0.05


async def measure(
    directory: str, counts: list[int], rate: float, seconds: float, *, with_tls: bool
) -> Report:
    async with doors_of_stub(directory) as doors:
        for door in doors.all():
            await one_by_one(door.address, WARM_UP, request(8, 0), Seen())
        idle_kib = doors.child.rss_kib()
        alone = await _alone(doors)
        memory = await _memory(doors.child, max(counts))  # early: freed memory is used again
        found = {str(count): await paced(doors, count, rate, seconds) for count in counts}
        at_half = {
            str(count): await at_half_a_core(doors, count, seconds)
            for count in counts
            if count in AT_HALF_A_CORE
        }
        for count in counts:
            found[str(count)] |= await _unpaced(doors.child, count)
        streams_shown = SHOWN if SHOWN in counts else counts[0]
        tls: Report = {}
        if with_tls:
            async with secure_child(directory) as (child, trust):
                tls["tls"] = await _beside_tls(
                    doors.child, child, trust, streams_shown, rate, seconds
                )
    shown = found[str(streams_shown)]
    keys = ("added_ttft_ms", "cpu_us_per_event", "copying_us_per_event", "events_per_s")
    return {
        "streams_shown": streams_shown,
        **{key: shown[key] for key in keys},
        "idle_rss_mib": round(idle_kib / 1024, 1),
        "kib_per_stream": memory,
        "alone": alone,
        "streams": found,
        "at_half_a_core": at_half,
        **tls,
    }


async def _beside_tls(
    plain: BenchChild,
    secure: BenchChild,
    trust: ssl.SSLContext,
    count: int,
    rate: float,
    seconds: float,
) -> Report:
    """The same child with and without TLS, in turns: events of `count` streams, and requests."""
    interval_ms = max(1.0, count / rate * 1000)
    what = request(max(2, int(seconds * 1000 / interval_ms)), interval_ms)
    ways: list[tuple[str, BenchChild, ssl.SSLContext | None]]
    ways = [("plain", plain, None), ("tls", secure, trust)]
    events, requests = ({name: Usage() for name, _, _ in ways} for _ in range(2))
    seen, timed = ({name: Seen() for name, _, _ in ways} for _ in range(2))
    await one_by_one(secure.address, WARM_UP, request(8, 0), Seen(), trust)
    for _ in range(ROUNDS):
        for name, child, tls in ways:
            await steady(child, count, what, seen[name], events[name], tls)
            requests[name].begin(child)
            await one_by_one(child.address, ASKED_ALONE // ROUNDS, request(1, 0), timed[name], tls)
            requests[name].end(child)
    return {
        name: {
            "cpu_us_per_event": events[name].cpu_us_per_event,
            "cpu_us_per_request": round(requests[name].cpu_ms * 1000 / ASKED_ALONE, 1),
            "ttft_ms": spread(timed[name].ttft_ms, 3),
            "errors": seen[name].errors + timed[name].errors,
        }
        for name, _, _ in ways
    }


async def _alone(doors: Doors) -> Report:
    """One request at a time."""
    through, past, copied = Seen(), Seen(), Seen()
    ours, copying = Usage(), Usage()
    each = ASKED_ALONE // ROUNDS
    for _ in range(ROUNDS):
        for door, seen, usage in ((doors.child, through, ours), (doors.copier, copied, copying)):
            usage.begin(door)
            await one_by_one(door.address, each, request(1, 0), seen)
            usage.end(door)
        await one_by_one(doors.stub.address, each, request(1, 0), past)
    return {
        **added(through, past),
        "cpu_us_per_request": round(ours.cpu_ms * 1000 / ASKED_ALONE, 1),
        "copying_us_per_request": round(copying.cpu_ms * 1000 / ASKED_ALONE, 1),
    }


async def _unpaced(child: BenchChild, count: int) -> Report:
    """The most that passes through: events are merged in each read, so they cost less."""
    seen = Seen()
    await stream(child.address, count, request(UNPACED_EVENTS // count, 0), seen)
    return {
        "events_per_s": round(seen.events / (seen.last_s - seen.first_s)),
        "errors_unpaced": seen.errors,
    }


async def _memory(child: BenchChild, count: int) -> float:
    """What one more stream takes, in KiB, once it has delivered `MEMORY_TOKENS` tokens."""
    seen, before = Seen(), child.rss_kib()
    what = request(2 * MEMORY_TOKENS, count / HELD_EVENTS_PER_S * 1000)
    held = asyncio.create_task(stream(child.address, count, what, seen))
    for _ in range(int(DEADLINE_S / LOOK_S)):
        if seen.events >= MEMORY_TOKENS * count or held.done():
            break
        await asyncio.sleep(LOOK_S)
    grown = child.rss_kib() - before
    await held
    return round(grown / count, 1)


async def reference(gateway_port: int, direct_port: int) -> Report:
    """Two pods of the reference backend, asked in turns."""
    through, past, what = Seen(), Seen(), request(2, 0)
    for port in (gateway_port, direct_port):
        await one_by_one(port, WARM_UP, what, Seen())
    for _ in range(REFERENCE_ASKED):
        await one_by_one(gateway_port, 1, what, through)
        await one_by_one(direct_port, 1, what, past)
    return {**added(through, past), "errors": through.errors + past.errors}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hack.bench_gateway", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the report on stdout, as JSON")
    parser.add_argument("--streams", default="1,64,256,1000", help="how many at the same time")
    parser.add_argument(
        "--events-per-s", type=float, default=20_000, help="of all streams together"
    )
    parser.add_argument("--tls", action="store_true", help="what TLS costs, too (needs openssl)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    options = parser.parse_args()
    raise_fd_limit()
    counts = [int(each) for each in options.streams.split(",")]
    with tempfile.TemporaryDirectory(prefix="gw-") as directory:
        idle = idle_rss_mib(directory)
    with tempfile.TemporaryDirectory(prefix="gw-") as directory:
        found = uvloop.run(
            measure(
                directory,
                counts,
                options.events_per_s,
                options.seconds,
                with_tls=options.tls,
            )
        )
    with tempfile.TemporaryDirectory(prefix="gw-") as directory:
        one, two = Path(directory, "a"), Path(directory, "b")
        with pod(one) as gateway_port, pod(two, "--direct") as direct_port:
            with_model = uvloop.run(reference(gateway_port, direct_port))
    report = {
        "commit": commit(),
        "machine": machine(),
        "events_per_s_asked": options.events_per_s,
        **found,
        "processes_rss_mib": idle,
        "reference": with_model,
    }
    print(json.dumps(report, indent=None if options.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
