"""Goal: two models that fit only one at a time are both served, and nobody notices more than a
pause.

Method: the pod of a pool file with the reference backend, clients that stream from both models at
once, and the pool killed meanwhile. Every answer is compared with the one of a quiet pod.
"""

from __future__ import annotations

import asyncio
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

from plumbing.part.paths import pool_socket
from plumbing.wire.blocking import BlockingClient
from pool.messages import CATALOGUE, StatusMsg
from tests.e2e.pods import AS_USERS_RUN_IT
from tests.helpers import auntil
from understudy.kubelet.runner import PodRunner
from understudy.up.local_pod import LocalPod
from understudy.up.pool_pod import prepare_pool
from understudy.up.random_model import make_random_model

# Two engines at rest and one KV cache fit; two KV caches do not. An engine of the reference backend
# has some 55 MiB beside them.
DEVICE_BYTES, CACHE_TOKENS = "600MiB", "600000"
KV_BYTES = 300 << 20
POOL_FILE = """
devices: [HOST-0]
margin: 0
defaults: {{min_runtime: 200ms, max_wait: 100ms, drain_timeout: {{park: 50ms, cut: 60s}}}}
models:
  a: &model
    backend: reference
    model: {model}
    args: [--cache-tokens, {tokens}]
    memory: {{weights: 1MiB, kv: {kv}, base: 64MiB}}
  b: *model
"""
PROMPTS = {"a": "one rainy day", "b": "the other one"}
TOKENS = 300
ASKED = 4  # by each client
CLIENTS = 2  # of each model
WAIT_S = 60.0


class PoolOfTwo:
    """The running pod."""

    def __init__(self, directory: Path, runner: PodRunner, port: int) -> None:
        self.directory, self.runner, self.port = directory, runner, port

    def status(self) -> dict[str, Any]:
        with BlockingClient(pool_socket(str(self.directory)), CATALOGUE) as client:
            return dict(client.request(StatusMsg(), timeout_s=WAIT_S).message.document)

    def answer(self, model: str) -> tuple[int, str]:
        """The status and the text of one stream."""
        asked = {"model": model, "prompt": PROMPTS[model], "max_tokens": TOKENS, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**asked, "temperature": 0}),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        lines = [line for line in response.read().decode().split("\n\n") if line]
        connection.close()
        assert lines[-1] == "data: [DONE]", lines[-1]
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        return response.status, "".join(each["choices"][0]["text"] for each in events)

    def incarnations(self) -> dict[str, str]:
        """Of all engines, from their state files."""
        return {
            path.stem: json.loads(path.read_text())["engine"]["incarnation"]
            for path in self.directory.glob("engine_*.json")
        }


@asynccontextmanager
async def pool_of_two(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PoolOfTwo]:
    for name, value in AS_USERS_RUN_IT.items():
        monkeypatch.setenv(name, value)
    model = await make_random_model(directory / "model")
    path = directory / "pool.yaml"
    path.write_text(POOL_FILE.format(model=model, tokens=CACHE_TOKENS, kv=KV_BYTES))
    local = LocalPod(Path(), None, device_bytes=DEVICE_BYTES)
    pod = await prepare_pool(local, path, 0, directory, print, is_drilled=True)
    port = int(next(w for w in pod.containers[0].command if "service=" in w).rpartition(":")[2])
    runner = PodRunner(pod.containers, directory / "log")
    try:
        await runner.start()
        yield PoolOfTwo(directory, runner, port)
    finally:
        await runner.stop()


def test_models_that_do_not_fit_together_are_both_served_and_no_answer_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def scenario() -> None:
        async with pool_of_two(tmp_path, monkeypatch) as pod:
            quiet = {model: await asyncio.to_thread(pod.answer, model) for model in PROMPTS}
            assert {status for status, _ in quiet.values()} == {200}
            before = pod.incarnations()
            seen: list[tuple[str, tuple[int, str]]] = []
            half = threading.Event()

            def client(model: str) -> None:
                for _ in range(ASKED):
                    seen.append((model, pod.answer(model)))
                    half.set()

            clients = [
                asyncio.create_task(asyncio.to_thread(client, model))
                for model in PROMPTS
                for _ in range(CLIENTS)
            ]
            await asyncio.to_thread(half.wait, WAIT_S)
            os.kill(pod.runner.pids()["pool"], signal.SIGKILL)
            await asyncio.gather(*clients)
            assert [(model, each) for model, each in seen if each != quiet[model]] == []
            assert len(seen) == len(clients) * ASKED
            await auntil(lambda: pod.runner.restarts()["pool"] == 1, "the pool to be back")
            assert pod.incarnations() == before
            states = {each["model"]: each["state"] for each in pod.status()["models"]}
            assert sorted(states) == ["a", "b"]
            assert [*states.values()].count("awake") <= 1, states

    asyncio.run(scenario())
