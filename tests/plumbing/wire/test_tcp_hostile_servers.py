"""Connecting over TCP to the wrong server fails in time, with a reason, and leaves nothing open,
also if it is cancelled.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from plumbing.errors import UnreachableError
from plumbing.wire import connection
from plumbing.wire.frames import encode_frame
from plumbing.wire.messages import FaultMsg, HelloMsg
from plumbing.wire.tcp import connect_tcp
from plumbing.wire.tcp_address import TcpAddress
from tests.helpers import auntil, open_fds
from tests.plumbing.wire.certificates import Authority, shared
from tests.plumbing.wire.echo import CATALOGUE, LOOPS, Echo, run_on
from tests.plumbing.wire.tcp_rig import Client, answers, gone, heard, serving, settings

loops = pytest.mark.parametrize("loop", LOOPS)


@loops
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x15\x03\x01\x00\x02\x02\x28", "not a frame of this protocol"),
        (encode_frame(CATALOGUE.encode(Echo("hello yourself"), 1), 0), "received echo instead"),
        (b"", "did not answer within"),
        (None, "before it sent welcome"),
    ],
    ids=["a TLS alert", "no welcome", "silence", "the end"],
)
def test_tcp_server_that_does_not_send_welcome(
    loop: str, data: bytes | None, words: str, monkeypatch: pytest.MonkeyPatch
):
    """Goal: whatever answers at the address, connecting fails in time with a reason, the handler is
    not called, and nothing is left open. Method: a server of raw bytes, which does not close by
    itself."""
    monkeypatch.setattr(connection, "FLUSH_DEADLINE_S", 0.1)

    async def main() -> None:
        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peers.append((reader, writer))
            if data is None:
                writer.close()
            elif data:
                writer.write(data)

        client, tls = Client(), shared().server_context()
        for _ in range(2):  # libuv opens one file of its own at the first connection
            peers: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
            before = len(open_fds())
            server = await asyncio.start_server(say, "127.0.0.1", 0, ssl=tls)
            address = TcpAddress("127.0.0.1", server.sockets[0].getsockname()[1])
            with pytest.raises(UnreachableError, match=words) as caught:
                await connect_tcp(
                    address, CATALOGUE, client, shared(), 0.3 if data == b"" else 30.0
                )
            assert caught.value.code == "wire.unreachable"
            for reader, writer in peers:
                said = [type(message) for message in await heard(reader)]  # until it closes
                assert data is None or said in ([HelloMsg], [HelloMsg, FaultMsg])
                await gone(writer)
            server.close()
            await server.wait_closed()
        await auntil(lambda: len(open_fds()) <= before, "everything to be closed")
        assert (client.opened_count, client.reasons) == (0, [])

    run_on(loop, main())


@loops
@pytest.mark.parametrize("hosts", [("lock.example.org",), ("10.0.0.1",)])
def test_tcp_server_certificate_must_have_the_expected_name(
    loop: str, hosts: tuple[str, ...], tmp_path: Path
):
    """Goal: an engine's certificate is not accepted as the lock server's: the name is checked.
    Method: a server whose certificate, of the right CA, names another host."""

    async def main() -> None:
        ca = Authority(tmp_path)
        async with serving(ca.issue("lockserver", hosts=hosts)) as (_, address):
            with pytest.raises(UnreachableError, match="mismatch"):
                await connect_tcp(address, CATALOGUE, Client(), ca.issue("engine-0"))

    run_on(loop, main())


@loops
def test_tcp_cancelled_connect_leaves_nothing_open(loop: str, tmp_path: Path):
    """Goal: cancelling at any moment of connecting closes the socket, and the handler's `opened`
    and `closed` are called equally often. Method: cancel after one, two, three turns of the loop
    and so on, until it connects first."""

    async def main() -> None:
        ours, theirs = settings(tmp_path)
        client = Client()
        async with serving(ours) as (server, address):
            assert await answers(address, theirs)
            await auntil(lambda: not server.connections, "the first to be gone")
            before = len(open_fds())
            for turns in range(2000):
                coroutine = connect_tcp(address, CATALOGUE, client, theirs)
                task = asyncio.ensure_future(coroutine)
                for _ in range(turns):
                    await asyncio.sleep(0)
                is_late = task.done()
                task.cancel()
                with suppress(asyncio.CancelledError):
                    (await task).close("enough")
                await auntil(lambda: len(client.reasons) == client.opened_count, "the ends")
                if is_late:
                    break
            assert is_late
            await auntil(lambda: not server.connections and not server._handshakes, "the ends")
            await auntil(lambda: len(open_fds()) == before, "everything to be closed")

    run_on(loop, main())
