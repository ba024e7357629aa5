"""A pod with models: each has locks of its own, and one gateway serves all at one address."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from tests.helpers import auntil, free_port
from tests.lockserver.engines import Engine
from tests.lockserver.gateways import Gateway


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def server(start_server, port):
    address = f"active=127.0.0.1:{port}"
    return start_server("--model", "chat", "--model", "coder", "--service", address)


class PoolGateway(Gateway):
    """What it was told of each model: `heard` is a model, then an engine and token, or a reason."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.told: list[tuple[str, object]] = []

    def granted(self, model: str, engine: str, token: int, era: str) -> None:
        self.told.append((model, (engine, token, era)))

    def idle(self, model: str, reason: str, is_final: bool) -> None:
        self.told.append((model, reason))

    def last(self, model: str) -> object:
        return next((word for name, word in reversed(self.told) if name == model), None)


async def test_engines_of_two_models_are_active_at_once_and_each_model_fails_over_alone(
    pod_dir, server
):
    """Goal: a model's locks exclude its own engines only. Method: two engines of one model and one
    of another want theirs; the first holder dies."""

    def waiting(locks):
        return locks if locks["active:chat"]["waiters"] else None

    names = ("chat-0", "chat-1", "coder-0")
    async with contextlib.AsyncExitStack() as stack:
        first, second, other = [
            await stack.enter_async_context(Engine(pod_dir, name, lock=f"active:{name[:-2]}"))
            for name in names
        ]
        tokens = {await first.hold(), await other.hold()}
        second.launch()
        second.want("active:chat")
        locks = await auntil(lambda: waiting(server.status()["locks"]), "the second to wait")
        assert list(locks) == ["active:chat", "active:coder"]
        queue = next(w for w in locks["active:chat"]["waits"] if w["reason"] == "queue")
        assert "--lock active:chat --to chat-1" in queue["fix"]
        first.reap()
        first.relent()
        assert await second.granted() > max(tokens) == 2  # one series
        assert server.status()["locks"]["active:coder"]["holder"]["engine"] == "coder-0"


async def test_pod_is_ready_with_an_engine_of_any_model_and_metrics_name_the_models_locks(
    pod_dir, server
):
    """Goal: probes and metrics know several models. Method: ask before and after a grant."""
    status, body = server.get("/ready")
    assert (status, json.loads(body)["reason"]) == (503, "active_0_models")
    page = server.get("/metrics")[1]
    assert 'understudy_lock_held{lock="active:coder"} 0.0' in page
    assert 'understudy_lock_service_state{lock="active",state="lent"}' in page
    async with Engine(pod_dir, "coder-0", lock="active:coder") as engine:
        token = await engine.hold()
        status, body = await asyncio.to_thread(server.get, "/ready")
        assert (status, json.loads(body)["engines"]) == (200, {"coder": "coder-0"})
        page = (await asyncio.to_thread(server.get, "/metrics"))[1]
        assert f'understudy_lock_token{{lock="active:coder"}} {float(token)}' in page


async def test_gateway_borrows_once_and_is_told_of_every_model(pod_dir, server, port):
    """Goal: one address and one connection serve all models. Method: a gateway that borrows
    `active`; an engine of one model is granted its lock, the other model has none."""
    async with PoolGateway(pod_dir) as gateway:
        await gateway.wait_lent()
        await auntil(lambda: gateway.last("chat") and gateway.last("coder"), "two reasons")
        assert "the active:chat lock is free" in str(gateway.last("chat"))
        async with Engine(pod_dir, "chat-0", lock="active:chat") as engine:
            token = await engine.hold()
            await auntil(lambda: isinstance(gateway.last("chat"), tuple), "the grant")
            assert gateway.last("chat") == ("chat-0", token, server.status()["era"])
            assert "free" in str(gateway.last("coder"))
        assert gateway.heard == []  # nothing of a lock without a model
        assert list(server.status()["service"]) == ["active"]
