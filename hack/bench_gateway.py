"""What the gateway costs: time, CPU and memory, through it and past it in turns, in one run.

    python -m hack.bench_gateway [--streams 1,64,256,1000] [--events-per-s 20000] [--json] [--quick]

The upstream sends one token and one write for each event. The serving child is the real one, and
this process plays its parent. The CPU of an event is counted while all streams are under way, that
of a request by itself. `events_per_s` is what passes through when nothing paces the upstream.
`cores_lacked` is how long the gateway waited for a CPU that others had. *Added* is the difference
between the percentiles through the gateway and past it. On one machine a write to a client over TCP
does the receiver's half of TCP, too, and all of that is counted as the gateway's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gateway import messages as msg
from gateway.core.events import EngineGranted
from gateway.supervisor.child_processes import COMMAND, ChildLink
from hack import gateway_load as ends
from hack import rig
from hack.gateway_load import Seen, one_by_one, request, stream
from hack.processes import ServerProcess, Usage
from plumbing.pod.paths import engine_http_socket
from plumbing.service import procfs
from plumbing.service.clock import SystemClock
from plumbing.service.process import raise_fd_limit
from plumbing.wire.fds import OwnedFd
from understudy.pod.ports import free_ports

START_S = 60.0
ROUNDS = 3  # of each way, in turns
PAUSE_S = 0.005  # between two requests that are timed
WARM_UP = 20
ASKED_ALONE = 300  # requests, one after the other
UNPACED_EVENTS = 40_000  # of all streams together
MEMORY_TOKENS = 100  # that a stream has delivered when its memory is looked at
HELD_EVENTS_PER_S = 5000  # while memory is looked at
LOOK_S = 0.05


class BenchChild:
    """The serving child, which accepts at `port`."""

    def __init__(self, directory: str) -> None:
        self._settings = msg.ConfigureGatewayMsg(
            directory=os.fsencode(directory),
            hold_ms=10_000,
            park_timeout_ms=300_000,
            resumes_max=8,
            memory_bytes=1 << 30,
            keepalive_comments_ms=0,
            access_log=False,
            tls_cert="",
            tls_key="",
        )
        self._link = ChildLink(1, self, SystemClock())
        self._beat = asyncio.Event()
        (self.port,) = free_ports(1)

    @property
    def pid(self) -> int:
        return self._link.pid

    async def start(self) -> None:
        """Let it accept, and grant the lock to the upstream."""
        self._link.start(COMMAND, self._settings)
        await self._next_beat()
        with socket.create_server(("127.0.0.1", self.port), backlog=ends.BACKLOG) as listener:
            listener.setblocking(False)
            fd = OwnedFd(os.dup(listener.fileno()))
            self._link.send(msg.AcceptMsg("bench"), [fd])
        self._link.send(msg.NewsMsg(EngineGranted(ends.ENGINE, ends.TOKEN, "0" * 16)))
        while not (self._link.beat and self._link.beat.upstream and self._link.beat.is_accepting):
            await self._next_beat()

    def rss_kib(self) -> float:
        return (procfs.rss_bytes(self.pid) or 0) / 1024

    async def close(self) -> None:
        self._link.kill()
        assert self._link.process is not None
        await self._link.process.wait()

    async def _next_beat(self) -> None:
        self._beat.clear()
        async with asyncio.timeout(START_S):
            await self._beat.wait()

    # What `ChildOwner` asks for.

    def beaten(self, link: ChildLink) -> None:
        self._beat.set()

    def demanded(self, link: ChildLink, demand: msg.ModelDemandMsg) -> None:
        """There is no pool here."""

    def happened(self, link: ChildLink, event: msg.GatewayEventMsg) -> None:
        """Nobody wants to know."""

    def ended(self, link: ChildLink) -> None:
        self._beat.set()

    def read_out(self, link: ChildLink) -> None:
        """No status was asked for."""


async def paced(child: BenchChild, past: int, count: int, rate: float, s: float) -> rig.Figures:
    """`count` streams with `rate` events per second in all, for `s` seconds: first alone, for the
    CPU that an event takes, then, through the gateway and past it in turns, while single requests
    are timed."""
    interval_ms = max(1.0, count / rate * 1000)
    what = request(max(2, int(s * 1000 / interval_ms)), interval_ms)
    through, direct, load, usage = Seen(), Seen(), Seen(), Usage(child.pid)
    for _ in range(ROUNDS):
        begin, end = (partial(usage.add, sign, load) for sign in (-1, 1))
        await stream(child.port, count, what, load, begin, end)
        await _beside(child.port, count, what, through)
        await _beside(past, count, what, direct)
    return {
        **_added(through, direct),
        "events": usage.events,
        "errors": load.errors + through.errors,
        "cpu_us_per_event": round(usage.cpu_ms * 1000 / usage.events, 2),
        "writes_per_event": round(usage.writes / usage.events, 2),
        "cores": round(usage.cpu_ms / usage.wall_ms, 2),
        "cores_lacked": round(usage.waited_ms / usage.wall_ms, 2),
    }


async def _beside(port: int, count: int, what: bytes, timed: Seen) -> None:
    """Time single requests for as long as the streams last."""
    begun, load = asyncio.Event(), Seen()
    streams = asyncio.create_task(stream(port, count, what, load, begun.set))
    waiting = asyncio.create_task(begun.wait())
    await asyncio.wait((waiting, streams), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    while not streams.done():
        await one_by_one(port, 1, request(1, 0), timed)
        await asyncio.sleep(PAUSE_S)
    await streams
    timed.errors += load.errors


def _added(through: Seen, past: Seen) -> rig.Figures:
    ours, theirs = rig.spread(through.ttft_ms, 3), rig.spread(past.ttft_ms, 3)
    more = {name: round(ours[name] - theirs[name], 3) for name in ("p50", "p99")}
    return {"added_ttft_ms": more, "ttft_ms": {"gateway": ours, "direct": theirs}}


async def alone(child: BenchChild, past: int) -> rig.Figures:
    """One request at a time."""
    through, direct, usage = Seen(), Seen(), Usage(child.pid)
    for _ in range(ROUNDS):
        usage.add(-1)
        await one_by_one(child.port, ASKED_ALONE // ROUNDS, request(1, 0), through)
        usage.add(1)
        await one_by_one(past, ASKED_ALONE // ROUNDS, request(1, 0), direct)
    per_request = round(usage.cpu_ms * 1000 / ASKED_ALONE, 1)
    errors = through.errors + direct.errors
    return {**_added(through, direct), "cpu_us_per_request": per_request, "errors": errors}


async def unpaced(child: BenchChild, count: int) -> rig.Figures:
    """The most that passes through: events are merged in each read, so they cost less."""
    seen = Seen()
    await stream(child.port, count, request(UNPACED_EVENTS // count, 0), seen)
    rate = round(seen.events / (seen.last_s - seen.first_s))
    return {"events_per_s": rate, "errors_unpaced": seen.errors}


async def memory(child: BenchChild, count: int) -> float:
    """What one more stream takes, in KiB, once it has delivered `MEMORY_TOKENS` tokens."""
    seen, before = Seen(), child.rss_kib()
    what = request(2 * MEMORY_TOKENS, count / HELD_EVENTS_PER_S * 1000)
    held = asyncio.create_task(stream(child.port, count, what, seen))
    for _ in range(int(ends.DEADLINE_S / LOOK_S)):
        if seen.events >= MEMORY_TOKENS * count or held.done():
            break
        await asyncio.sleep(LOOK_S)
    grown = child.rss_kib() - before
    await held
    return round(grown / count, 1)


async def measure(counts: Sequence[int], rate: float, seconds: float, base: Path) -> rig.Figures:
    path = engine_http_socket(str(base), ends.ENGINE)
    (past,) = free_ports(1)
    command = [sys.executable, "-m", "hack.gateway_load", path, str(past)]
    upstream, child = ServerProcess(command, lambda: os.path.exists(path)), BenchChild(str(base))
    upstream.start()
    try:
        await child.start()
        for port in (child.port, past):
            await one_by_one(port, WARM_UP, request(8, 0), Seen())
        found: rig.Figures = {"idle_rss_mib": round(child.rss_kib() / 1024, 1)}
        found["alone"] = await alone(child, past)
        found["kib_per_stream"] = await memory(child, max(counts))  # early: freed memory is reused
        found["streams"] = {
            str(count): await paced(child, past, count, rate, seconds) for count in counts
        }
        for count in counts:
            found["streams"][str(count)] |= await unpaced(child, count)
    finally:
        await child.close()
        upstream.kill()
    groups = [found["alone"], *found["streams"].values()]
    errors = sum(each["errors"] + each.get("errors_unpaced", 0) for each in groups)
    problems = [f"{errors} answers were not whole"] if errors else []
    return rig.document({"events_per_s_asked": rate, **found}, problems)


def main() -> None:
    parser = rig.arguments("bench_gateway", "what the gateway costs: time, CPU and memory")
    parser.add_argument("--streams", default="1,64,256,1000", help="how many at the same time")
    parser.add_argument("--events-per-s", type=float, default=20_000, help="of all streams")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    flags = parser.parse_args()
    raise_fd_limit()
    counts = [int(each) for each in ("1,16" if flags.quick else flags.streams).split(",")]
    rate, seconds = (2000.0, 1.0) if flags.quick else (flags.events_per_s, flags.seconds)
    rig.finish(rig.run("gw-", partial(measure, counts, rate, seconds)), is_json=flags.json)


if __name__ == "__main__":
    main()
