"""A fleet of which each pod has a network of its own, and what its network costs its streams.

    python -m tests.e2e.fleet_network [--cut-offs 50] [--busy-s 600]

Real pods, each in a network namespace, a front outside of them, and certificates between; as root.
`cut_offs`: one pod after the other is cut off while it streams, both ways and without a word;
`pause_ms`: how long its streams waited for their next text. `busy`: busy loops on all CPUs and lost
packets beside clients that stream all the while; `silent`: how often the front called a pod silent,
or lost one. Exit code 1: an answer was wrong or not whole, or a pod was called silent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from plumbing.wire import certificates
from tests.e2e.pods import AS_USERS_RUN_IT
from tests.figures import Figures, document, report, say
from tests.helpers import free_port
from understudy.drill.clients import Target, clock, send, stream_without_pause
from understudy.drill.outcomes import classify, spread
from understudy.drill.records import Exchange, Outcome, Prompt
from understudy.drill.run import busy_loops
from understudy.pod.runner import PodRunner
from understudy.pod.table import INIT, Container, program
from understudy.status.gather import gateway_part, status_of

PODS = 2
STREAMS = 6
START_S = 120.0
ENDED_S = 60.0
POLL_S = 0.02  # the front is measured
NETWORK = "10.213"  # of which each pod has a /30
DROPS = {"in": ("-A", "INPUT", "-i"), "out": ("-A", "OUTPUT", "-o")}
BODY = {"max_tokens": 128, "temperature": 1.0, "seed": 3, "ignore_eos": True, "stream": True}
PROMPTS = [
    Prompt(str(number), "/v1/completions", {**BODY, "prompt": f"Act {number}:"})
    for number in range(STREAMS)
]
SHORT = Prompt("short", "/v1/completions", {**PROMPTS[0].body, "max_tokens": 10})
PAUSE_MS = 200.0  # shorter ones are the machine's
LOSS = 0.01  # of the packets, each way
BURN = 2  # busy loops for each CPU
BUSY_CLIENTS = 6


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Namespace:
    """One network namespace with a link to this one's."""

    number: int
    name: str

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}.2"

    def create(self) -> None:
        command("ip", "netns", "add", self.name)
        inside, outside = f"{self.name}i", f"{self.name}o"
        command(*("ip", "link", "add", outside, "type", "veth"), "peer", "name", inside)
        command("ip", "link", "set", inside, "netns", self.name)
        command("ip", "addr", "add", f"{NETWORK}.{self.number}.1/30", "dev", outside)
        command("ip", "link", "set", outside, "up")
        self("ip", "addr", "add", f"{self.address}/30", "dev", inside)
        for device in (inside, "lo"):
            self("ip", "link", "set", device, "up")

    def __call__(self, *words: str) -> None:
        """Run a command inside."""
        command("ip", "netns", "exec", self.name, *words)

    def drop(self, *directions: str, share: float = 1.0) -> None:
        """From now on packets into it, or out of it, are lost, or this share of them."""
        some = ("-m", "statistic", "--mode", "random", "--probability", str(share))
        for each in directions or DROPS:
            words = some if share < 1 else ()
            self("iptables", *DROPS[each], f"{self.name}i", *words, "-j", "DROP")

    def heal(self) -> None:
        self("iptables", "-F")

    def remove(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)


@contextlib.contextmanager
def made_namespaces() -> Iterator[list[Namespace]]:
    made = [Namespace(number, f"us{os.getpid()}-{number}") for number in range(PODS)]
    try:
        for each in made:
            each.create()
        yield made
    finally:
        for each in made:
            each.remove()


def why_not() -> str:
    """Why there can be no such namespace here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root"
    if missing := [each for each in ("ip", "iptables") if shutil.which(each) is None]:
        return f"needs {missing[0]}"
    probe = Namespace(255, "us-probe")
    try:
        probe.create()
        probe.drop("in")
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces and iptables: {error.stderr.strip()}"
    finally:
        probe.remove()
    return ""


class NetworkFleet:
    """A pod in each namespace, and a front here."""

    def __init__(self, base: Path, namespaces: Sequence[Namespace]) -> None:
        self.namespaces = {f"pod-{each.number}": each for each in namespaces}
        self.directory, keys, self.port = base / "front", base / "keys", free_port()
        self.directory.mkdir(mode=0o700)
        certificates.create(str(keys), ["understudy-pod"], "pod", "front")
        containers = []
        for name, each in self.namespaces.items():
            inside = ("ip", "netns", "exec", each.name, *program("understudy"), "up")
            flags = (f"--dir={base / name}", "--", "--token-interval-ms=10", "--slots=16")
            env = {"UNDERSTUDY_HOP": f"{each.address}:8443", "UNDERSTUDY_POD_NAME": name}
            env |= {"UNDERSTUDY_FLEET_TLS": str(keys / "pod"), **AS_USERS_RUN_IT}
            containers.append(Container(name, (*inside, *flags), env, is_engine=True))
        names = ",".join(f"{each.address}:8443" for each in namespaces)
        self.log = base / "log"
        front = ("serve", f"--dir={self.directory}", f"--pods={names}", "--http-port=0")
        front += (f"--fleet-tls={keys / 'front'}", f"--listen=127.0.0.1:{self.port}")
        row = Container("front", (*program("gateway"), *front), AS_USERS_RUN_IT, init=INIT)
        self.runner = PodRunner([*containers, row], self.log)
        self.target = Target("127.0.0.1", self.port)
        self.expected: dict[str, Exchange] = {}

    async def start(self) -> None:
        await self.runner.start()
        await self.all_ready(START_S)
        for prompt in PROMPTS:
            self.expected[prompt.key] = await send(self.target, prompt)

    async def all_ready(self, deadline_s: float = 60.0) -> None:
        await self.until(lambda pods: self.states(pods) == ["ready"] * PODS, "ready", deadline_s)

    @staticmethod
    def states(pods: dict[str, Any]) -> list[str]:
        return [str(each["state"]) for each in pods.values()]

    async def until(
        self, look: Callable[[dict[str, Any]], object], what: str, deadline_s: float = 30.0
    ) -> dict[str, Any]:
        """The front's pods by name, once `look` finds something in them."""
        pods: dict[str, Any] = {}
        try:
            async with asyncio.timeout(deadline_s):
                while len(pods) < PODS or not look(pods):
                    await asyncio.sleep(POLL_S)
                    document = await status_of(gateway_part(self.directory))
                    pods = {str(each["name"]): each for each in document.get("pods", ())}
        except TimeoutError:
            raise AssertionError(f"not {what}: {pods}") from None
        return pods

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncIterator[list[asyncio.Task[Exchange]]]:
        """Streams that have begun in every pod; at the end each is whole, and right."""
        running = [asyncio.create_task(send(self.target, each)) for each in 2 * PROMPTS]
        await self.until(lambda pods: all(it["streams"] > 1 for it in pods.values()), "busy")
        await send(self.target, SHORT)  # as long as the others take for ten tokens
        yield running
        async with asyncio.timeout(ENDED_S):
            ended = await asyncio.gather(*running)
        outcomes = {classify(each, self.expected) for each in ended}
        assert outcomes == {Outcome.OK}, [(each.end, each.detail) for each in ended]


# ---------------------------------------------------------------------- figures


async def cut_offs(made: NetworkFleet, count: int) -> Figures:
    """One pod after the other is cut off, at any time between two of its reports."""
    pauses_ms: list[float] = []
    for number in range(count):
        pod = f"pod-{number % PODS}"
        async with made.streams() as running:
            await asyncio.sleep(random.uniform(0.0, 0.25))
            cut_ms = clock.now_ms()
            made.namespaces[pod].drop()
            ended = await asyncio.gather(*running)
        made.namespaces[pod].heal()
        found = [longest_gap_ms(each, cut_ms) for each in ended if each.pod == pod]
        pauses_ms += [each for each in found if each >= PAUSE_MS]
        await made.all_ready()
        say(f"cut-off {number + 1} of {pod}: {[round(each) for each in found]} ms")
    return {"count": count, "paused": len(pauses_ms), "pause_ms": spread(pauses_ms)}


def longest_gap_ms(answer: Exchange, since_ms: float) -> float:
    """Between two pieces of its text, the second after this time."""
    gaps = (late - early for early, late in pairwise(answer.text_ms) if late > since_ms)
    return max(gaps, default=0.0)


async def busy(made: NetworkFleet, for_s: float) -> Figures:
    """What the front says of its pods in so many seconds on a busy machine with a bad network."""
    stopping, outcomes, gaps_ms = asyncio.Event(), Counter[str](), list[float]()

    def done(answer: Exchange) -> None:
        outcomes[classify(answer, made.expected)] += 1
        gaps_ms.append(longest_gap_ms(answer, 0.0))

    front = made.log / "front.log"
    before = len(front.read_text())
    clients = [
        asyncio.create_task(stream_without_pause(made.target, PROMPTS, each, done, stopping))
        for each in range(BUSY_CLIENTS)
    ]
    for each in made.namespaces.values():
        each.drop(share=LOSS)
    try:
        with busy_loops(BURN):
            await asyncio.sleep(for_s)
            load = os.getloadavg()[0]
    finally:
        for each in made.namespaces.values():
            each.heal()
    stopping.set()
    await asyncio.gather(*clients)
    events = [json.loads(line) for line in front.read_text()[before:].splitlines()]
    said = [each["msg"] for each in events if each.get("event") == "gateway.pod"]
    document = await status_of(gateway_part(made.directory))
    figures = {"for_s": for_s, "loss": LOSS, "loops_per_cpu": BURN, "load_1min": load}
    figures |= {"answers": outcomes, "longest_gap_ms": spread(gaps_ms)}
    silent = sum(" is silent" in each for each in said)
    return {**figures, "silent": silent, "losses": document["losses"], "said": said}


async def measure(flags: argparse.Namespace, base: Path) -> Figures:
    found: Figures = {}
    with made_namespaces() as namespaces:
        made = NetworkFleet(base, namespaces)
        try:
            await made.start()
            if flags.cut_offs:
                found["cut_offs"] = await cut_offs(made, flags.cut_offs)
            if flags.busy_s:
                found["busy"] = await busy(made, flags.busy_s)
        finally:
            await made.runner.stop()
    about = found.get("busy", {})
    wrong = sum(number for each, number in about.get("answers", {}).items() if each != Outcome.OK)
    problems = [f"{wrong} answers were wrong or not whole"] if wrong else []
    if about.get("silent") or any(about.get("losses", {}).values()):
        problems.append("a pod was called silent, or lost")
    return document(found, problems)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.fleet_network")
    parser.add_argument("--cut-offs", type=int, default=50)
    parser.add_argument("--busy-s", type=float, default=600.0)
    report(partial(measure, parser.parse_args()))
