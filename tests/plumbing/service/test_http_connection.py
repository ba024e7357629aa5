"""One request and one answer on each connection: methods, versions, what follows, and the stop."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import uvloop

from tests.plumbing.service.test_http import fetch, serving


async def exchange(port: int, data: bytes) -> tuple[bytes, bytes]:
    """The head and the body that follow `data`, until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(30):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return head, body


def test_head_has_the_headers_of_get_and_no_body():
    """Goal: load balancers ask with HEAD. Method: both, compared."""

    async def main():
        async with serving() as http:
            status, headers, body = await fetch(http.port, "/ready", "HEAD")
            of_get = await fetch(http.port, "/ready")
            assert (status, headers, body) == (*of_get[:2], "")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST /live HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405"),
        (b"OPTIONS * HTTP/1.1\r\n\r\n", b"404"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        (b"GET /live HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", b"200"),
        (b"GET http://x/live?a HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"GET //live HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
        (b"GET /live HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /live HTTP/1.1\r\nHost: x\r\n\r\nGET /live HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"GET /live HTTP/1.1\r\nConnection: close\r\nHost: x\r\n\r\n\r\nnonsense", b"200"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 30_000, b"400"),
    ],
    ids=[
        *("body", "asterisk", "connect", "http2", "upgrade", "proxy", "slashes", "http-1.0"),
        *("pipelined", "nonsense-behind", "head-too-large"),
    ],
)
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_each_request_has_one_answer(loop, data, status):
    """Goal: whatever is asked, one answer, and the connection ends. Method: odd requests."""

    async def main():
        async with serving() as http:
            head, body = await exchange(http.port, data)
            assert head.split()[1] == status
            assert b"Connection: close" in head
            assert b"HTTP/1.1 " not in body

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_stop_sends_what_was_answered():
    """Goal: an answer is not cut by the stop. Method: one larger than the buffers, whose reader
    starts when the server stops."""

    async def main():
        async with serving(status=lambda: {"x": "x" * 8_000_000}) as http:
            reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
            writer.write(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            _, body = await asyncio.gather(http.stop(), reader.read())
            assert len(body) > 8_000_000
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    asyncio.run(main())
