"""Goal: models that do not fit together are all served, and nobody notices more than a pause,
whatever dies.

Method: the pod of a pool file with the reference backend, and clients that stream from its models
at once. Every answer is compared with the one of a quiet pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from plumbing.service.procfs import pids
from pool.core.events import Order
from tests.e2e.pods import running_pod
from tests.e2e.pools import WAIT_S, RunningPool, running_pool
from tests.helpers import auntil
from understudy.pod.ports import free_offset
from understudy.up.models import make_random_model

# Two engines at rest and one KV cache fit; two KV caches do not. An engine of the reference backend
# has some 37 MiB beside them.
DEVICE_BYTES, CACHE_TOKENS = "600MiB", "600000"
RULES = "{min_runtime: 200ms, max_wait: 100ms, drain_timeout: {park: 50ms, cut: 60s}}"
TWO = f"""
devices: [HOST-0]
margin: 0
defaults: {RULES}
models:
  a: &model
    backend: reference
    model: MODEL
    args: [--cache-tokens, {CACHE_TOKENS}]
    memory: {{weights: 1MiB, kv: 300MiB, base: 64MiB}}
  b: *model
"""
PROMPTS = {"a": "one rainy day", "b": "the other one"}
TOKENS = 300
ASKED = 2  # by each client
CLIENTS = 2  # of each model
LONG = 1000  # tokens of a stream that an engine dies in


async def test_models_that_do_not_fit_together_are_both_served_and_no_answer_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Method: clients of both models at once; the pool is killed meanwhile."""
    async with running_pool(tmp_path, monkeypatch, TWO, DEVICE_BYTES) as pod:

        def stream(model: str) -> str:
            return pod.stream(model, PROMPTS[model], max_tokens=TOKENS)

        quiet = {model: await asyncio.to_thread(stream, model) for model in PROMPTS}
        before = pod.incarnations()
        seen: list[tuple[str, str]] = []
        half = threading.Event()

        def client(model: str) -> None:
            for _ in range(ASKED):
                seen.append((model, stream(model)))
                half.set()

        clients = [
            asyncio.create_task(asyncio.to_thread(client, model))
            for model in PROMPTS
            for _ in range(CLIENTS)
        ]
        await asyncio.to_thread(half.wait, WAIT_S)
        os.kill(pod.runner.pids()["pool"], signal.SIGKILL)
        await asyncio.gather(*clients)
        assert [(model, text) for model, text in seen if text != quiet[model]] == []
        assert len(seen) == len(clients) * ASKED
        await auntil(lambda: pod.runner.restarts()["pool"] == 1, "the pool to be back")
        assert pod.incarnations() == before
        states = pod.states()
        assert sorted(states) == ["a", "b"]
        assert [*states.values()].count("awake") <= 1, states


SHADOW = f"""
devices: [HOST-0]
margin: 0
defaults: {RULES}
models:
  a:
    backend: reference
    model: MODEL
    args: [--cache-tokens, 200000]
    memory: {{weights: 1MiB, kv: 100MiB, base: 48MiB}}
    shadow: keeps
"""


@pytest.mark.slow
async def test_failover_needs_no_pool_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Method: the engine that serves is killed under streams while the pool is stopped, and again
    while it is dead."""
    async with running_pool(tmp_path, monkeypatch, SHADOW, "300MiB") as pod:
        quiet = await asyncio.to_thread(pod.stream, "a", max_tokens=LONG)
        for silenced in (stopped, dead):
            await auntil(lambda: pod.in_state("standby", "a"), "the shadow")
            (active,) = pod.in_state("active", "a")
            with silenced(pod):
                begun = [threading.Event() for _ in range(CLIENTS)]
                streams = [
                    asyncio.create_task(
                        asyncio.to_thread(pod.stream, "a", begun=each, max_tokens=LONG)
                    )
                    for each in begun
                ]
                for each in begun:
                    await asyncio.to_thread(each.wait, WAIT_S)
                os.kill(pod.model_process(active), signal.SIGKILL)
                assert await asyncio.gather(*streams) == [quiet] * CLIENTS


@contextlib.contextmanager
def stopped(pod: RunningPool) -> Iterator[None]:
    """The pool, while this lasts."""
    pid = pod.runner.pids()["pool"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def dead(pod: RunningPool) -> Iterator[None]:
    """Killed, and no other one can start in the directory while this lasts."""
    with open(pod.directory / "pool.lock", "rb+") as file:
        os.kill(pod.runner.pids()["pool"], signal.SIGKILL)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


STARTED = f"""
listen: 127.0.0.1:8000
devices: [HOST-0]
margin: 0
defaults: {RULES}
models:
  good: {{backend: reference, model: MODEL, args: [--cache-tokens, 1000], preload: true}}
  broken: {{backend: reference, model: BROKEN, args: [--cache-tokens, 1000]}}
"""


@pytest.mark.slow
async def test_pod_that_is_stopped_leaves_nothing_behind_and_the_next_one_begins_anew(
    tmp_path_factory: pytest.TempPathFactory,
):
    """Method: `understudy up --pool` with a model whose file is cut off; Ctrl-C; again, with the
    file repaired. Neither an order is kept nor a fault."""
    temporary = tmp_path_factory.mktemp("t")  # sockets have short paths only
    async with started(temporary) as (pod, model):
        await auntil(lambda: pod.states()["good"] == "awake", "the model to be loaded", WAIT_S)
        status, body = await asyncio.to_thread(pod.ask, "broken", max_tokens=8)
        assert (status, json.loads(body)["error"]["code"]) == (503, "pool.failed")
        assert "model.safetensors: it is truncated" in body
        await asyncio.to_thread(pod.stream, "good", max_tokens=8)
        pod.order("good", Order.PIN)
    shutil.copy(model / "model.safetensors", temporary / "broken")
    async with started(temporary) as (pod, _):
        await auntil(lambda: pod.states()["good"] == "awake", "the model to be loaded", WAIT_S)
        assert not any(each["pinned"] for each in pod.status()["models"])
        assert pod.states()["broken"] == "cold"
        await asyncio.to_thread(pod.stream, "broken", max_tokens=8)


@asynccontextmanager
async def started(directory: Path) -> AsyncIterator[tuple[RunningPool, Path]]:
    """A pod that a user has started, and stops with Ctrl-C; and its model."""
    model, broken = await make_random_model(directory / "model"), directory / "broken"
    if not broken.exists():
        shutil.copytree(model, broken)
        os.truncate(broken / "model.safetensors", 100_000)
    offset, home, file = free_offset(), directory / "pod", directory / "pool.yaml"
    file.write_text(STARTED.replace("MODEL", str(model)).replace("BROKEN", str(broken)))
    flags = [f"--pool={file}", f"--port-offset={offset}"]
    with running_pod(home, directory / "said", flags) as up:
        yield RunningPool(home, 8000 + offset), model
        up.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(up.wait, WAIT_S) == 0
    await auntil(lambda: not processes_of(home), "all processes to be gone")
    assert [*home.glob("*.sock")] == []


def processes_of(directory: Path) -> list[int]:
    """Those that were told of it."""
    found = []
    for pid in pids():
        with contextlib.suppress(OSError):
            if str(directory).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found
