"""When a draining backend is done: asked of real TCP connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.backends.channel import QUIET_MS, is_quiet, silent_ms, until_done
from tests.helpers import auntil

BUDGET_S = 60.0
TRIES = 10


class Stalled(asyncio.Protocol):
    """A server's end that reads nothing by itself."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        self.transport = transport


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[asyncio.Transport, socket.socket]]:
    """A server's transport, and the client's socket."""
    loop, made = asyncio.get_running_loop(), asyncio.Queue[Stalled]()

    def protocol() -> Stalled:
        stalled = Stalled()
        made.put_nowait(stalled)
        return stalled

    server = await loop.create_server(protocol, "127.0.0.1", 0)
    client = socket.create_connection(server.sockets[0].getsockname())
    client.setblocking(False)
    stalled = await made.get()
    await auntil(lambda: hasattr(stalled, "transport"), "the connection")
    try:
        yield stalled.transport, client
    finally:
        client.close()
        stalled.transport.abort()
        server.close()


def test_fresh_connection_gets_its_time_and_then_is_quiet():
    """Goal: a new client has time to send its request. Method: one that sends nothing: not quiet
    at first, quiet by itself later, and `until_done` waits just for that."""

    async def main() -> None:
        for _ in range(TRIES):
            async with pair() as (transport, _):
                sock = transport.get_extra_info("socket")
                was_quiet = is_quiet(transport)
                if silent_ms(sock) >= QUIET_MS:
                    continue  # a busy machine has kept this process from looking in time
                assert not was_quiet
                assert await until_done(lambda: [transport], lambda: True, BUDGET_S)
                assert silent_ms(sock) >= QUIET_MS
                return
        pytest.fail(f"{TRIES} times this process looked too late")

    asyncio.run(main())


@pytest.mark.slow
def test_unread_request_and_unsent_answer_are_no_silence():
    """Goal: data in flight counts, however long ago it moved. Method: a byte that is not read;
    an answer larger than the client takes."""

    async def main() -> None:
        async with pair() as (transport, client):
            await until_done(lambda: [transport], lambda: True, BUDGET_S)
            client.send(b"G")
            await auntil(lambda: not is_quiet(transport), "the byte")
            assert not await until_done(lambda: [transport], lambda: True, 2 * QUIET_MS / 1000)
            assert silent_ms(transport.get_extra_info("socket")) == 0
        async with pair() as (transport, client):
            transport.write(b"x" * (16 << 20))
            assert not await until_done(lambda: [transport], lambda: True, 2 * QUIET_MS / 1000)
            assert transport.get_write_buffer_size()

    asyncio.run(main())


def test_request_under_way_is_waited_for_within_the_budget():
    """Goal: the bound holds. Method: never idle, and idle after a while; no connection at all."""

    async def main() -> None:
        assert not await until_done(list, lambda: False, 0.05)
        assert await until_done(list, lambda: True, 0.0)
        answers = iter([False, False, True])
        assert await until_done(list, lambda: next(answers), BUDGET_S)

    asyncio.run(main())


def test_what_is_no_open_tcp_connection_is_quiet():
    """Goal: nothing waits for what cannot speak. Method: a closed one, none, and a Unix socket."""

    async def main() -> None:
        async with pair() as (transport, _):
            transport.close()
            assert is_quiet(transport)
        assert is_quiet(None)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert silent_ms(ours) == float("inf")

    asyncio.run(main())
