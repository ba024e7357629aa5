"""A TCP server's address, its end, the renewal of its certificates; and connecting to the wrong
server, which fails in time, with a reason, and leaves nothing open."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from plumbing.errors import UnderstudyError, UnreachableError, UsageError
from plumbing.wire import connection, tcp
from plumbing.wire.frames import encode_frame
from plumbing.wire.messages import FaultMsg, HelloMsg
from plumbing.wire.tcp import Security, TcpServer, connect_tcp
from plumbing.wire.tcp_address import TcpAddress
from tests.helpers import auntil, open_fds
from tests.plumbing.wire.certificates import Authority, shared, write_secret
from tests.plumbing.wire.echo import CATALOGUE, LOOPS, Echo, EchoHandler, run_on
from tests.plumbing.wire.tcp_rig import (
    Client,
    answers,
    gone,
    heard,
    serving,
    settings,
)

loops = pytest.mark.parametrize("loop", LOOPS)


def test_tcp_address_in_use_or_of_another_host_is_an_error(tmp_path: Path):
    """Goal: a port in use, and an address that is not this host's, are errors that name the address
    and the fix; nothing leaks."""

    async def main() -> None:
        _, theirs = settings(tmp_path)
        async with serving(shared()) as (_, address):
            before = len(open_fds())
            for taken, code in (
                (address, "wire.address_in_use"),
                (TcpAddress("192.0.2.1", 7443), "wire.cannot_listen"),
            ):
                options = {"service": "echo", "security": theirs}
                server = TcpServer(taken, CATALOGUE, EchoHandler(), **options)
                with pytest.raises(UnderstudyError) as caught:
                    await server.start()
                assert caught.value.code == code
                assert str(taken) in caught.value.message
            assert len(open_fds()) == before

    asyncio.run(main())


def test_tcp_server_does_not_start_with_files_that_cannot_be_used(tmp_path: Path):
    """Goal: unusable files are detected at the start, not by the first client."""

    async def main() -> None:
        security = Security(*[str(tmp_path / "none")] * 3)
        options = {"service": "echo", "security": security}
        server = TcpServer(TcpAddress("127.0.0.1", 0), CATALOGUE, EchoHandler(), **options)
        with pytest.raises(UsageError, match="No such file"):
            await server.start()

    asyncio.run(main())


def test_tcp_over_ipv6_and_ipv4_on_one_socket(tmp_path: Path):
    """Goal: a server on [::] serves both, and shows IPv4 peers as such. Method: one of each."""

    async def main() -> None:
        authority = Authority(tmp_path)
        theirs = authority.issue("engine-0")
        ours = authority.issue("lockserver", hosts=("::1", "127.0.0.1"))
        options = {"service": "echo", "security": ours}
        server = TcpServer(TcpAddress("::", 0), CATALOGUE, EchoHandler(), **options)
        try:
            await server.start()
        except UnderstudyError as error:
            pytest.skip(f"no IPv6 here: {error}")
        for host in ("::1", "127.0.0.1"):
            address = TcpAddress(host, server.port)
            conn = await connect_tcp(address, CATALOGUE, Client(), theirs)
            (peer,) = [other.peer for other in server.connections]
            assert peer.host == host
            conn.close("done")
            await auntil(lambda: not server.connections, "the end")
        await server.close()

    asyncio.run(main())


@loops
def test_tcp_server_close_ends_connections_and_handshakes(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: closing leaves nothing open, finished or not. Method: one connection, and one socket
    that never starts its handshake, which has a very long deadline."""
    monkeypatch.setattr(tcp, "HANDSHAKE_DEADLINE_S", 600.0)

    async def main() -> None:
        ours, theirs = settings(tmp_path)
        handler, client = EchoHandler(), Client()
        for _ in range(2):  # libuv opens one file of its own at the first connection
            before = len(open_fds())
            async with serving(ours, handler) as (server, address):
                await connect_tcp(address, CATALOGUE, client, theirs)
                mute = socket.create_connection((address.host, address.port))
                await auntil(lambda: server._handshakes, "its handshake to begin")
                await asyncio.wait_for(server.close(), 30)
            assert server.connections == set()
            await auntil(lambda: len(client.reasons) == len(handler.reasons), "the client to hear")
            mute.close()
            await server.close()
        assert handler.reasons == ["echo is stopping"] * 2
        await auntil(lambda: len(open_fds()) <= before, "everything to be closed")

    run_on(loop, main())


@loops
def test_tcp_renewed_certificates_are_used_by_new_connections(loop: str, tmp_path: Path):
    """Goal: a new CA applies to the next connection without a restart, open ones stay open, and a
    broken file is a visible problem that keeps the old ones in use. Method: renew while serving."""

    async def main() -> None:
        (tmp_path / "new").mkdir()
        old, new = Authority(tmp_path), Authority(tmp_path / "new")
        ours, theirs = old.issue("lockserver"), old.issue("engine-0")
        assert ours.cert
        assert ours.key
        assert ours.ca
        client = Client()
        async with serving(ours) as (server, address):
            conn = await connect_tcp(address, CATALOGUE, client, theirs)
            write_secret(ours.cert, b"nonsense")
            assert "stay in use" in str(server.security_problem)
            assert await answers(address, theirs)
            renewed = new.issue("lockserver")
            for path, source in (
                (ours.cert, renewed.cert),
                (ours.key, renewed.key),
                (ours.ca, renewed.ca),
            ):
                assert source
                write_secret(path, Path(source).read_bytes())
            assert server.security_problem is None
            assert await answers(address, new.issue("engine-1"))
            stale = Security(theirs.cert, theirs.key, renewed.ca)
            with pytest.raises(UnreachableError):
                await connect_tcp(address, CATALOGUE, Client(), stale)
            conn.send(Echo("as before"))
            await auntil(lambda: client.received_messages, "the old connection's echo")
            conn.close("done")

    run_on(loop, main())


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
