"""What the gateway costs: time, CPU and memory, through it and past it in turns, in one run.

    python -m hack.bench_gateway [--streams 1,64,256,1000] [--events-per-s 20000] [--json] [--quick]

The upstream sends one token and one write for each event. The gateway is the real one, below its
init, and this process plays the lock server. The CPU of an event is counted while all streams are
under way, that of a request by itself. `events_per_s` is what passes through when nothing paces the
upstream. `cores_lacked` is how long the gateway waited for a CPU that others had. *Added* is the
difference between the percentiles through the gateway and past it. On one machine a write to a
client over TCP does the receiver's half of TCP, too, and all of that is counted as the gateway's.
`restart_ms` is from a SIGKILL of the gateway to the answer to a request sent right behind it, under
`NEWCOMERS_PER_S` requests on new connections, of which some are refused, are in a gateway that is
killed (`cut`), or wait for the next one (`wait_ms`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hack import gateway_load as ends
from hack import rig
from hack.gateway_load import Seen, one_by_one, request, stream
from hack.processes import ServerProcess, Usage, free_ports
from lockserver.messages import CATALOGUE, BorrowMsg, GrantedMsg, ServiceMsg, Stage
from plumbing.pod.paths import engine_http_socket, lockserver_socket
from plumbing.service import procfs
from plumbing.service.process import parent_environment, raise_fd_limit
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.server import Server
from understudy.pod.table import REPLACING_INIT, program

START_S = 60.0
ROUNDS = 3  # of each way, in turns
PAUSE_S = 0.005  # between two requests that are timed
WARM_UP = 20
ASKED_ALONE = 300  # requests, one after the other
UNPACED_EVENTS = 40_000  # of all streams together
MEMORY_TOKENS = 100  # that a stream has delivered when its memory is looked at
HELD_EVENTS_PER_S = 5000  # while memory is looked at
LOOK_S = 0.05
KILLS = 50
NEWCOMERS_PER_S = 32
SETTLE_S = 0.3  # between two kills


class BenchGateway(Handler):
    """The gateway below its init, which accepts at `port`; the lock server is here."""

    def __init__(self, directory: str, *flags: str) -> None:
        (self.port,) = free_ports(1)
        self._directory, self._flags = directory, flags
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=ends.BACKLOG)
        self._server = Server(lockserver_socket(directory), CATALOGUE, self, service="bench")
        self._init: asyncio.subprocess.Process | None = None
        self.accepts = asyncio.Event()

    @property
    def pid(self) -> int:
        assert self._init is not None
        found = procfs.children(self._init.pid)
        return found[0] if found else 0

    def pids(self) -> list[int]:
        """Of the init and of all below it."""
        assert self._init is not None
        return [self._init.pid, *procfs.descendants(self._init.pid)]

    async def start(self) -> None:
        """Wait until it accepts and has greeted the upstream."""
        await self._server.start()
        words = [*REPLACING_INIT, *program("gateway"), "serve", "--dir", self._directory]
        words += ["--http-port", "0", *self._flags]
        self._init = await asyncio.create_subprocess_exec(
            *words, env={**os.environ, **parent_environment()}, stderr=DEVNULL
        )
        async with asyncio.timeout(START_S):
            await self.accepts.wait()

    def rss_kib(self) -> float:
        return (procfs.rss_bytes(self.pid) or 0) / 1024

    def pss_kib(self) -> dict[str, int]:
        """Of the init and of the gateway."""
        assert self._init is not None
        return {"init": _pss_kib(self._init.pid), "gateway": _pss_kib(self.pid)}

    async def close(self) -> None:
        assert self._init is not None
        with contextlib.suppress(ProcessLookupError):
            self._init.kill()
        await self._init.wait()
        await self._server.close()
        self._listener.close()

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        if not isinstance(message, BorrowMsg):
            return
        if message.stage is Stage.ACCEPTS:
            self.accepts.set()
            return
        incarnation = f"{ends.ENGINE}-{'0' * 16}"
        conn.send(GrantedMsg("active", ends.ENGINE, incarnation, ends.TOKEN))
        copy = OwnedFd(os.dup(self._listener.fileno()))
        conn.send(ServiceMsg("bench"), fds=[copy])

    def closed(self, conn: Connection, reason: str) -> None:
        self.accepts.clear()


def _pss_kib(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(each for each in rollup if each.startswith("Pss:")).split()[1])


async def restarts(gateway: BenchGateway, count: int) -> rig.Figures:
    """Kill it so often, each time under a new request, and newcomers all the while."""
    took_ms, seen, came, refused = [], Seen(), Seen(), [0]

    async def newcomers(group: asyncio.TaskGroup) -> None:
        while True:
            group.create_task(newcomer())
            await asyncio.sleep(1 / NEWCOMERS_PER_S)

    async def newcomer() -> None:
        try:
            await one_by_one(gateway.port, 1, request(1, 0), came)
        except ConnectionError:
            refused[0] += 1

    async with asyncio.TaskGroup() as group:
        coming = group.create_task(newcomers(group))
        for _ in range(count):
            os.kill(gateway.pid, signal.SIGKILL)
            began_s = time.perf_counter()
            await one_by_one(gateway.port, 1, request(1, 0), seen)
            took_ms.append((time.perf_counter() - began_s) * 1000)
            async with asyncio.timeout(START_S):
                await gateway.accepts.wait()
            await asyncio.sleep(SETTLE_S)
        coming.cancel()
    waits = {"restart_ms": rig.spread(took_ms), "wait_ms": rig.spread(came.ttft_ms)}
    counts = {"newcomers": len(came.ttft_ms), "cut": came.errors, "refused": refused[0]}
    return {**waits, **counts, "errors": seen.errors + refused[0]}


async def paced(gateway: BenchGateway, past: int, count: int, rate: float, s: float) -> rig.Figures:
    """`count` streams with `rate` events per second in all, for `s` seconds: first alone, for the
    CPU that an event takes, then, through the gateway and past it in turns, while single requests
    are timed."""
    interval_ms = max(1.0, count / rate * 1000)
    what = request(max(2, int(s * 1000 / interval_ms)), interval_ms)
    through, direct, load, usage = Seen(), Seen(), Seen(), Usage(gateway.pid)
    for _ in range(ROUNDS):
        begin, end = (partial(usage.add, sign, load) for sign in (-1, 1))
        await stream(gateway.port, count, what, load, begin, end)
        await _beside(gateway.port, count, what, through)
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


async def alone(gateway: BenchGateway, past: int) -> rig.Figures:
    """One request at a time."""
    through, direct, usage = Seen(), Seen(), Usage(gateway.pid)
    for _ in range(ROUNDS):
        usage.add(-1)
        await one_by_one(gateway.port, ASKED_ALONE // ROUNDS, request(1, 0), through)
        usage.add(1)
        await one_by_one(past, ASKED_ALONE // ROUNDS, request(1, 0), direct)
    per_request = round(usage.cpu_ms * 1000 / ASKED_ALONE, 1)
    errors = through.errors + direct.errors
    return {**_added(through, direct), "cpu_us_per_request": per_request, "errors": errors}


async def unpaced(gateway: BenchGateway, count: int) -> rig.Figures:
    """The most that passes through: events are merged in each read, so they cost less."""
    seen = Seen()
    await stream(gateway.port, count, request(UNPACED_EVENTS // count, 0), seen)
    rate = round(seen.events / (seen.last_s - seen.first_s))
    return {"events_per_s": rate, "errors_unpaced": seen.errors}


async def memory(port: int, rss_kib: Callable[[], float], count: int) -> tuple[float, Seen]:
    """What one more stream takes, in KiB, once it has delivered `MEMORY_TOKENS` tokens; and what
    the clients of all of them saw."""
    seen, before = Seen(), rss_kib()
    what = request(2 * MEMORY_TOKENS, count / HELD_EVENTS_PER_S * 1000)
    held = asyncio.create_task(stream(port, count, what, seen))
    for _ in range(int(ends.DEADLINE_S / LOOK_S)):
        if seen.events >= MEMORY_TOKENS * count or held.done():
            break
        await asyncio.sleep(LOOK_S)
    grown = rss_kib() - before
    await held
    return round(grown / count, 1), seen


async def measure(counts: Sequence[int], rate: float, seconds: float, base: Path) -> rig.Figures:
    path = engine_http_socket(str(base), ends.ENGINE)
    (past,) = free_ports(1)
    command = [sys.executable, "-m", "hack.gateway_load", path, str(past)]
    upstream = ServerProcess(command, lambda: os.path.exists(path))
    gateway = BenchGateway(str(base))
    upstream.start()
    try:
        await gateway.start()
        for port in (gateway.port, past):
            await one_by_one(port, WARM_UP, request(8, 0), Seen())
        found: rig.Figures = {
            "idle_rss_mib": round(gateway.rss_kib() / 1024, 1),
            "idle_pss_kib": gateway.pss_kib(),
        }
        found["alone"] = await alone(gateway, past)
        # Early: freed memory is reused.
        found["kib_per_stream"], _ = await memory(gateway.port, gateway.rss_kib, max(counts))
        found["streams"] = {
            str(count): await paced(gateway, past, count, rate, seconds) for count in counts
        }
        for count in counts:
            found["streams"][str(count)] |= await unpaced(gateway, count)
        found["deaths"] = await restarts(gateway, KILLS)
    finally:
        await gateway.close()
        upstream.kill()
    groups = [found["alone"], found["deaths"], *found["streams"].values()]
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
