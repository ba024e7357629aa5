"""A stream whose engine dies goes on at the other engine of a pod, behind the KV blocks of the dead
one: two engines behind the sockets at which a gateway asks them, and a test in its place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from engine.core.events import State
from engine.messages import CONTROL
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Journal
from plumbing.pod.messages import SetGoalMsg, Tier
from plumbing.pod.paths import engine_http_socket, engine_socket
from plumbing.service.procfs import is_spent
from plumbing.wire.blocking import BlockingClient
from tests.helpers import auntil
from tests.vllm.conftest import IS_INTERPRETED, WHOLE_DEADLINE_S
from tests.vllm.resume_matrix.client import begin, made_by
from understudy.pod.ports import free_pod_ports
from understudy.pod.runner import PodRunner
from understudy.pod.table import LocalPod
from understudy.status.gather import gather
from understudy.up.models import VLLM_RANDOM_MODEL

ANSWER_S = 60.0
WHOLE_POLL_S = 0.5  # a status of all parts costs more than the test's other polls
KILL_AFTER = 110  # groups
# On a busy machine the core runs ahead of the process that sends its tokens, by hundreds with V1.
ANSWER_TOKENS = 300 if IS_INTERPRETED else 1000
AWOKEN_TOKENS = 40  # after a rest
BLOCK_TOKENS = 32
KV_BYTES = 64 << 20
ARGUMENTS = (
    *VLLM_RANDOM_MODEL.arguments,
    "--kv-memory=gms",
    f"--block-size={BLOCK_TOKENS}",
    f"--kv-cache-memory-bytes={KV_BYTES}",
    "--enable-prompt-tokens-details",
)
BODY = {
    "prompt": [72, 101, 108, 108, 111],
    "ignore_eos": True,
    "stream": True,
    "temperature": 1.0,
    "seed": 4,
    "frequency_penalty": 0.4,
}


class Engine:
    """One engine as the gateway finds it while it is active."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = engine_http_socket(str(directory), name)

    def hello(self) -> Any:
        with begin(self.path, hop.HELLO_PATH, method="GET") as response:
            return json.load(response)

    def cached_tokens(self, prompt: list[int]) -> int:
        """How many tokens of `prompt` need not be computed."""
        body = {"prompt": prompt, "max_tokens": 1}
        with begin(self.path, "/v1/completions", body) as response:
            usage = json.load(response)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def stream(
        self,
        journal: Journal | None = None,
        strike: Callable[[], None] | None = None,
        most: int = ANSWER_TOKENS,
    ) -> bytes:
        """The answer of `most` tokens, as far as it comes; `strike` is called after some groups."""
        text, body = b"", {**BODY, "max_tokens": most}
        with begin(self.path, "/v1/completions", body, journal) as response:
            assert response.getheader(hop.CONTINUATION) == "state"
            with contextlib.suppress(HTTPException, ConnectionError):
                while part := response.read1():
                    text += part
                    if strike is not None and text.count(hop.GROUP_MARK) >= KILL_AFTER:
                        strike()
                        strike = None
        return text


async def whole(directory: Path) -> Any:
    """The pod's status once an engine is active and the other one is ready."""
    end = time.monotonic() + WHOLE_DEADLINE_S
    while time.monotonic() < end:
        view = await gather(directory)
        states = sorted(str((part["engine"] or {}).get("state")) for part in view["engines"])
        if view["active"] and states == ["active", "standby"]:
            return view
        await asyncio.sleep(WHOLE_POLL_S)
    raise AssertionError(f"after {WHOLE_DEADLINE_S:g} s the engines are {states}")


def kv_files(pids: Sequence[int]) -> set[str]:
    """The memory of KV pools that these processes have open or mapped, as the kernel has it."""
    found = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.add(os.readlink(fd))
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        found |= {line.split(None, 5)[-1] for line in maps.splitlines()}
    return {name for name in found if "understudy_kv-" in name}


def maps_epoch(pids: Iterable[int], epoch: str) -> bool:
    """Whether any of these processes maps the weights `epoch`; its copy is another epoch."""
    maps = [Path(f"/proc/{pid}/maps").read_text(errors="replace") for pid in pids]
    return any(f"/memfd:understudy-{epoch[:8]}-" in text for text in maps)


async def rest_and_wake(directory: Path, name: str, engine: Engine, expected: list[int]) -> None:
    """Three times, twice without its weights: no process has KV memory while it rests, nor maps
    weights that it has released, and the answer is the same after it, by the same processes."""
    view = await gather(directory)
    (part,) = (each for each in view["engines"] if each["engine"]["id"] == name)
    pids = part["backend"]["pids"]
    holders = [*pids.values(), view["gms"][0]["kv"]["pid"]]
    with contextlib.closing(BlockingClient(engine_socket(str(directory), name), CONTROL)) as client:

        def reach(goal: Tier, state: State) -> None:
            am = client.request(SetGoalMsg(goal, "a test"), timeout_s=ANSWER_S).message
            while (am.state, am.tier) != (state, goal):
                am = client.receive(ANSWER_S).message

        for goal in (Tier.WARM, Tier.OFFLOADED, Tier.OFFLOADED):
            assert kv_files(holders)
            epoch = (await gather(directory))["gms"][0]["epoch"]
            assert maps_epoch(pids.values(), epoch)
            await asyncio.to_thread(reach, goal, State.RESTING)
            assert kv_files(holders) == set()
            assert maps_epoch(pids.values(), epoch) is (goal is Tier.WARM)
            await asyncio.to_thread(reach, Tier.AWAKE, State.ACTIVE)
            again = await asyncio.to_thread(engine.stream, most=AWOKEN_TOKENS)
            assert made_by(again)[0].tokens == expected[:AWOKEN_TOKENS]
    view = await gather(directory)
    assert pids in [each["backend"]["pids"] for each in view["engines"]]


async def test_a_stream_of_a_dead_engine_goes_on_at_the_other(tmp_path: Path, model: Path):
    """SIGKILL the engine core in the middle of a stream that is seeded and penalised. What came is
    cut behind a whole group and says nothing of an end; the other engine has the same continuation
    id, takes up the journal, and the whole is the answer that was not interrupted. It has adopted
    the blocks of the dead engine, those of the cut stream among them, and prefills behind them;
    but not behind a block of which a byte was altered after the death. Then that engine rests and
    wakes, also without its weights."""
    pod = LocalPod(
        tmp_path,
        model,
        free_pod_ports(),
        backend="vllm",
        backend_args=ARGUMENTS,
        env={**VLLM_RANDOM_MODEL.env, "UNDERSTUDY_HOST_MEMORY": "256MiB"},
    )
    containers = [
        # Without an init, which would replace a stopped supervisor.
        replace(each, starts_in_order=False, init=())
        for each in pod.containers()
        if each.name != "gateway"  # the test is the gateway
    ]
    runner = PodRunner(containers, tmp_path / "log")
    try:
        await runner.start()
        view = await whole(tmp_path)
        dying, parked = sorted(
            view["engines"], key=lambda part: part["engine"]["id"] != view["active"]
        )
        standby = parked["engine"]["id"]
        first = Engine(tmp_path, view["active"])
        before = await asyncio.to_thread(first.hello)
        expected = await asyncio.to_thread(first.stream)
        assert expected.endswith(hop.END)
        old = dying["backend"]["pids"]

        def strike() -> None:
            os.kill(parked["engine"]["pid"], signal.SIGSTOP)  # until then nothing is adopted
            os.kill(old["core"], signal.SIGKILL)

        cut = await asyncio.to_thread(first.stream, None, strike)
        assert not cut.endswith(hop.END)
        journal, begun = made_by(cut)
        assert KILL_AFTER <= len(journal.tokens) < ANSWER_TOKENS
        text = [*BODY["prompt"], *journal.tokens]
        # The last block was in a step that the engine did not live to process.
        whole_blocks = len(text) // BLOCK_TOKENS - 1
        await auntil(lambda: all(map(is_spent, old.values())), "the dead engine's processes")
        os.kill(parked["engine"]["pid"], signal.SIGCONT)

        second = Engine(tmp_path, standby)
        await auntil(lambda: os.path.exists(second.path), "the other engine's socket")
        after = await asyncio.to_thread(second.hello)
        assert after["token"] > before["token"]
        assert after["continuation_id"] == before["continuation_id"] != ""
        assert (after["continuation"], after["problem"]) == ("state", None)
        view = await gather(tmp_path)
        (kv,) = (
            part["backend"]["kv"] for part in view["engines"] if part["engine"]["id"] == standby
        )
        assert (kv["memory"], kv["note"]) == ("gms", None)
        assert kv["adopted_blocks"] >= ANSWER_TOKENS // BLOCK_TOKENS
        cached = await asyncio.to_thread(second.cached_tokens, text)
        assert cached >= whole_blocks * BLOCK_TOKENS > 0
        resumed = await asyncio.to_thread(second.stream, journal)
        assert resumed.endswith(hop.END)
        assert made_by(resumed)[1] == made_by(expected)[1]
        assert made_by(resumed)[0].tokens == made_by(expected)[0].tokens
        assert made_by(expected)[1].startswith(begun)
        await rest_and_wake(tmp_path, standby, second, made_by(expected)[0].tokens)
    finally:
        await runner.stop()
