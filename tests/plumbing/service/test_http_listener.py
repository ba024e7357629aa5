"""Strangers at an HTTP port: what they send and hold costs them their connections, and a probe is
answered meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket

import pytest
import uvloop

from plumbing.service import http as http_server
from plumbing.service import process
from plumbing.service.metrics import Metrics
from tests.helpers import auntil, open_fds
from tests.plumbing.service.test_http import fetch, serving

HALF = b"GET /live HTTP/1.1\r\nHost: x\r\n"
WHOLE = HALF + b"\r\n"
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def run_on(loop, main):
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main)


@contextlib.contextmanager
def strangers(port: int, count: int, data: bytes = HALF):
    """`count` connections that have sent `data` and stay open on their side."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(stranger(port, data)) for _ in range(count)]


def stranger(port: int, data: bytes = HALF) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    with contextlib.suppress(ConnectionError):  # closed already
        sock.sendall(data)
    sock.setblocking(False)
    return sock


async def end_of(sock: socket.socket) -> bytes:
    """What arrives on `sock` until its other end closes it."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := await asyncio.get_running_loop().sock_recv(sock, 65536):
            data += more
    return data


async def flood(port: int, count: int, stack: contextlib.ExitStack) -> None:
    """More strangers than the backlog takes, with turns for the server in between."""
    for _ in range(count):
        stack.enter_context(stranger(port))
        await asyncio.sleep(0)


def http_sockets() -> int:
    return sum(target.startswith("socket:") for target in open_fds().values())


@LOOPS
def test_probe_is_answered_while_strangers_hold_every_connection(loop):
    """Goal: the port cannot be taken. Method: half requests, several times the limit, in order and
    all at once; then a probe, the metric, the problem, and the descriptors."""

    async def main():
        metrics = Metrics()
        async with serving(metrics=metrics) as http:
            limit = http.connections_max
            assert http.problem is None
            with contextlib.ExitStack() as stack:
                before = http_sockets()
                await flood(http.port, 3 * limit, stack)
                assert (await fetch(http.port, "/live"))[0] == 200
                # Both ends are here: those of the strangers, and the server's.
                await auntil(
                    lambda: http_sockets() - before <= 4 * limit, "the oldest to be closed"
                )
                assert len(http._open) <= limit
                _, _, page = await fetch(http.port, "/metrics")
                (line,) = [each for each in page.splitlines() if "http_connections" in each]
                assert float(line.split()[-1]) >= 2 * limit
                assert f"{limit} HTTP connections are open" in http.problem
                assert str(http.port) in http.problem

    run_on(loop, main())


def test_problem_is_named_only_while_it_lasts(monkeypatch):
    """Goal: status is about now. Method: the limit, then the time for which it is shown."""

    async def main():
        async with serving() as http:
            with strangers(http.port, http.connections_max + 1):
                await auntil(lambda: http.problem, "the limit")
            monkeypatch.setattr(http_server, "PROBLEM_S", 0.0)
            await auntil(lambda: http.problem is None, "the problem to be over")

    asyncio.run(main())


@LOOPS
@pytest.mark.parametrize("sent", [b"", HALF, b"GET /live HTTP/1.1\r\nX: "])
def test_connection_without_a_whole_request_is_closed_at_the_deadline(loop, sent, monkeypatch):
    """Goal: silence and half a head cost seconds. Method: a short deadline, and one who sends a
    byte now and then."""
    monkeypatch.setattr(http_server, "DEADLINE_S", 0.2)

    async def main():
        async with serving() as http:
            with strangers(http.port, 1, sent) as (quiet,), strangers(http.port, 1) as (drip,):
                async with asyncio.timeout(30):
                    closing = asyncio.ensure_future(end_of(drip))
                    while not closing.done():
                        with contextlib.suppress(ConnectionError):
                            drip.send(b"X")
                        await asyncio.sleep(0.01)
                    assert b"200" not in await end_of(quiet)

    run_on(loop, main())


@LOOPS
def test_reader_that_never_reads_its_answer_is_closed_at_the_deadline(loop, monkeypatch):
    """Goal: an answer holds no connection for ever. Method: one larger than all buffers."""
    monkeypatch.setattr(http_server, "DEADLINE_S", 0.2)

    async def main():
        async with serving(status=lambda: {"x": "x" * 50_000_000}) as http:
            request = b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n"
            with strangers(http.port, 1, request):
                await auntil(lambda: http._open, "the connection")
                await auntil(lambda: not http._open, "the connection to be closed")

    run_on(loop, main())


@LOOPS
@pytest.mark.parametrize(
    "data",
    [
        b"GET /live HTTP/1.1\r\n" + b"X: y\r\n" * 40_000,
        b"POST /live HTTP/1.1\r\nContent-Length: 400000\r\n\r\n" + b"x" * 400_000,
        b"POST /live HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 40_000,
    ],
    ids=["head", "body", "chunks"],
)
def test_request_larger_than_the_limit_ends_its_connection(loop, data):
    """Goal: a stranger's bytes are not kept. Method: heads and bodies far above the limit."""

    async def main():
        async with serving() as http:
            _, writer = await asyncio.open_connection("127.0.0.1", http.port)
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(30):
                    await writer.drain()
            await auntil(lambda: not http._open, "the connection to be closed")
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            assert (await fetch(http.port, "/live"))[0] == 200

    run_on(loop, main())


def test_share_of_descriptors_that_strangers_may_take():
    """Goal: most descriptors stay ours, however few there are. Method: real limits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit, expected in ((4096, 64), (512, 64), (256, 32), (64, 8)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            assert process.strangers_max(64) == expected
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@LOOPS
def test_out_of_descriptors_the_oldest_makes_room(loop):
    """Goal: a probe is answered although the process has no descriptor left. Method: a limit of
    what is open, while strangers hold some of it."""

    async def main():
        async with serving() as http:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with strangers(http.port, 3), socket.socket() as pending:
                await auntil(lambda: len(http._open) == 3, "the connections")
                taken: list[socket.socket] = []
                try:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_fds()) + 1, hard))
                    fill_descriptors(taken)
                    pending.setblocking(False)
                    pending.connect_ex(("127.0.0.1", http.port))
                    await auntil(lambda: "cannot accept" in (http.problem or ""), "the shortage")
                    pending.setblocking(True)
                    pending.sendall(WHOLE)
                    pending.setblocking(False)
                    async with asyncio.timeout(30):
                        assert b"200 OK" in await end_of(pending)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                    for sock in taken:
                        sock.close()

    run_on(loop, main())


def fill_descriptors(taken: list[socket.socket]) -> None:
    """Take every descriptor below the limit."""
    with contextlib.suppress(OSError):
        while True:
            taken.append(socket.socket())
