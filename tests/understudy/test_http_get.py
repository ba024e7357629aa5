"""Probes over real sockets: answers, errors, silence."""

from __future__ import annotations

import asyncio

from tests.helpers import auntil, free_port, open_fds
from understudy.http_get import BODY_MAX_BYTES, get


async def test_get_never_raises_and_says_why():
    """Goal: probes of servers in any state. Method: nobody, garbage, an endless body, silence."""
    before = len(open_fds())
    nobody = await get(f"http://127.0.0.1:{free_port()}/live")
    assert nobody.status == 0
    assert "cannot reach" in nobody.said()
    answers = [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (BODY_MAX_BYTES + 1)]
    answers.append(b'HTTP/1.1 503 No\r\n\r\n{"reason": "loading"}')

    async def reply(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/ready"
        assert (await get(url)).status == 0
        assert len((await get(url)).body) == BODY_MAX_BYTES
        assert (await get(url)).said() == "loading"

    async def stay(reader, writer):
        await reader.read()
        writer.close()

    async with await asyncio.start_server(stay, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/ready"
        assert "did not reply" in (await get(url, timeout_s=0.1)).said()
    await auntil(lambda: len(open_fds()) <= before, "descriptors to be closed")
