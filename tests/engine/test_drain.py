"""When a draining backend is done: asked of a real TCP connection."""

from __future__ import annotations

import asyncio
import socket

from engine.backends.channel import until_done


async def test_drain_waits_for_requests_and_unsent_answers_within_its_budget():
    """Method: never idle, idle after a while, and an answer larger than the client takes; a
    connection that is closed, or not there any more, holds nothing up."""
    assert not await until_done(list, lambda: False, 0.05)
    answers = iter([False, False, True])
    assert await until_done(list, lambda: next(answers), 60)
    made = asyncio.get_running_loop().create_future()

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.set_result(writer.transport)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()):
        transport = await made
        assert await until_done(lambda: [transport, None], lambda: True, 60)
        transport.write(b"x" * (16 << 20))
        assert not await until_done(lambda: [transport], lambda: True, 0.05)
        transport.abort()
        assert await until_done(lambda: [transport], lambda: True, 60)
    server.close()
