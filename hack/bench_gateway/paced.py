"""Streams at a given rate: what an event takes of the gateway, and of proxies that only copy, and
what the gateway adds to the first byte meanwhile.

The surprising thing: on one machine a write to a client over TCP does the receiver's half of TCP,
too, up to waking it, and all of that is counted as the sender's. The same with clients on Unix
sockets (`over_unix`) shows how much that is.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from hack.bench_gateway.load import Seen, one_by_one, request, stream
from hack.bench_gateway.rig import Address, Door, Doors, Usage
from hack.report import spread

Report = dict[str, Any]

ROUNDS = 3  # of each way, in turns
PAUSE_S = 0.005  # between two requests that are timed
HALF = 0.5
HALF_WITHIN = 0.03
# The rate for half a core is found in steps, since an event takes less where more come at once.
STEPS_MAX = 6
STEP_S = 2.0
FIRST_EVENTS_PER_S = 20_000.0
STEP_FACTOR_MAX = 1.5
KEPT_UP = 0.95  # of the asked rate; less is the most that this machine's stub and clients make


async def paced(doors: Doors, count: int, rate: float, seconds: float) -> Report:
    """`count` streams with `rate` events per second in all: first alone, for the CPU that an event
    takes, then, through the gateway and past it in turns, while single requests are timed."""
    what = _stream_of(count, rate, seconds)
    through, past, load = Seen(), Seen(), Seen()
    ways: dict[str, Door] = {"cpu": doors.child, "copying": doors.copier}
    if doors.compiled is not None:
        ways["copying_c"] = doors.compiled
    usages = {name: Usage() for name in ways}
    for _ in range(ROUNDS):
        for name, door in ways.items():
            await steady(door, count, what, load, usages[name])
        await _beside(doors.child.address, count, what, through)
        await _beside(doors.stub.address, count, what, past)
    ours = usages["cpu"]
    return {
        **added(through, past),
        "events": ours.events,
        "errors": load.errors + through.errors,
        **_costs(usages),
        "cores": ours.cores,
        "cores_lacked": round(ours.waited_ms / ours.wall_ms, 2),
    }


async def at_half_a_core(doors: Doors, count: int, seconds: float) -> Report:
    """The same at the rate that takes the gateway half a core, and with clients on Unix sockets."""
    rate = await _rate_for_half(doors.child, count)
    over_tcp = await paced(doors, count, rate, seconds)
    what, load = _stream_of(count, rate, seconds), Seen()
    ways: dict[str, Door] = {"cpu": doors.over_unix.child}
    if doors.over_unix.compiled is not None:
        ways["copying_c"] = doors.over_unix.compiled
    usages = {name: Usage() for name in ways}
    for _ in range(ROUNDS):
        for name, door in ways.items():
            await steady(door, count, what, load, usages[name])
    over_unix = {"errors": load.errors, **_costs(usages)}
    return {"events_per_s_asked": round(rate), **over_tcp, "over_unix": over_unix}


def _costs(usages: dict[str, Usage]) -> Report:
    """Less than one write for each event: the process lagged, and found several at once."""
    return {
        **{f"{name}_us_per_event": usage.cpu_us_per_event for name, usage in usages.items()},
        "writes_per_event": {
            name: round(usage.writes / usage.events, 2) for name, usage in usages.items()
        },
    }


async def _rate_for_half(door: Door, count: int) -> float:
    """Events per second; the most that the others can make, if that takes less than half a core."""
    rate = FIRST_EVENTS_PER_S
    for _ in range(STEPS_MAX):
        usage, seen = Usage(), Seen()
        await steady(door, count, _stream_of(count, rate, STEP_S), seen, usage)
        if abs(usage.cores - HALF) <= HALF_WITHIN:
            break
        if usage.events_per_s < KEPT_UP * rate and usage.cores < HALF:
            return usage.events_per_s
        rate *= min(STEP_FACTOR_MAX, max(1 / STEP_FACTOR_MAX, HALF / usage.cores))
    return rate


def _stream_of(count: int, rate: float, seconds: float) -> bytes:
    interval_ms = max(1.0, count / rate * 1000)
    return request(max(2, int(seconds * 1000 / interval_ms)), interval_ms)


async def steady(
    door: Door,
    count: int,
    what: bytes,
    seen: Seen,
    usage: Usage,
    tls: ssl.SSLContext | None = None,
) -> None:
    """`count` streams; `usage` is counted while all of them are under way, so that what a request
    takes at its beginning and at its end is not in it."""
    await stream(
        door.address,
        count,
        what,
        seen,
        all_begun=lambda: usage.begin(door, seen.events),
        one_ended=lambda: usage.end(door, seen.events),
        tls=tls,
    )


async def _beside(address: Address, count: int, what: bytes, timed: Seen) -> None:
    """Time single requests for as long as the streams last."""
    begun, load = asyncio.Event(), Seen()
    streams = asyncio.create_task(stream(address, count, what, load, begun.set))
    waiting = asyncio.create_task(begun.wait())
    await asyncio.wait((waiting, streams), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    while not streams.done():
        await one_by_one(address, 1, request(1, 0), timed)
        await asyncio.sleep(PAUSE_S)
    await streams
    timed.errors += load.errors


def added(through: Seen, past: Seen) -> Report:
    ours, theirs = spread(through.ttft_ms, 3), spread(past.ttft_ms, 3)
    more = {name: round(ours[name] - theirs[name], 3) for name in ("p50", "p99")}
    return {"added_ttft_ms": more, "ttft_ms": {"gateway": ours, "direct": theirs}}
