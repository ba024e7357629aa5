"""Goal: whatever happens to the gateway's process, no client is refused, and a planned replacement
loses nothing.

Method: real processes below a real init, killed, stopped and replaced under clients' connections;
the engine is a stand-in on the loop of the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from gateway.schema import GatewayStatus
from tests.documents import mismatches
from tests.gateway.gateways import FINAL, GatewayProcess, StandInEngine, command, ended
from tests.gateway.server.harness import CHAT, Answer, Client
from tests.gateway.stub_engine import text_of
from tests.helpers import auntil, on_loop_of, until

DOCUMENT = {"model": "chat", "stream": True, "max_tokens": 12}
STREAMS, CONNECTIONS = 8, 20
SAID = text_of(json.dumps(DOCUMENT).encode(), 12)


class World:
    """The gateway, an engine, and clients that stay until the end of the test."""

    def __init__(self, gateway: GatewayProcess, engine: StandInEngine) -> None:
        self.gateway, self.engine = gateway, engine
        self.clients: list[Client] = []

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.gateway.port))
        self.clients.append(client)
        return client

    async def ask(self) -> Client:
        """A stream on a connection of its own; a refusal fails the test."""
        client = await self.connect()
        client.ask(CHAT, DOCUMENT)
        return client

    async def begun(self, count: int) -> list[Client]:
        """So many streams that have begun, and wait for `release`."""
        self.engine.http.released.clear()
        self.engine.http.hold_after_groups = 4
        streams = [await self.ask() for _ in range(count)]
        for each in streams:
            await each.head()
            await each.chunk()
        return streams

    def release(self) -> None:
        self.engine.http.hold_after_groups = None
        self.engine.http.released.set()

    async def pid(self) -> int:
        return await asyncio.to_thread(lambda: self.gateway.pid)

    async def accepts(self, but: int) -> int:
        """Wait for a gateway that is not this one; its pid."""
        await auntil(lambda: self.gateway.accepts(but), "another gateway to accept")
        return await self.pid()

    async def command(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(command, self.gateway.directory, *words, code=code)


Scenario = Callable[[World], Awaitable[None]]


def run(gateway: GatewayProcess, scenario: Scenario) -> None:
    async def main() -> None:
        async with asyncio.timeout(110), AsyncExitStack() as stack:
            engine = StandInEngine(gateway.directory)
            await engine.enter(stack)
            await auntil(lambda: gateway.status()["upstream"], "the engine to be known")
            world = World(gateway, engine)
            try:
                await scenario(world)
            finally:
                for client in world.clients:
                    client.close()

    asyncio.run(main())


in_world = on_loop_of("gateway", "world", run)


def whole(answer: Answer) -> bool:
    return answer.is_whole and answer.text() == SAID


async def rest_is_whole(stream: Client) -> bool:
    body, is_whole = await stream.chunks()
    return is_whole and b"[DONE]" in body


# ------------------------------------------------------------------ deaths


@in_world
async def test_killed_gateway_refuses_nobody_and_the_next_one_answers_who_waits(world: World):
    """Goal: its death costs what is in it. Method: SIGKILL five times with a stream in it; at once
    new connections, of which each is answered by the next one."""
    for _ in range(5):
        victim = await world.pid()
        (cut,) = await world.begun(1)
        os.kill(victim, signal.SIGKILL)
        waiting = [await world.ask() for _ in range(CONNECTIONS)]
        world.release()
        assert all([whole(await each.answer()) for each in waiting])
        assert not await rest_is_whole(cut)
        await world.accepts(but=victim)
    restarts = (await asyncio.to_thread(world.gateway.status))["restarts"]
    assert restarts >= 5


# ------------------------------------------------------------------ replacements


@pytest.mark.parametrize("by", ["command", "signal"])
@in_world
async def test_replacement_loses_no_stream_and_refuses_no_connection(world: World, by: str):
    """Goal: nobody sees it. Method: replace it under streams that have begun, with new connections
    all the while; the old process finishes its streams, then exits, and its memory is shared."""
    await auntil(world.gateway.is_alone, "one gateway")
    old, before = await world.pid(), await asyncio.to_thread(world.gateway.status)
    assert mismatches(before, GatewayStatus) == []  # with an engine's hello
    streams = await world.begun(STREAMS)
    if by == "signal":
        assert world.gateway.process is not None
        world.gateway.process.send_signal(signal.SIGHUP)
    else:
        document = json.loads((await world.command("replace", "--json")).stdout)
        assert (document["old_pid"], document["in_flight"]) == (old, STREAMS)
    newcomers = []
    while not await asyncio.to_thread(world.gateway.accepts, old):
        newcomers.append(await world.ask())
    newcomers += [await world.ask() for _ in range(CONNECTIONS)]
    both = await asyncio.to_thread(world.gateway.status)
    assert both["predecessor"] == old
    assert both["memory_bytes_max"] == before["memory_bytes_max"] // 2
    busy = await world.command("replace", code=1)
    assert "gateway.restart_busy" in busy.stderr
    world.release()
    assert all([whole(await each.answer()) for each in newcomers])
    assert all([await rest_is_whole(each) for each in streams])
    await auntil(lambda: ended(old), "the old one to exit")
    await auntil(world.gateway.is_alone, "its end to be seen")
    after = await asyncio.to_thread(world.gateway.status)
    assert after["memory_bytes_max"] == before["memory_bytes_max"]
    assert after["restarts"] == before["restarts"]


@in_world
async def test_request_on_a_connection_that_the_old_gateway_accepted_is_answered(
    world: World,
):
    """Goal: a client that has just connected sees nothing of a replacement. Method: connect,
    replace the gateway under a stream, and send the request only once the successor accepts."""
    await auntil(world.gateway.is_alone, "one gateway")
    old = await world.pid()
    (stream,) = await world.begun(1)
    late = await world.connect()
    await auntil(lambda: world.gateway.status()["load"]["connections"] == 2, "it to be accepted")
    await world.command("replace")
    await world.accepts(but=old)
    late.ask(CHAT, DOCUMENT)
    world.release()
    assert whole(await late.answer())
    assert await rest_is_whole(stream)
    await auntil(lambda: ended(old), "the old one to exit")


@in_world
async def test_successor_that_dies_costs_no_stream_of_the_old_one(world: World):
    """Goal: the newest gateway that lives accepts. Method: replace it under a stream, and kill the
    successor once it accepts; a newcomer is answered, and the stream is whole."""
    await auntil(world.gateway.is_alone, "one gateway")
    old = await world.pid()
    (stream,) = await world.begun(1)
    await world.command("replace")
    successor = await world.pid()
    os.kill(successor, signal.SIGKILL)
    await auntil(lambda: ended(successor), "the successor to die")  # it may accept until then
    newcomer = await world.ask()
    world.release()
    assert whole(await newcomer.answer())
    assert await rest_is_whole(stream)
    await auntil(lambda: ended(old), "the old one to exit")
    await auntil(world.gateway.is_alone, "one gateway")


def test_replacement_that_cannot_work_is_refused_and_the_gateway_serves_on(
    make_gateway: Callable[..., GatewayProcess], lasting: GatewayProcess, tmp_path
):
    """Goal: a command that tells the truth. Method: a file of keys that has none any more; and a
    gateway without an init."""
    lasting.close()
    keys = tmp_path / "keys"
    keys.write_text("sk-1\n")
    gateway = make_gateway("--api-keys", str(keys)).start()
    pid = gateway.pid
    keys.write_text("\n")
    failed = command(gateway.directory, "replace", code=1)
    assert "gateway.restart_failed" in failed.stderr
    assert f"pid {pid} serves on" in failed.stderr
    assert gateway.pid == pid
    gateway.close()
    alone = make_gateway()
    alone.has_init = False
    alone.start()
    assert "gateway.no_init" in command(alone.directory, "replace", code=1).stderr


# ------------------------------------------------------------------ ends


def test_a_second_gateway_is_refused_and_the_first_serves_on(
    gateway: GatewayProcess, make_gateway: Callable[..., GatewayProcess]
):
    """Goal: two never share a directory by accident. Method: start another below its own init."""
    pid = gateway.pid
    second = make_gateway()
    second.environ |= FINAL
    second.log_path += ".second"
    second.spawn()
    assert second.wait() == 1
    assert f"pid {pid} holds" in second.log()
    assert gateway.pid == pid


@in_world
async def test_sigterm_accepts_no_more_and_ends_once_the_streams_have(world: World):
    """Goal: a drain. Method: SIGTERM during a stream; a newcomer waits in the backlog meanwhile and
    is answered by the next gateway."""
    (stream,) = await world.begun(1)
    assert world.gateway.process is not None
    world.gateway.process.send_signal(signal.SIGTERM)
    await auntil(lambda: world.gateway.status()["stopping"], "the stop to begin")
    await auntil(lambda: not world.gateway.status()["accepting"], "it to accept no more")
    ready = await asyncio.to_thread(world.gateway.get, "ready")
    assert ready == (503, {"ok": False, "reason": "stopping"})
    newcomer = await world.ask()
    world.release()
    assert await rest_is_whole(stream)
    assert await asyncio.to_thread(world.gateway.wait) == 0
    world.gateway.spawn()  # not in a thread, with whose end the kernel would kill it
    assert whole(await newcomer.answer())


@in_world
async def test_replaced_gateway_that_is_told_to_end_obeys(world: World):
    """Goal: the pod's end does not wait for an hour. Method: replace it under a stream, then
    SIGTERM to the init: twice, since streams have longer than this test."""
    await auntil(world.gateway.is_alone, "one gateway")
    old = await world.pid()
    await world.begun(1)
    await world.command("replace")
    assert world.gateway.process is not None
    world.gateway.process.send_signal(signal.SIGTERM)
    await auntil(lambda: not world.gateway.accepts(), "the new one to end")
    await asyncio.sleep(1.1)  # a second signal at once is the first one again
    world.gateway.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(world.gateway.wait)
    until(lambda: ended(old), "the old one to be gone")
