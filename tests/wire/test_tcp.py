"""The server over TCP: the same words as on a Unix socket, for those who prove who they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import auntil, open_fds
from tests.wire.certificates import Authority, write_secret
from tests.wire.echo import CATALOGUE, LOOPS, Echo, EchoHandler, Refuse, run_on
from understudy.errors import UnreachableError
from understudy.wire.address import TcpAddress
from understudy.wire.connection import Connection
from understudy.wire.fds import OwnedFd
from understudy.wire.messages import Fault, Message
from understudy.wire.security import Security
from understudy.wire.tcp import TcpServer, connect_tcp

loops = pytest.mark.parametrize("loop", LOOPS)
securities = pytest.mark.parametrize("kind", ["plain", "psk", "tls"])


class Client(EchoHandler):
    """Keeps what it hears; says nothing by itself."""

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        self.received_messages.append(message)


@asynccontextmanager
async def serving(
    security: Security | None, handler: EchoHandler | None = None, **options: Any
) -> AsyncIterator[tuple[TcpServer, TcpAddress]]:
    """An echo server on a port of its own on this host, and where it is."""
    server = TcpServer(
        TcpAddress("127.0.0.1", 0),
        CATALOGUE,
        handler or EchoHandler(),
        service="echo",
        security=security,
        **options,
    )
    await server.start()
    try:
        yield server, TcpAddress("127.0.0.1", server.port)
    finally:
        await server.close()


def settings(kind: str, place: Path) -> tuple[Security | None, Security | None]:
    """The server's security and the client's."""
    if kind == "plain":
        return None, None
    if kind == "psk":
        path = write_secret(str(place / "psk"), b"p" * 32)
        return Security(psk=path), Security(psk=path)
    authority = Authority(place)
    return authority.issue("lockserver"), authority.issue("engine-0")


@loops
@securities
def test_tcp_server_answers_and_both_sides_hear_of_the_end(loop: str, kind: str, tmp_path: Path):
    """Goal: an echo, an error that keeps its code, the end heard once on both sides, nothing left
    open; the server knows the client by its certificate's name or by its address."""

    async def exchange(ours: Security | None, theirs: Security | None) -> None:
        handler, client = EchoHandler(), Client()
        async with serving(ours, handler) as (server, address):
            conn = await connect_tcp(address, CATALOGUE, client, theirs)
            assert (handler.opened_count, client.opened_count) == (1, 1)
            (peer,) = [other.peer for other in server.connections]
            assert (peer.uid, peer.pid, peer.pidfd, peer.pidfd_source) == (-1, 0, None, "none")
            assert peer.host == "127.0.0.1"
            assert peer.name.startswith("engine-0" if kind == "tls" else "127.0.0.1:")
            assert conn.peer.name == ("lockserver" if kind == "tls" else str(address))
            for text in ("one", "two" * 30_000):
                conn.send(Echo(text), 7)
                await auntil(lambda text=text: Echo(text) in client.received_messages, "the echo")
            conn.send(Refuse(), 8)
            await auntil(lambda: client.reasons, "the end")
            fault = client.received_messages[-1]
            assert isinstance(fault, Fault)
            assert fault.code == "test.refused"
            await auntil(lambda: handler.reasons, "the server to see the end")
        assert (len(handler.reasons), len(client.reasons)) == (1, 1)

    async def main() -> None:
        ours, theirs = settings(kind, tmp_path)
        await exchange(ours, theirs)  # libuv opens one file of its own at the first connection
        before = len(open_fds())
        await exchange(ours, theirs)
        await auntil(lambda: len(open_fds()) <= before, "everything to be closed")

    run_on(loop, main())


@loops
@securities
def test_tcp_stranger_is_refused(loop: str, kind: str, tmp_path: Path):
    """Goal: a client with another key, or a certificate of another CA, is told so and the service
    never hears of it."""
    if kind == "plain":
        pytest.skip("without security there are no strangers")

    async def main() -> None:
        ours, _ = settings(kind, tmp_path)
        (tmp_path / "other").mkdir()
        stranger = Security(psk=write_secret(str(tmp_path / "other/psk"), b"q" * 32))
        if kind == "tls":
            assert ours is not None
            other = Authority(tmp_path / "other", "other").issue("engine-1")
            stranger = Security(other.cert, other.key, ours.ca)
        handler, client = EchoHandler(), Client()
        async with serving(ours, handler) as (server, address):
            with pytest.raises(UnreachableError) as caught:
                await connect_tcp(address, CATALOGUE, client, stranger)
            await auntil(lambda: server.refused_count == 1, "the server to refuse it")
            print(server.last_refusal, caught.value)
        assert (handler.opened_count, client.opened_count, client.reasons) == (0, 0, [])

    run_on(loop, main())
