"""Goal: vLLM engines take turns on a device that does not hold all of their KV memory, and clients
notice no more than pauses.

Method: the pod of a pool file with two models. Their sizes are measured first, while both are
awake; then the margin is set so that one KV cache fits. Every answer is compared with the one that
the model gave alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from plumbing.pod.paths import pool_socket
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Message
from pool.core.events import Order
from pool.messages import CATALOGUE, OrderMsg, SetMsg, StatusMsg
from tests.e2e.pods import AS_USERS_RUN_IT
from tests.helpers import auntil
from tests.vllm.conftest import WHOLE_DEADLINE_S
from understudy.pod.runner import PodRunner
from understudy.pod.table import LocalPod
from understudy.status.gather import engine_parts, status_of
from understudy.up.models import VLLM_RANDOM_MODEL
from understudy.up.pods import prepare_pool

DEVICE_BYTES = "64GiB"  # a limit on what is booked, not on what the machine has
POOL_FILE = """
devices: [HOST-0]
margin: 0
defaults: {{min_runtime: 100ms, max_wait: 100ms, drain_timeout: {{park: 50ms, cut: 60s}}}}
models:
  a: &model {{backend: vllm, model: {model}, args: {arguments}}}
  b: *model
"""
MODELS = ("a", "b")
DEVICE = "HOST-0"
# Tokens: of a stream that does not end before it is parked, and of one that is soon.
LONG, SHORT = 250, 8
BEGUN = 30  # events of a long one


class Answer:
    """A stream, which a thread reads."""

    def __init__(self, port: int, model: str, tokens: int) -> None:
        self.text, self._events, self._is_whole = "", 0, False
        self.has_begun = threading.Event()
        asked = {"model": model, "prompt": f"to {model}", "max_tokens": tokens, "stream": True}
        body = json.dumps({**asked, "temperature": 0, "ignore_eos": True})
        self.done = asyncio.create_task(asyncio.to_thread(self._read, port, body))

    def _read(self, port: int, body: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WHOLE_DEADLINE_S)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            with connection.getresponse() as response:
                for line in response:
                    self._take(line)
        assert self._is_whole, f"{response.status}: it ended after {self._events} events"
        return self.text

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data: {"):
            self.text += json.loads(line[6:])["choices"][0]["text"]
            self._events += 1
        self._is_whole |= line.startswith(b"data: [DONE]")
        if self._events == BEGUN:
            self.has_begun.set()

    async def begins(self) -> None:
        await asyncio.to_thread(self.has_begun.wait, WHOLE_DEADLINE_S)


class PoolPod:
    """The running pod."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory, self._port = directory, port

    def ask(self, model: str, tokens: int) -> Answer:
        return Answer(self._port, model, tokens)

    def tell(self, order: Message) -> Any:
        with BlockingClient(pool_socket(str(self.directory)), CATALOGUE) as client:
            return client.request(order, timeout_s=WHOLE_DEADLINE_S).message

    def status(self) -> Any:
        return self.tell(StatusMsg()).document

    def model(self, name: str) -> Any:
        return next(each for each in self.status()["models"] if each["model"] == name)

    async def until(self, model: str, state: str) -> None:
        await auntil(
            lambda: self.model(model)["state"] == state, f"{model} to be {state}", WHOLE_DEADLINE_S
        )

    async def switches(self, to: Answer) -> None:
        """Until `a` yields; a look may come so late that it has, and is awake again."""

        def is_so() -> bool:
            return self.model("a")["state"] != "awake" or to.done.done()

        await auntil(is_so, "a to yield", WHOLE_DEADLINE_S)

    async def backend(self, engine: str) -> Any:
        (part,) = (each for each in engine_parts(self.directory) if each.name == engine)
        return (await status_of(part))["backend"]

    async def make_tight(self) -> None:
        """From now on a single KV cache fits: that of `a`, which stays awake."""
        (device,) = (each for each in self.status()["devices"] if each["device"] == DEVICE)
        kv_bytes = self.model("b")["bytes"][DEVICE]["kv"]
        self.tell(SetMsg("margin", str(device["free_bytes"] + kv_bytes // 2)))
        self.tell(OrderMsg("b", Order.SLEEP))
        await self.until("b", "warm")


@asynccontextmanager
async def pool_of_two(directory: Path, model: Path) -> AsyncIterator[PoolPod]:
    path = directory / "pool.yaml"
    arguments = f"[{', '.join(VLLM_RANDOM_MODEL.arguments)}]"
    path.write_text(POOL_FILE.format(model=model, arguments=arguments))
    env = {**VLLM_RANDOM_MODEL.env, **AS_USERS_RUN_IT}
    local = LocalPod(Path(), None, device_bytes=DEVICE_BYTES, env=env)
    pod = await prepare_pool(local, path, directory, print, is_drilled=True)
    port = int(next(w for w in pod.containers[0].command if "service=" in w).rpartition(":")[2])
    runner = PodRunner(pod.containers, directory / "log")
    try:
        await runner.start()
        yield PoolPod(directory, port)
    finally:
        await runner.stop()


@pytest.mark.slow
async def test_models_take_turns_and_every_answer_is_as_alone(tmp_path: Path, model: Path):
    """A stream is parked for the other model's turn and goes on in the next one; the engine that is
    to be raised dies during a switch, and another one of the model is."""
    async with pool_of_two(tmp_path, model) as pod:
        loading = [pod.ask(name, SHORT) for name in MODELS]
        short = {name: await each.done for name, each in zip(MODELS, loading, strict=True)}
        alone = await pod.ask("a", LONG).done
        assert alone.startswith(short["a"])
        found = {name: pod.model(name) for name in MODELS}
        assert [each["estimated"] for each in found.values()] == [False, False]
        assert all(min(each["bytes"][DEVICE].values()) > 0 for each in found.values())
        await pod.make_tight()
        engines = {name: await pod.backend(f"{name}-0") for name in MODELS}

        stream = pod.ask("a", LONG)
        await stream.begins()
        other = pod.ask("b", SHORT)  # which cannot be answered while `a` is awake
        assert await other.done == short["b"]
        assert await stream.done == alone
        again = {name: await pod.backend(f"{name}-0") for name in MODELS}
        assert [again[name]["pids"] == engines[name]["pids"] for name in MODELS] == [True] * 2

        stream = pod.ask("a", LONG)
        await stream.begins()
        other = pod.ask("b", SHORT)
        await pod.switches(other)
        os.kill(engines["b"]["pids"]["core"], signal.SIGKILL)
        assert await other.done == short["b"]
        assert await stream.done == alone
        assert (await pod.backend("a-0"))["pids"] == engines["a"]["pids"]
        assert (await pod.backend("b-0"))["pids"] != engines["b"]["pids"]
