"""Goal: a pod that is cut off without a word costs its streams a pause, and nothing else.

Method: real pods, each in a network namespace of its own, a front outside of them, and certificates
between, as root; iptables drops packets in the pod's namespace, so nobody is told. Clients compare
each answer with the one that they got before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plumbing.wire import certificates
from tests.e2e.pods import AS_USERS_RUN_IT
from tests.helpers import free_port, on_loop_of
from understudy.drill.clients import Target, send
from understudy.drill.outcomes import classify
from understudy.drill.records import Exchange, Outcome, Prompt
from understudy.pod.runner import PodRunner
from understudy.pod.table import INIT, Container, program
from understudy.status.gather import part_of, status_of

AWAY_MS = 3_000.0  # longer than it takes to call a pod silent
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
FAST = ("--token-interval-ms=10", "--slots=16")


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

    def drop(self, *directions: str) -> None:
        """From now on packets into it, or out of it, are lost."""
        for each in directions or DROPS:
            self("iptables", *DROPS[each], f"{self.name}i", "-j", "DROP")

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
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
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

    async def start(self, prompts: Sequence[Prompt] = PROMPTS) -> None:
        await self.runner.start()
        await self.all_ready(START_S)
        answers = await asyncio.gather(*(send(self.target, each) for each in prompts))
        self.expected = {each.prompt: each for each in answers}

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
                    document = await status_of(part_of(self.directory, "gateway"))
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


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[NetworkFleet, asyncio.Runner]]:
    if why := why_not():
        pytest.skip(why)
    with made_namespaces() as namespaces, asyncio.Runner() as loop:
        made = NetworkFleet(tmp_path_factory.mktemp("net"), namespaces, *FAST)
        try:
            loop.run(made.start())
            yield made, loop
        finally:
            loop.run(made.runner.stop())


of_fleet = on_loop_of("fleet", "made", lambda fleet, scenario: fleet[1].run(scenario(fleet[0])))


@pytest.mark.slow
@pytest.mark.parametrize("directions", [("in", "out"), ("in",), ("out",)])
@of_fleet
async def test_streams_of_a_pod_that_is_cut_off_go_on_at_the_other_one(made, directions):
    """Method: packets are dropped both ways, on the way to the pod, on the way back; they are until
    all streams have ended, so that none can have ended there."""
    async with made.streams():
        cut = made.namespaces["pod-0"]
        cut.drop(*directions)
        try:
            await made.until(lambda pods: pods["pod-0"]["streams"] == 0, "moved")
            pods = await made.until(lambda pods: pods["pod-0"]["state"] != "ready", "silent")
            assert pods["pod-1"]["state"] == "ready"
            answer = await send(made.target, PROMPTS[0])  # a new one
            assert classify(answer, made.expected) is Outcome.OK
            assert answer.pod == "pod-1"
        except BaseException:
            cut.heal()
            raise
    cut.heal()
    await made.all_ready()


@pytest.mark.slow
@of_fleet
async def test_no_stream_ends_while_all_pods_are_cut_off_and_all_go_on_afterwards(made):
    """Rule 10: silence moves nothing to nowhere."""
    async with made.streams() as running:
        for each in made.namespaces.values():
            each.drop()
        try:
            await made.until(
                lambda pods: all(each["heard_for_ms"] >= AWAY_MS for each in pods.values()),
                "silent for longer than it takes to move a stream",
            )
            assert not any(task.done() for task in running)
        finally:
            for each in made.namespaces.values():
                each.heal()
    await made.all_ready()
