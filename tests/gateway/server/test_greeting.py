"""Greeting an engine that has just been granted: its socket comes a few milliseconds later."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest

import gateway.server.exchange
from gateway.server import responses
from gateway.server.client_listener import HttpDoors
from gateway.server.responses import greet
from plumbing.gateway_protocol import Hello
from plumbing.wire.fds import OwnedFd
from plumbing.wire.limits import FRAME_BYTES_MAX
from tests.gateway import stub_engine
from tests.gateway.server.harness import ERA, configured, with_bench
from tests.gateway.stub_engine import StubEngine
from tests.helpers import auntil


def test_engine_that_makes_its_socket_after_its_grant_is_greeted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: no stream waits for a second greeting. Method: greet first, then make the socket; an
    engine that makes none is given up."""
    path = str(tmp_path / "engine.sock")

    async def main() -> None:
        monkeypatch.setattr(responses, "SOCKET_TRIES", 0)
        with pytest.raises(FileNotFoundError):
            await greet(path)
        monkeypatch.setattr(responses, "SOCKET_TRIES", 10_000)
        greeted = asyncio.create_task(greet(path))
        await asyncio.sleep(0)  # it has found no socket
        engine = StubEngine(path, "engine-7", token=3)
        await engine.start()
        try:
            hello = await greeted
        finally:
            engine.die()
        assert (hello.engine, hello.token) == ("engine-7", 3)

    asyncio.run(main())


def test_spare_greets_an_engine_once_it_is_given_clients(tmp_path, monkeypatch):
    """Goal: an engine's first answers are not for a child that needs none, and a child that is
    promoted meanwhile waits for nothing. Method: doors are granted an engine while they have no
    socket to accept from, and then get one."""
    greeted: list[str] = []

    async def recorded(path: str) -> Hello:
        greeted.append(path)
        return await greet(path)

    monkeypatch.setattr(gateway.server.exchange, "greet", recorded)
    monkeypatch.setattr(gateway.server.exchange, "SPARE_GREETS_AFTER_S", 3600.0)

    async def scenario(bench):
        engine = await bench.engine()
        spare = HttpDoors(configured(str(tmp_path)), bench)
        spare.granted(engine.name, engine.token, ERA)
        for _ in range(10):  # turns of the loop; it would greet in the first one
            await asyncio.sleep(0)
        assert not greeted
        service = socket.create_server(("127.0.0.1", 0))
        spare.accept(OwnedFd(service.detach()), "the service")
        await auntil(lambda: spare.beat(1).upstream.is_connected, "the hello")
        await spare.stop(0)

    with_bench(tmp_path, scenario)


@pytest.mark.parametrize(
    ("changes", "is_greeted"),
    [
        ({"problem": "x" * 300_000}, True),
        ({"continuation": "x" * 300_000}, False),
        ({"continuation_id": "x" * 300_000}, False),
        ({"models": [[[]]] * 50_000}, False),
    ],
    ids=["problem", "class", "id", "models"],
)
def test_a_hello_of_any_size_fits_into_a_beat(tmp_path, monkeypatch, changes, is_greeted):
    """Goal: what an engine says of itself never ends this process, nor its successors, which would
    hear the same. Method: fields of 300 KB; the beat is sent as it is."""
    said = stub_engine.hop_json
    monkeypatch.setattr(stub_engine, "hop_json", lambda hello: said(hello) | changes)

    async def scenario(bench):
        engine = await bench.engine()
        bench.doors.granted(engine.name, engine.token, ERA)
        sign = "xxx" if is_greeted else "gave no hello"
        await auntil(lambda: sign in bench.doors.beat(1).upstream.problem, "its hello to be seen")
        beat = bench.doors.beat(1)
        assert beat.upstream.is_connected == is_greeted
        assert len(msgspec.msgpack.encode(beat)) < FRAME_BYTES_MAX

    with_bench(tmp_path, scenario)
