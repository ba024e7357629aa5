"""What a client sees when a backend dies: behind our front and behind other routers, in one run.

    python -m hack.bench_fleet --peers DIR [--only NAME,NAME] [--json] [--quick]
    python -m hack.bench_fleet --crowd [--json]

DIR has a virtual environment for each peer, named as its package: `python3 -m venv DIR/smg` and
`DIR/smg/bin/pip install smg`. HAProxy is the one in PATH. What is not there is left out.

Each router has two backends, stubs that compute nothing (`gateway_load`); ours have a pod's gateway
before them, and Dynamo has its own mockers. `mid_stream`: one backend is killed while it streams.
`before_first_byte`: it has requests, and has answered none of them when it is killed. *Whole*
answers have every token once. `pause_ms`: from the kill to the next text, of as many answers as the
dead backend had, those that waited longest. *Added* is the difference between the percentiles
through the router and past it, in turns; mockers have no way past. CPU is that of all threads of
the router, and beside it that of our pods' gateways.

A *crowd* is 1,000 streams at once through one front to 16 pods, over TLS: the memory that each
takes, how long they waited for their first event, and each of them at most for any other one.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from string import Template
from typing import Any, ClassVar

from hack import gateway_load as ends
from hack import rig
from hack.bench_gateway import HELD_EVENTS_PER_S, BenchGateway, memory
from hack.gateway_load import Seen, one_by_one, request, stream
from hack.processes import free_ports
from plumbing.pod.paths import engine_http_socket
from plumbing.service import procfs
from plumbing.service.process import parent_environment, raise_fd_limit
from plumbing.wire.certificates import create
from understudy.drill.clients import Target, clock, send
from understudy.drill.records import End, Exchange, Prompt
from understudy.http_get import get
from understudy.up.models import make_random_model

PEERS = Path(__file__).parent / "peers"  # how each is started, and its configuration
COMMANDS: dict[str, str] = json.loads((PEERS / "commands.json").read_text())
BIN = Path(sys.executable).parent
KINDS = ("mid_stream", "before_first_byte")
OURS = (WITH_TLS := "understudy", "understudy-plain")
DYNAMO = "ai-dynamo"
INTERVAL_MS, TOKENS = 50.0, 80  # of a stream whose backend is killed: 4 s
STREAMS, LOAD_TOKENS, REQUESTS = 16, 100, 20
KILL_AFTER_S, HUNG_S, BACK_S, START_S, SILENCE_S = 2.0, 0.3, 90.0, 120.0, 20.0
CROWD, CROWD_PODS, KIB_MAX, GAP_MS_MAX = 1000, 16, 64.0, 2000.0
SETTLE_S = 6.0  # of a mocker that is started again, since it cannot be asked


class Process:
    """A program of `folder`, which is killed with its children; `place` has its log."""

    all: ClassVar[list[Process]] = []

    def __init__(self, folder: Path, place: Path, command: str, **values: Any) -> None:
        program, *words = shlex.split(Template(command).substitute(values, place=place))
        env = {**os.environ, **parent_environment()}
        with (place / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(folder / program), *words], env=env, stdout=log, stderr=log
            )
        self.all.append(self)

    def pids(self) -> list[int]:
        return [self._process.pid, *procfs.descendants(self._process.pid)]

    def kill(self) -> None:
        signal_all(self.pids(), signal.SIGKILL)
        self._process.wait()


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def cpu_us(pids: Iterable[int]) -> int:
    """Of all threads."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) // 1000


class Backend:
    """A stub at `port`; in a pod of ours, its gateway is at `address`. Or one of Dynamo's mockers,
    which has neither."""

    def __init__(self, router: str, folder: Path, place: Path) -> None:
        place.mkdir(mode=0o700)
        self.port, hop = free_ports(2)
        self.address = f"127.0.0.1:{hop}"
        self.gateway: BenchGateway | None = None
        self._router, self._folder, self._place = router, folder, place

    async def start(self) -> None:
        if self._router == DYNAMO:
            self._process = Process(self._folder, self._place, COMMANDS["mocker"])
            return
        path = Path(engine_http_socket(str(self._place), ends.ENGINE))
        path.unlink(missing_ok=True)
        values = {"socket": path, "port": self.port, "interval_ms": INTERVAL_MS}
        self._process = Process(BIN, self._place, COMMANDS["stub"], **values)
        await rig.until(self._missing, "answer of a stub", START_S)
        if self._router in OURS:
            flags = ["--hop", self.address]
            if self._router == WITH_TLS:
                flags += ["--fleet-tls", str(self._place.parent / "tls/pod")]
            self.gateway = BenchGateway(str(self._place), *flags)
            await self.gateway.start()

    async def _missing(self) -> str:
        return "" if await self.counts() else "it does not listen"

    async def counts(self) -> dict[str, Any]:
        """Nothing of a mocker."""
        return (await get(f"http://127.0.0.1:{self.port}/counts", 2)).json()

    def pids(self) -> list[int]:
        return [*(self.gateway.pids() if self.gateway else []), *self._process.pids()]

    async def kill(self) -> None:
        signal_all(self.pids(), signal.SIGKILL)
        self._process.kill()
        if self.gateway is not None:
            await self.gateway.close()


class Router:
    """One of `COMMANDS`, with its backends, below `place`."""

    def __init__(self, name: str, folder: Path, place: Path, backends: int = 2) -> None:
        self.name, self._folder, self._place = name, folder, place
        self.port, self._other = free_ports(2)
        place.mkdir(mode=0o700)
        self.backends = [Backend(name, folder, place / str(each)) for each in range(backends)]
        self.through, self.past, self.spent = Seen(), Seen(), Counter[str]()
        self.ended, self.waits = (Counter[str](), Counter[str]()), (list[float](), list[float]())

    async def start(self) -> None:
        """Raises:
        UnderstudyError: it does not answer.
        """
        a, b, *_ = self.backends
        if self.name == WITH_TLS:
            create(str(self._place / "tls"), ["understudy-pod"], "pod", "front")
        elif self.name == DYNAMO:
            words = {f"w{each}": each for each in range(50_000)}  # mockers take some at random
            known = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
            tokenizer = {"version": "1.0", "added_tokens": [], "model": known}
            model = await make_random_model(self._place / "model")
            (model / "tokenizer.json").write_text(json.dumps(tokenizer))
        ports = {"port": self.port, "other": self._other, "a": a.port, "b": b.port}
        for path in PEERS.glob(f"{self.name}.*"):
            (self._place / path.name).write_text(Template(path.read_text()).substitute(ports))
        for each in self.backends:
            await each.start()
        pods, command = ",".join(each.address for each in self.backends), COMMANDS[self.name]
        self.process = Process(self._folder, self._place, command, pods=pods, **ports)
        await rig.until(self._missing, f"answer of {self.name}", START_S, every_s=0.5)

    async def _missing(self) -> str:
        answers = [await self.ask(2) for _ in range(4)]
        return next((each.detail or "none" for each in answers if outcome(each, 2) != "whole"), "")

    async def ask(self, tokens: int) -> Exchange:
        body = {"model": ends.MODEL, "messages": [{"role": "user", "content": "hello"}]}
        more = {"stream": True, "max_tokens": tokens, "ignore_eos": True}
        prompt = Prompt("bench", "/v1/chat/completions", {**body, **more})
        return await send(Target("127.0.0.1", self.port), prompt, SILENCE_S)

    def version(self) -> str:
        if self.name == "haproxy":
            return subprocess.check_output(["haproxy", "-v"], text=True).split()[2]
        package = "understudy" if self.name in OURS else self.name.replace("-", "_")
        (found,) = self._folder.parent.glob(f"lib/python*/site-packages/{package}-*.dist-info")
        return found.name.split("-")[1].removesuffix(".dist")

    async def first_bytes(self, number: int) -> None:
        """Some requests one at a time, through the router and past it."""
        await one_by_one(self.port, REQUESTS, request(1), self.through)
        if self.name != DYNAMO:
            await one_by_one(self.backends[number % 2].port, REQUESTS, request(1), self.past)

    async def load(self, _: int) -> None:
        """Streams, with the CPU time that their events take."""
        seen = Seen()
        pods = [pid for each in self.backends if each.gateway for pid in each.gateway.pids()]

        def look(sign: int) -> None:
            self.spent["events"] += sign * seen.events
            self.spent["cpu_us"] += sign * cpu_us(self.process.pids())
            self.spent["pods_cpu_us"] += sign * cpu_us(pods)

        what = request(LOAD_TOKENS)
        await stream(self.port, STREAMS, what, seen, partial(look, -1), partial(look, 1))
        self.spent["errors"] += seen.errors

    def rss_kib(self) -> float:
        return sum((procfs.rss_bytes(pid) or 0) for pid in self.process.pids()) / 1024

    def figures(self) -> rig.Figures:
        """Of all steps."""
        spent, ours, theirs = self.spent, self.through.ttft_ms, self.past.ttft_ms
        found: rig.Figures = {"version": self.version(), "first_byte_ms": rig.spread(ours)}
        if theirs:
            both = rig.spread(ours), rig.spread(theirs)
            found["added_ms"] = {each: round(both[0][each] - both[1][each], 2) for each in both[0]}
        for name in ("cpu_us", "pods_cpu_us"):
            found[f"{name}_per_event"] = round(spent[name] / spent["events"], 1)
        errors = self.through.errors + self.past.errors + spent["errors"]
        found |= {"rss_mib": round(self.rss_kib() / 1024), "errors": errors}
        for name, ended, waits in zip(KINDS, self.ended, self.waits, strict=True):
            is_kept = ended["whole"] > ended["requests"] - ended["at_victim"]
            found[name] = {**ended, "pause_ms": rig.spread(waits, 0) if is_kept else None}
        return found

    async def death(self, number: int, *, is_stopped: bool) -> None:
        """Kill a backend, which streams; or is stopped, so it has answered nothing."""
        ended, waits = self.ended[is_stopped], self.waits[is_stopped]
        victim, other = self.backends[number % 2], self.backends[1 - number % 2]
        served = (await other.counts()).get("served", 0)
        if is_stopped:
            signal_all(victim.pids(), signal.SIGSTOP)
        asked = [asyncio.create_task(self.ask(TOKENS)) for _ in range(STREAMS)]
        await asyncio.sleep(HUNG_S if is_stopped else KILL_AFTER_S)
        there = STREAMS + served - (await other.counts()).get("served", STREAMS // 2)
        killed_ms = clock.now_ms()
        await victim.kill()
        answers = await asyncio.gather(*asked)
        ended.update(outcome(each, TOKENS) for each in answers)
        ended.update(requests=STREAMS, at_victim=there)
        after = [[at for at in each.text_ms if at > killed_ms] for each in answers]
        gaps = sorted(min(each, default=killed_ms) - killed_ms for each in after)
        waits += gaps[STREAMS - there :]
        await victim.start()
        await self._until_back(victim)

    async def _until_back(self, victim: Backend) -> None:
        """Until the router sends requests to it again."""

        async def missing() -> str:
            await asyncio.gather(*(self.ask(2) for _ in range(8)))
            return "" if (await victim.counts()).get("served", 1) else "no request reaches it"

        await asyncio.sleep(SETTLE_S if self.name == DYNAMO else 0)
        await rig.until(missing, f"request from {self.name}", BACK_S, every_s=0.5)


Step = Callable[[Router, int], Awaitable[None]]


def outcome(answer: Exchange, tokens: int) -> str:
    """`whole`, or what the client saw instead. Each token is a word, a stub's with its number."""
    if answer.status >= 400:
        return f"status_{answer.status}"
    if answer.end is not End.DONE:
        return "error_event" if "error event" in answer.detail else str(answer.end)
    words = answer.text.split()
    is_right = not answer.text.startswith(" token") or words == sorted({*words})
    return "whole" if is_right and len(words) == tokens else "other_text"


STEPS: list[Step] = [Router.first_bytes] * 4 + [Router.load]
STEPS += [partial(Router.death, is_stopped=each) for each in (False, True)]


async def measure(
    folders: dict[str, Path], rounds: int, base: Path, *, is_crowd: bool = False
) -> rig.Figures:
    os.environ |= {"DYN_DISCOVERY_BACKEND": "file", "DYN_EVENT_PLANE": "zmq"}
    os.environ["DYN_FILE_KV"] = str(base / "kv")
    pods = CROWD_PODS if is_crowd else 2
    routers = [Router(name, folder, base / name, pods) for name, folder in folders.items()]
    try:
        for each in routers:
            rig.say(each.name)
            await each.start()
        if is_crowd:
            return await crowd(routers[0])
        for step in STEPS:
            for number in range(rounds):
                rig.say(f"round {number + 1} of {step}")
                for each in rig.turns(number, routers):  # what else the machine does affects all
                    await step(each, number)
        found = {each.name: each.figures() for each in routers}
    finally:
        for process in Process.all:
            process.kill()
        for gateway in (each.gateway for router in routers for each in router.backends):
            if gateway is not None:
                await gateway.close()
    return rig.document({"streams": STREAMS, "routers": found}, [])


async def crowd(front: Router) -> rig.Figures:
    await one_by_one(front.port, REQUESTS, request(8), Seen())
    idle_mib = round(front.rss_kib() / 1024, 1)
    kib, seen = await memory(front.port, front.rss_kib, CROWD)
    is_good = not seen.errors and kib <= KIB_MAX and max(seen.gap_ms) <= GAP_MS_MAX
    problems = [] if is_good else ["a stream was starved or cut off, or takes too much memory"]
    figures: rig.Figures = {"streams": CROWD, "pods": CROWD_PODS}
    figures |= {"events_per_s": HELD_EVENTS_PER_S, "idle_rss_mib": idle_mib}
    figures |= {"kib_per_stream": kib, "errors": seen.errors}
    waits = {"first_event_ms": rig.spread(seen.ttft_ms, 0), "gap_ms": rig.spread(seen.gap_ms, 0)}
    return rig.document({**figures, **waits}, problems)


def main() -> None:
    parser = rig.arguments("bench_fleet", "what a client sees when a backend dies, behind routers")
    parser.add_argument("--peers", type=Path, default=Path("."), help="of virtual environments")
    parser.add_argument("--only", default=",".join(COMMANDS), help="routers, with commas")
    parser.add_argument("--crowd", action="store_true", help="of streams, through a front alone")
    flags = parser.parse_args()
    raise_fd_limit()
    folders = {name: flags.peers.resolve() / name / "bin" for name in COMMANDS}
    folders |= dict.fromkeys(OURS, BIN)
    folders["haproxy"] = Path(shutil.which("haproxy") or "/nowhere/haproxy").parent
    only = WITH_TLS if flags.crowd else flags.only
    routers = {name: folders[name] for name in only.split(",") if folders[name].is_dir()}
    body = partial(measure, routers, 1 if flags.quick else 2, is_crowd=flags.crowd)
    rig.finish(rig.run("fleet-", body), is_json=flags.json)


if __name__ == "__main__":
    main()
