"""Goal: a client of a front reads one whole answer, whatever becomes of the pods behind it.

Method: a front and pods, each the gateway's own shell with its sockets, in this process; stub
engines behind the pods. A pod dies as a process does: every socket of it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from gateway.core.events import EngineGranted, FleetRules
from gateway.core.fleet import Fleet
from gateway.core.pods import PodState
from gateway.server.exchange import GatewayExchange
from gateway.server.hop import HopDoor, fleet_security
from gateway.server.pods import PodLinks
from lockserver.certificates import create
from plumbing.gateway_protocol import WATCH_PATH, PodReport
from plumbing.pod.paths import engine_http_socket
from plumbing.service.clock import SystemClock
from plumbing.service.events import EventLog
from plumbing.wire.fds import OwnedFd
from tests.gateway.server.harness import CHAT, ERA, Answer, Client, configured, run
from tests.gateway.stub_engine import StubEngine, text_of
from tests.helpers import auntil

BODY = {"model": "stub", "stream": True, "max_tokens": 12, "messages": [{"role": "user"}]}


@dataclass
class BenchPod:
    """A pod: the gateway's shell with a door for fronts, and one engine."""

    name: str
    exchange: GatewayExchange
    hop: HopDoor
    engine: StubEngine

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.hop.port}"

    async def grant(self) -> None:
        self.exchange.told(EngineGranted(self.engine.name, self.engine.token, ERA))
        await auntil(self._is_greeted, "the engine's hello")

    def _is_greeted(self) -> bool:
        upstream = self.exchange.upstream()
        return upstream is not None and upstream.is_connected

    def kill(self) -> None:
        """All of its sockets."""
        self.engine.die()
        self.hop.close()
        for upstream in tuple(self.exchange.upstreams.values()):
            upstream.drop()


class FleetBench:
    """A front at `port`, and its pods."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.pods: list[BenchPod] = []
        self.fleet = Fleet(configured(directory).rules, FleetRules())
        settings = configured(directory)
        self.exchange = GatewayExchange(settings, lambda *event: None, fleet=self.fleet)
        self.clients: list[Client] = []
        self._task: asyncio.Task[None] | None = None

    async def pod(self, tls: str = "", **how: Any) -> BenchPod:
        name = f"pod-{len(self.pods)}"
        directory = os.path.join(self.directory, name)
        os.mkdir(directory, 0o700)
        exchange = GatewayExchange(configured(directory), lambda *event: None)
        hop = HopDoor(exchange, name, {}, lambda: None)
        hop.start("127.0.0.1", 0, fleet_security(tls) if tls else None)
        engine = StubEngine(engine_http_socket(directory, "engine-0"), "engine-0", 1, **how)
        await engine.start()
        pod = BenchPod(name, exchange, hop, engine)
        self.pods.append(pod)
        await pod.grant()
        return pod

    async def front(self, tls: str = "") -> None:
        """Accept, and hear every pod."""
        sock = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = sock.getsockname()[1]
        self.exchange.accept(OwnedFd(sock.detach()))
        names = ",".join(pod.address for pod in self.pods)
        log = EventLog("gateway", SystemClock())
        self.links = PodLinks(names, tls, 1_000.0, self.exchange, log)
        self._task = asyncio.create_task(self.links.run())
        await auntil(lambda: self.ready() == len(self.pods), "every pod's report")

    def ready(self) -> int:
        now_ms = self.exchange.now_ms()
        states = [pod.state(now_ms, 1_000.0) for pod in self.fleet.pods.values()]
        return states.count(PodState.READY)

    async def ask(self, document: Any, path: str = CHAT, **headers: str) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        client.ask(path, document, **headers)
        return client

    def of(self, pods: list[BenchPod] | None = None) -> BenchPod:
        """The pod that has a request now."""
        return next(pod for pod in self.pods if pod.exchange.requests)

    async def close(self) -> None:
        for client in self.clients:
            client.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.exchange.stop(0)
        for pod in self.pods:
            pod.kill()
            await pod.exchange.stop(0)


@asynccontextmanager
async def fleet(directory: Any) -> AsyncIterator[FleetBench]:
    made = FleetBench(str(directory))
    try:
        yield made
    finally:
        await made.close()


def check_whole(answer: Answer, document: dict[str, Any]) -> None:
    assert answer.status == 200
    assert answer.is_whole
    body = json.dumps(document).encode()
    assert answer.text() == text_of(body, document["max_tokens"])
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert b": u=" not in answer.body


@pytest.mark.parametrize("cut_bytes", [0, 40])
@pytest.mark.parametrize("groups", range(13))
def test_stream_whose_pod_dies_behind_any_group_goes_on_at_another_pod(groups, cut_bytes, tmp_path):
    async def test() -> None:
        async with fleet(tmp_path) as bench:
            for _ in range(2):
                await bench.pod()
            await bench.front()
            for pod in bench.pods:
                pod.engine.cut_after_groups, pod.engine.cut_bytes = groups, cut_bytes
            client = await bench.ask(BODY)
            await auntil(lambda: any(pod.engine.died.is_set() for pod in bench.pods), "a death")
            dead = next(pod for pod in bench.pods if pod.engine.died.is_set())
            for pod in bench.pods:
                pod.engine.cut_after_groups = None
            dead.kill()
            check_whole(await client.answer(), BODY)
            assert bench.fleet.losses["gone"] == 1

    run(test)


def test_answer_without_stream_is_asked_again_at_another_pod(tmp_path):
    document = {"model": "stub", "max_tokens": 4, "messages": []}

    async def test() -> None:
        async with fleet(tmp_path) as bench:
            for _ in range(2):
                pod = await bench.pod()
                pod.engine.routes[CHAT] = _wait_for_ever
            await bench.front()
            client = await bench.ask(document)
            await auntil(lambda: any(pod.engine.requests for pod in bench.pods), "the request")
            dead = bench.of()
            for pod in bench.pods:
                pod.engine.routes.clear()
            dead.kill()
            answer = await client.answer()
            assert answer.status == 200
            assert len(json.loads(answer.body)["choices"]) == 1

    run(test)


async def _wait_for_ever(*_: Any) -> None:
    await asyncio.Event().wait()


def test_engine_that_dies_is_followed_in_its_pod_under_a_newer_token(tmp_path):
    async def test() -> None:
        async with fleet(tmp_path) as bench:
            pod = await bench.pod(hold_after_groups=5)
            await bench.front()
            client = await bench.ask(BODY)
            await client.head()
            await auntil(lambda: bench.fleet.stats(0.0).by_state["streaming"] == 1, "the stream")
            pod.engine.die()
            pod.engine.token, pod.engine.hold_after_groups = 2, None
            await pod.engine.start()
            await pod.grant()
            body, is_whole = await client.chunks()
            check_whole(Answer(200, {}, body, is_whole), BODY)
            assert [each.journal is None for each in pod.engine.requests] == [True, False]
            assert not bench.fleet.losses

    run(test)


def test_stream_waits_where_no_pod_has_its_continuation_id(tmp_path):
    async def test() -> None:
        async with fleet(tmp_path) as bench:
            first = await bench.pod(hold_after_groups=3)
            await bench.front()
            client = await bench.ask(BODY)
            await auntil(lambda: bench.fleet.stats(0.0).by_state["streaming"] == 1, "the stream")
            other = await bench.pod(continuation_id="two")
            same = await bench.pod()
            bench.links.names._names = [("127.0.0.1", pod.hop.port) for pod in (first, other, same)]
            await auntil(lambda: bench.ready() == 3, "the new pods")
            first.kill()
            check_whole(await client.answer(), BODY)
            assert not other.engine.requests
            assert len(same.engine.requests) == 1

    run(test)


def test_pod_without_engine_refuses_within_a_second_and_another_one_answers(tmp_path):
    async def test() -> None:
        async with fleet(tmp_path) as bench:
            pods = [await bench.pod() for _ in range(2)]
            await bench.front()
            pods[0].engine.die()
            for _ in range(4):
                client = await bench.ask({**BODY, "messages": [{"role": "user", "n": _}]})
                document = {**BODY, "messages": [{"role": "user", "n": _}]}
                check_whole(await client.answer(), document)

    run(test)


def test_a_pods_own_refusal_reaches_the_client(tmp_path):
    async def test() -> None:
        async with fleet(tmp_path) as bench:
            await bench.pod()
            await bench.front()
            client = await bench.ask(None, "/understudy/hello")
            assert (await client.answer()).status == 404

    run(test)


def test_clients_headers_of_the_hop_do_not_pass_a_front(tmp_path):
    async def test() -> None:
        async with fleet(tmp_path) as bench:
            pod = await bench.pod()
            await bench.front()
            forged = {"X_Understudy_Journal": "3,1,1", "X_Understudy_Continuation_Id": "two"}
            client = await bench.ask(BODY, **forged)
            check_whole(await client.answer(), BODY)
            assert pod.engine.requests[0].journal is None

    run(test)


# ------------------------------------------------------------------ certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("tls") / "fleet")
    create(directory, ["understudy-pod"], "pod", "front")
    return directory


def test_front_and_pod_speak_tls_with_the_fleets_certificates(certificates, tmp_path):
    async def test() -> None:
        async with fleet(tmp_path) as bench:
            for _ in range(2):
                await bench.pod(tls=f"{certificates}/pod", hold_after_groups=4)
            await bench.front(tls=f"{certificates}/front")
            client = await bench.ask(BODY)
            await auntil(lambda: bench.fleet.stats(0.0).by_state["streaming"] == 1, "the stream")
            dead = bench.of()
            for pod in bench.pods:
                pod.engine.hold_after_groups = None
            dead.kill()
            check_whole(await client.answer(), BODY)

    run(test)


@pytest.mark.parametrize("who", ["pod", None])
def test_peer_without_a_fronts_certificate_hears_nothing(who, certificates, tmp_path):
    async def test() -> None:
        async with fleet(tmp_path) as bench:
            pod = await bench.pod(tls=f"{certificates}/pod")
            tls: dict[str, Any] = {}
            if who is not None:
                context = fleet_security(f"{certificates}/{who}").client_context()
                context.check_hostname = False
                tls = {"ssl": context, "server_hostname": "understudy-pod"}
            said = b""
            with contextlib.suppress(OSError, ssl.SSLError):
                address = ("127.0.0.1", pod.hop.port)
                reader, writer = await asyncio.open_connection(*address, **tls)
                writer.write(f"GET {WATCH_PATH} HTTP/1.1\r\nhost: pod\r\n\r\n".encode())
                said = await reader.read(1024)
                writer.transport.abort()
            assert b"incarnation" not in said

    run(test)


def test_report_names_the_engine_and_what_it_can_continue(tmp_path):
    async def test() -> None:
        async with fleet(tmp_path) as bench:
            pod = await bench.pod()
            reader, writer = await asyncio.open_connection("127.0.0.1", pod.hop.port)
            writer.write(f"GET {WATCH_PATH} HTTP/1.1\r\nhost: pod\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
            report = msgspec.json.decode(await reader.readline(), type=PodReport)
            model = report.models["stub"]
            assert (report.pod, model.engine, model.token) == ("pod-0", "engine-0", 1)
            assert (model.continuation_id, model.continuation, model.tier) == (
                "one",
                "exact",
                "awake",
            )
            pod.engine.token = 2
            pod.exchange.told(EngineGranted("engine-0", 2, ERA))
            while report.models["stub"].token != 2:
                report = msgspec.json.decode(await reader.readline(), type=PodReport)
            writer.transport.abort()

    run(test)
