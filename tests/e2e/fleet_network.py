"""A fleet of which each pod has a network of its own, and what its network costs its streams.

    python -m tests.e2e.fleet_network [--cut-offs 50] [--busy-s 600] [--rollout-s 600]

Real pods, each in a network namespace, a front outside of them, and certificates between; as root.
`cut_offs`: one pod after the other is cut off while it streams, both ways and without a word;
`pause_ms`: how long its streams waited for their next text. `busy`: busy loops on all CPUs and lost
packets beside clients that stream all the while; `silent`: how often the front called a pod silent,
or lost one. `rollout`: all pods are replaced in turn under streams that last so long; `gap_ms`: the
longest gap in each one's text while a pod leaves, and in as long a time before. Not every token is
a piece of text. Exit code 1: an answer was wrong or not whole, or a pod was called silent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import subprocess
from asyncio.subprocess import DEVNULL
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
from tests.helpers import busy_loops, free_port
from understudy.drill.clients import Target, clock, send, stream_without_pause
from understudy.drill.outcomes import classify, spread
from understudy.drill.records import Exchange, Outcome, Prompt
from understudy.pod.runner import PodRunner
from understudy.pod.table import INIT, Container, program
from understudy.status.gather import gateway_part, status_of

PODS, MORE_PODS = 2, 3  # of a rollout
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
FAST = ("--token-interval-ms=10", "--slots=16")
# As many tokens as fit into the context of the random model.
ROLLOUT_STREAMS, ROLLOUT_TOKENS, BEGUN_S, LEAVE_WITHIN = 64, 2000, 10.0, "--within=60s"
UNPACED = (f"--slots={ROLLOUT_STREAMS}", "--max-context=2048")


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
def made_namespaces(pods: int = PODS) -> Iterator[list[Namespace]]:
    made = [Namespace(number, f"us{os.getpid()}-{number}") for number in range(pods)]
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
    probe = Namespace(255, f"us{os.getpid()}-p")  # test processes look at the same time
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

    def __init__(self, base: Path, namespaces: Sequence[Namespace], *args: str) -> None:
        """`args`: of the backends."""
        base.mkdir(mode=0o700, exist_ok=True)
        self.base = base
        self.namespaces = {f"pod-{each.number}": each for each in namespaces}
        self.directory, keys, self.port = base / "front", base / "keys", free_port()
        self.directory.mkdir(mode=0o700)
        certificates.create(str(keys), ["understudy-pod"], "pod", "front")
        names = ",".join(f"{each.address}:8443" for each in namespaces)
        self.log = base / "log"
        front = ("serve", f"--dir={self.directory}", f"--pods={names}", "--http-port=0")
        front += (f"--fleet-tls={keys / 'front'}", f"--listen=127.0.0.1:{self.port}")
        row = Container("front", (*program("gateway"), *front), AS_USERS_RUN_IT, init=INIT)
        pods = [self.pod(each, *args) for each in self.namespaces]
        self.runner = PodRunner([*pods, row], self.log)
        self.target = Target("127.0.0.1", self.port)
        self.expected: dict[str, Exchange] = {}

    def pod(self, name: str, *args: str) -> Container:
        each = self.namespaces[name]
        inside = ("ip", "netns", "exec", each.name, *program("understudy"), "up")
        flags = (f"--dir={self.base / name}", "--device-bytes=8GiB", "--", *args)
        env = {"UNDERSTUDY_HOP": f"{each.address}:8443", "UNDERSTUDY_POD_NAME": name}
        env |= {"UNDERSTUDY_FLEET_TLS": str(self.base / "keys/pod"), **AS_USERS_RUN_IT}
        return Container(name, (*inside, *flags), env, is_engine=True)

    async def start(self) -> None:
        await self.runner.start()
        await self.all_ready(START_S)
        for prompt in PROMPTS:
            self.expected[prompt.key] = await send(self.target, prompt)

    async def all_ready(self, deadline_s: float = 60.0) -> None:
        wanted = ["ready"] * len(self.namespaces)
        await self.until(lambda pods: self.states(pods) == wanted, "ready", deadline_s)

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
                while len(pods) < len(self.namespaces) or not look(pods):
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


def longest_gap_ms(answer: Exchange, since_ms: float, until_ms: float = math.inf) -> float:
    """Between two pieces of its text, the second after this time."""
    gaps = (late - early for early, late in pairwise(answer.text_ms) if since_ms < late < until_ms)
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


async def rollout(made: NetworkFleet, for_s: float) -> Figures:
    """Each pod leaves in turn and is replaced. The answers were learnt from pods that do not wait
    between two tokens."""
    body = {**BODY, "max_tokens": ROLLOUT_TOKENS}
    prompts = [
        Prompt(str(number), "/v1/completions", {**body, "prompt": f"Scene {number}:"})
        for number in range(ROLLOUT_STREAMS)
    ]
    learnt = await asyncio.gather(*(send(made.target, each) for each in prompts))
    expected = {each.prompt: each for each in learnt}
    interval_ms = round(for_s * 1000 / ROLLOUT_TOKENS)
    paced = (*UNPACED, f"--token-interval-ms={interval_ms}")
    slow = [made.pod(each, *paced) for each in made.namespaces]
    for each in slow:
        await made.runner.replace(each)
    await made.all_ready(START_S)
    running = [asyncio.create_task(send(made.target, each)) for each in prompts]
    times_ms = []
    for each in slow:
        await asyncio.sleep(BEGUN_S)  # of streaming that the gaps are compared with
        began_ms = clock.now_ms()
        leave = (*program("gateway"), "leave", f"--dir={made.base / each.name}", LEAVE_WITHIN)
        env = os.environ | AS_USERS_RUN_IT
        leaving = await asyncio.create_subprocess_exec(*leave, env=env, stdout=DEVNULL)
        assert await leaving.wait() == 0
        times_ms.append((began_ms, clock.now_ms()))
        await made.runner.replace(each)
        await made.all_ready(START_S)
    ended = await asyncio.gather(*running)
    document = await status_of(gateway_part(made.directory))
    figures: Figures = {"streams": len(ended), "pods": len(slow), "interval_ms": interval_ms}
    figures["lasted_s"] = round(max(each.ended_ms - each.sent_ms for each in ended) / 1000)
    figures |= {"answers": Counter(classify(each, expected) for each in ended)}
    figures |= {"moves": document["moves"], "losses": document["losses"]}
    figures["leave_ms"] = [round(left - began) for began, left in times_ms]
    gaps = [longest_gap_ms(each, *pair) for pair in times_ms for each in ended]
    before = [(2 * began - left, began) for began, left in times_ms]
    usual = [longest_gap_ms(each, *pair) for pair in before for each in ended]
    return {**figures, "gap_ms": spread(gaps), "gap_before_ms": spread(usual)}


async def measure(flags: argparse.Namespace, base: Path) -> Figures:
    found: Figures = {}
    with made_namespaces(MORE_PODS) as namespaces:
        made = NetworkFleet(base / "fast", namespaces[:PODS], *FAST)
        try:
            await made.start()
            if flags.cut_offs:
                found["cut_offs"] = await cut_offs(made, flags.cut_offs)
            if flags.busy_s:
                found["busy"] = await busy(made, flags.busy_s)
        finally:
            await made.runner.stop()
        if flags.rollout_s:
            made = NetworkFleet(base / "rollout", namespaces, *UNPACED)
            try:
                await made.start()
                found["rollout"] = await rollout(made, flags.rollout_s)
            finally:
                await made.runner.stop()
    abouts = [found.get(each, {}) for each in ("busy", "rollout")]
    answers = sum((Counter(each.get("answers")) for each in abouts), Counter[str]())
    wrong = answers.total() - answers[Outcome.OK]
    problems = [f"{wrong} answers were wrong or not whole"] if wrong else []
    about = found.get("busy", {})
    if about.get("silent") or any(about.get("losses", {}).values()):
        problems.append("a pod was called silent, or lost")
    return document(found, problems)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.fleet_network")
    parser.add_argument("--cut-offs", type=int, default=50)
    parser.add_argument("--busy-s", type=float, default=600.0)
    parser.add_argument("--rollout-s", type=float, default=600.0)
    report(partial(measure, parser.parse_args()))
