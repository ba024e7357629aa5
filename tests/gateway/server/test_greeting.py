"""Greeting an engine that has just been granted: its socket comes a few milliseconds later."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.server import greeting
from gateway.server.greeting import greet
from tests.gateway.stub_engine import StubEngine


def test_engine_that_makes_its_socket_after_its_grant_is_greeted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: no stream waits for a second greeting. Method: greet first, then make the socket; an
    engine that makes none is given up."""
    path = str(tmp_path / "engine.sock")

    async def main() -> None:
        monkeypatch.setattr(greeting, "SOCKET_WAITS_S", ())
        with pytest.raises(FileNotFoundError):
            await greet(path)
        monkeypatch.setattr(greeting, "SOCKET_WAITS_S", (0.001,) * 10_000)
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
