"""Goal: vLLM engines take turns on a device that does not hold all of their KV memory, and clients
notice no more than pauses.

Method: the pod of a pool file with two models. Their sizes are measured first, while both are
awake; then the margin is set so that one KV cache fits. Every answer is compared with the one that
the model gave alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from plumbing.pod.paths import pool_socket
from plumbing.wire.blocking import BlockingClient
from pool.core.events import Order
from pool.messages import CATALOGUE, SetMsg
from tests.e2e.pools import RunningPool, running_pool
from tests.helpers import auntil
from tests.vllm.conftest import IS_INTERPRETED, WHOLE_DEADLINE_S
from understudy.status.gather import engine_parts, status_of
from understudy.up.models import VLLM_RANDOM_MODEL

DEVICE_BYTES = "64GiB"  # a limit on what is booked, not on what the machine has
POOL_FILE = f"""
devices: [HOST-0]
margin: 0
defaults: {{min_runtime: 100ms, max_wait: 100ms, drain_timeout: {{park: 50ms, cut: 60s}}}}
models:
  a: &model {{backend: vllm, model: MODEL, args: [{", ".join(VLLM_RANDOM_MODEL.arguments)}]}}
  b: *model
"""
MODELS = ("a", "b")
DEVICE = "HOST-0"
# Tokens: of a stream that does not end before it is parked, and of one that is soon.
LONG, SHORT = 250 if IS_INTERPRETED else 700, 8


def ask(pod: RunningPool, model: str, tokens: int) -> tuple[asyncio.Task[str], threading.Event]:
    """A stream, and when it has begun."""
    begun = threading.Event()
    asked = {"max_tokens": tokens, "ignore_eos": True}
    stream = asyncio.to_thread(pod.stream, model, f"to {model}", begun, **asked)
    return asyncio.create_task(stream), begun


async def interrupted(pod: RunningPool) -> tuple[asyncio.Task[str], asyncio.Task[str]]:
    """A long stream of `a` that has begun, and a short one of `b`, which cannot be answered while
    `a` is awake."""
    stream, begun = ask(pod, "a", LONG)
    await asyncio.to_thread(begun.wait, WHOLE_DEADLINE_S)
    return stream, ask(pod, "b", SHORT)[0]


def models(pod: RunningPool) -> dict[str, Any]:
    return {each["model"]: each for each in pod.status()["models"]}


async def make_tight(pod: RunningPool) -> None:
    """From now on a single KV cache fits: that of `a`, which stays awake."""
    (device,) = (each for each in pod.status()["devices"] if each["device"] == DEVICE)
    kv_bytes = models(pod)["b"]["bytes"][DEVICE]["kv"]
    with BlockingClient(pool_socket(str(pod.directory)), CATALOGUE) as client:
        margin = str(device["free_bytes"] + kv_bytes // 2)
        client.request(SetMsg("margin", margin), timeout_s=WHOLE_DEADLINE_S)
    pod.order("b", Order.SLEEP)
    await auntil(lambda: pod.states()["b"] == "warm", "b to be warm", WHOLE_DEADLINE_S)


async def backends(pod: RunningPool) -> dict[str, dict[str, int]]:
    """The processes of each model's engine, of which neither is without."""
    parts = {part.name: part for part in engine_parts(pod.directory)}
    found = {name: await status_of(parts[f"{name}-0"]) for name in MODELS}
    for name, status in found.items():
        assert status["backend"]["pids"], (models(pod)[name], status)
    return {name: status["backend"]["pids"] for name, status in found.items()}


@pytest.mark.slow
async def test_models_take_turns_and_every_answer_is_as_alone(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """A stream is parked for the other model's turn and goes on in the next one; the engine that is
    to be raised dies during a switch, and another one of the model is."""
    for name, value in VLLM_RANDOM_MODEL.env.items():
        monkeypatch.setenv(name, value)
    async with running_pool(tmp_path, monkeypatch, POOL_FILE, DEVICE_BYTES, model) as pod:
        pod.silence_s = 2 * WHOLE_DEADLINE_S  # both models load at once
        loading = {name: ask(pod, name, SHORT)[0] for name in MODELS}
        short = {name: await each for name, each in loading.items()}
        alone = await ask(pod, "a", LONG)[0]
        assert alone.startswith(short["a"])
        assert [each["estimated"] for each in models(pod).values()] == [False, False]
        assert all(min(each["bytes"][DEVICE].values()) > 0 for each in models(pod).values())
        await make_tight(pod)
        engines = await backends(pod)

        stream, other = await interrupted(pod)
        assert (await other, await stream) == (short["b"], alone)
        assert await backends(pod) == engines

        stream, other = await interrupted(pod)
        # A look may come so late that `a` has yielded, and is awake again.
        await auntil(
            lambda: pod.states()["a"] != "awake" or other.done(), "a to yield", WHOLE_DEADLINE_S
        )
        os.kill(engines["b"]["core"], signal.SIGKILL)
        assert (await other, await stream) == (short["b"], alone)
        again = await backends(pod)
        assert again["a"] == engines["a"]
        assert again["b"] != engines["b"]
