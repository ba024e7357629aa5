"""Goal: an upgraded connection is a pipe between client and engine.

Method: real sockets, and an engine that takes the upgrade.
"""

import asyncio

from tests.gateway.server.harness import with_bench
from tests.helpers import auntil


def test_a_tunnel(tmp_path):
    """Goal: a WebSocket's bytes pass both ways, and its ends end it."""

    async def scenario(bench):
        engine = await bench.active()

        async def route(request, reply):
            assert request.headers["sec-websocket-key"] == "k"
            reply.writer.write(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                b"X-Understudy-Engine: engine-0\r\nX-Understudy-Token: 1\r\n\r\nhello"
            )
            while data := await reply.reader.read(100):
                reply.writer.write(data.upper())

        engine.routes["/v1/realtime"] = route
        client = await bench.client()
        client.ask("/v1/realtime", Connection="Upgrade", Upgrade="websocket", Sec_WebSocket_Key="k")
        client.send(b"early ")
        status, headers = await client.head()
        assert (status, headers["upgrade"]) == (101, "websocket")
        client.send(b"late")
        assert await client.reader.readexactly(15) == b"helloEARLY LATE"
        engine.die()
        assert await client.rest() == b""

    with_bench(tmp_path, scenario)


def test_a_tunnel_into_which_more_is_sent_than_its_engine_takes(tmp_path):
    """Goal: no client fills this process through an engine that is slow. Method: an engine that
    reads nothing until it is told to; then all of it arrives."""
    size = 16 << 20

    async def scenario(bench):
        engine = await bench.active()
        read = 0

        async def route(request, reply):
            nonlocal read
            reply.writer.write(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                b"X-Understudy-Engine: engine-0\r\nX-Understudy-Token: 1\r\n\r\n"
            )
            await engine.released.wait()
            while read < size:
                read += len(await reply.reader.read(1 << 20))
            reply.writer.write(b"all")
            await asyncio.Event().wait()

        engine.routes["/v1/realtime"] = route
        client = await bench.client()
        client.ask("/v1/realtime", Connection="Upgrade", Upgrade="websocket", Sec_WebSocket_Key="k")
        await client.head()
        [upstream] = bench.doors.exchange.upstreams.values()
        client.send(b"x" * size)
        await auntil(lambda: upstream.unsent_bytes, "the engine's socket to be full")
        for _ in range(50):
            assert (await bench.once("/v1/models")).status == 200
        assert upstream.unsent_bytes < 1 << 20
        assert client.writer.transport.get_write_buffer_size() > 1 << 20
        engine.released.set()
        assert await client.reader.readexactly(3) == b"all"

    with_bench(tmp_path, scenario)
