"""Goal: an engine that rests costs a wait, and no request: whoever comes wakes it and is answered.

Method: a real gateway and lock server with stand-ins for engines, in processes that are killed and
stopped while the engine rests, and while it wakes.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from plumbing.pod.messages import Tier
from tests.gateway.gateways import GatewayProcess, LockServer
from tests.gateway.resting_engine import RestingEngineProcess
from tests.helpers import until

REAL = "gateway.cli"
ANSWER_S = 60.0
HOLD_MS = "60000"  # no request of these tests is to be refused, however busy the machine is


@pytest.fixture(scope="module")
def waking(lock_server: LockServer) -> Iterator[GatewayProcess]:
    gateway = GatewayProcess(lock_server, "--hold-ms", HOLD_MS, module=REAL)
    yield gateway
    gateway.close()


@pytest.fixture
def start_alone(waking: GatewayProcess, make_gateway) -> Callable[..., GatewayProcess]:
    """`start_alone(*flags)`: a gateway with these flags, in place of the one that tests share."""

    def start(*flags: str) -> GatewayProcess:
        waking.close()
        gateway = make_gateway(*flags)
        gateway.module = REAL
        return gateway.start()

    return start


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


class Engines(contextlib.ExitStack):
    """Those of one test; the lock is free again afterwards."""

    def __init__(self, lock_server: LockServer) -> None:
        super().__init__()
        self._lock_server = lock_server

    def start(self, name: str = "engine-0") -> RestingEngineProcess:
        engine = RestingEngineProcess(self._lock_server.directory, name)
        self.callback(engine.kill)
        return engine

    def active(self) -> RestingEngineProcess:
        engine = self.start()
        engine.reaches("active")
        return engine

    def resting(self) -> RestingEngineProcess:
        engine = self.active()
        engine.shall(Tier.WARM)
        engine.reaches("resting")
        return engine


@pytest.fixture
def engines(lock_server: LockServer) -> Iterator[Engines]:
    with Engines(lock_server) as engines:
        yield engines
    until(lambda: lock_server.lock()["state"] == "free", "the lock to be free")


def post(port: int, text: str = "x", **fields: object) -> tuple[int, dict[str, Any], Any]:
    """A request; its status, body and headers."""
    body = json.dumps({"max_tokens": 4, "prompt": text, **fields}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            return reply.status, json.loads(reply.read()), reply.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), error.headers


def who(reply: Future[tuple[int, dict[str, Any], Any]]) -> str:
    """The engine whose answer it is."""
    status, _, headers = reply.result()
    assert status == 200
    return str(headers["X-Understudy-Engine"])


def door(gateway: GatewayProcess) -> str:
    return str(gateway.status()["rest"]["door"])


def waits(gateway: GatewayProcess, count: int = 1) -> None:
    until(lambda: gateway.status()["load"]["waiting"] == count, "the request to wait")


def test_an_idle_engine_rests_and_a_request_wakes_it(
    engines: Engines, start_alone: Callable[..., GatewayProcess]
):
    """Goal: the whole circle, as status, probe, metrics and events tell it."""
    gateway = start_alone("--sleep-after", "1s")
    engine = engines.active()
    engine.reaches("resting")
    until(lambda: gateway.get("ready")[1]["reason"] == "resting", "the gateway to know")
    assert gateway.get("ready")[0] == 200
    assert gateway.status()["rest"]["engine"]["goal_by"] == "gateway"
    assert gateway.metric("understudy_gateway_engine_resting") == 1
    assert gateway.metric("understudy_gateway_sleeps_total") == 1
    text = subprocess.run(
        [sys.executable, "-m", REAL, "status", "--dir", gateway.directory],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "(gateway); a request wakes it" in text
    status, _, headers = post(gateway.port)
    assert (status, headers["X-Understudy-Engine"]) == (200, "engine-0")
    until(lambda: "gateway.woken" in gateway.events(), "the event")
    until(
        lambda: gateway.counts("understudy_gateway_wake_seconds_count", 1), "the wake to be counted"
    )
    assert {"gateway.sleep", "gateway.wake"} <= set(gateway.events())
    # It rests again, and nobody had to do anything.
    engine.reaches("resting")


def test_a_gateway_that_starts_while_the_engine_rests_wakes_it_for_a_request(
    waking: GatewayProcess, engines: Engines, lock_server: LockServer
):
    """Method: the whole gateway killed, and the lock server too, which nobody needs for a wake."""
    waking.start()
    engine = engines.resting()
    waking.ends(signal.SIGKILL)
    waking.start()
    until(lambda: door(waking) == "shut", "the gateway to know that it rests")
    lock_server.kill()
    try:
        assert post(waking.port)[0] == 200
        engine.reaches("active")
    finally:
        lock_server.start()


def test_with_manual_wakes_a_request_is_told_how_to_wake_the_engine(
    engines: Engines, start_alone: Callable[..., GatewayProcess]
):
    """Goal: 503 after the hold, with a stable code; not ready; an operator's wake is enough."""
    gateway = start_alone("--wake", "manual", "--hold-ms", "200")
    engine = engines.resting()
    until(lambda: gateway.get("ready")[1]["reason"] == "resting", "the gateway to know")
    assert gateway.get("ready")[0] == 503
    status, body, headers = post(gateway.port)
    assert (status, body["error"]["code"]) == (503, "gateway.resting")
    assert "understudy wake" in body["error"]["message"]
    assert headers["Retry-After"] == "1"
    assert engine.shall().goal is Tier.WARM
    engine.shall(Tier.AWAKE)
    until(lambda: gateway.get("ready")[1]["reason"] == "engine_active", "the wake")
    # Its child is told last, and holds nobody for longer than 200 ms.
    until(lambda: post(gateway.port)[0] == 200, "an answer")


@pytest.mark.slow
def test_a_supervisor_that_does_not_answer_is_a_visible_reason(
    waking: GatewayProcess, engines: Engines, pool: ThreadPoolExecutor
):
    """Goal: a deadline, a sentence, and everything goes on afterwards. Method: SIGSTOP of an engine
    that rests."""
    waking.start()
    engine = engines.resting()
    until(lambda: door(waking) == "shut", "the gateway to know that it rests")
    engine.signal(signal.SIGSTOP)
    try:
        until(lambda: waking.status()["rest"]["engine"] is None, "the gateway to give it up")
        assert "has not answered for" in str(waking.status()["rest"]["problem"])
        assert door(waking) == "open"
        reply = pool.submit(post, waking.port)
    finally:
        engine.signal(signal.SIGCONT)
    assert who(reply) == "engine-0"
