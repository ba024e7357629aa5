"""Goal: an engine that rests costs a wait, and no request: whoever comes wakes it and is answered.

Method: a real gateway and lock server with a stand-in for an engine, in processes that are killed
and stopped while the engine rests. Deaths of engines at rest are in `tests/e2e`.
"""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from plumbing.pod.messages import Tier
from tests.gateway.gateways import GatewayProcess, LockServer
from tests.gateway.resting_engine import RestingEngineProcess
from tests.helpers import until

ANSWER_S = 60.0
HOLD_MS = "60000"  # no request of these tests is to be refused, however busy the machine is


@pytest.fixture
def engine(lock_server: LockServer) -> Iterator[RestingEngineProcess]:
    """It is active; the lock is free again afterwards."""
    engine = RestingEngineProcess(lock_server.directory)
    engine.reaches("active")
    yield engine
    engine.kill()
    until(lambda: lock_server.lock()["state"] == "free", "the lock to be free")


@pytest.fixture
def started(make_gateway):
    """`started(*flags)`: a gateway that accepts."""

    def start(*flags: str) -> GatewayProcess:
        gateway: GatewayProcess = make_gateway(*flags)
        return gateway.start()

    return start


def post(port: int) -> tuple[int, dict[str, Any], Any]:
    """A request; its status, body and headers."""
    body = json.dumps({"max_tokens": 4, "prompt": "x"}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            return reply.status, json.loads(reply.read()), reply.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), error.headers


def door(gateway: GatewayProcess) -> str:
    return str(gateway.status()["rest"]["door"])


def test_with_manual_wakes_a_request_is_told_how_to_wake_the_engine(
    engine: RestingEngineProcess, started
):
    """Goal: 503 after the hold, with a stable code; not ready; an operator's wake is enough."""
    engine.shall(Tier.WARM)
    engine.reaches("resting")
    gateway = started("--wake", "manual", "--hold-ms", "200")
    until(lambda: gateway.get("ready")[1]["reason"] == "resting", "the gateway to know")
    assert gateway.get("ready")[0] == 503
    status, body, headers = post(gateway.port)
    assert (status, body["error"]["code"]) == (503, "gateway.resting")
    assert "understudy wake" in body["error"]["message"]
    assert headers["Retry-After"] == "1"
    assert engine.shall().goal is Tier.WARM
    engine.shall(Tier.AWAKE)
    until(lambda: gateway.get("ready")[1]["reason"] == "engine_active", "the wake")
    # The door opens with the engine's next word, and requests are held for no longer than 200 ms.
    until(lambda: post(gateway.port)[0] == 200, "an answer")


@pytest.mark.slow
def test_a_supervisor_that_does_not_answer_is_a_visible_reason(
    engine: RestingEngineProcess, started
):
    """Goal: a deadline, a sentence, and everything goes on afterwards. Method: SIGSTOP of an engine
    that rests."""
    engine.shall(Tier.WARM)
    engine.reaches("resting")
    gateway = started("--hold-ms", HOLD_MS)
    until(lambda: door(gateway) == "shut", "the gateway to know that it rests")
    engine.signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        try:
            until(lambda: gateway.status()["rest"]["engine"] is None, "the gateway to give it up")
            assert "has not answered for" in str(gateway.status()["rest"]["problem"])
            assert door(gateway) == "open"
            reply = pool.submit(post, gateway.port)
        finally:
            engine.signal(signal.SIGCONT)
        assert reply.result()[0] == 200
