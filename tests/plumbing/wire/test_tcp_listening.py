"""A TCP server's address, its end, and the renewal of its certificates."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from plumbing.errors import UnderstudyError, UnreachableError, UsageError
from plumbing.wire import tcp
from plumbing.wire.tcp import Security, TcpServer, connect_tcp
from plumbing.wire.tcp_address import TcpAddress
from tests.helpers import auntil, open_fds
from tests.plumbing.wire.certificates import Authority, shared, write_secret
from tests.plumbing.wire.echo import CATALOGUE, LOOPS, Echo, EchoHandler, run_on
from tests.plumbing.wire.tcp_rig import (
    Client,
    answers,
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
