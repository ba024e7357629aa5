"""An echo server over TCP, its clients, and peers that know nothing of the protocol."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from plumbing.service.hosts import bind
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.frames import FrameDecoder
from plumbing.wire.messages import FaultMsg, Message
from plumbing.wire.tcp import Security, TcpServer, connect_tcp
from plumbing.wire.tcp_address import TcpAddress
from tests.plumbing.wire.certificates import Authority
from tests.plumbing.wire.echo import CATALOGUE, Echo, EchoHandler


class Client(EchoHandler):
    """Keeps what it hears; says nothing by itself, and goes when it is told why."""

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        self.received_messages.append(message)
        if isinstance(message, FaultMsg):
            conn.close("told to go")


@asynccontextmanager
async def serving(
    security: Security, handler: EchoHandler | None = None, **options: Any
) -> AsyncIterator[tuple[TcpServer, TcpAddress]]:
    """An echo server on a port of its own on this host, and where it is."""
    options |= {"service": "echo", "security": security}
    server = TcpServer(CATALOGUE, handler or EchoHandler(), **options)
    sock = bind("127.0.0.1", 0, "--listen", 10)
    server.listen(sock)
    try:
        yield server, TcpAddress("127.0.0.1", sock.getsockname()[1])
    finally:
        await server.close()


def settings(place: Path) -> tuple[Security, Security]:
    """The server's security and the client's."""
    authority = Authority(place)
    return authority.issue("lockserver"), authority.issue("engine-0")


async def answers(address: TcpAddress, security: Security) -> bool:
    """Whether the server serves another client."""
    done = asyncio.get_running_loop().create_future()

    class Asker(Client):
        def received(self, *args: Any) -> None:
            done.set_result(args[1] == Echo("still here"))

    conn = await connect_tcp(address, CATALOGUE, Asker(), security)
    conn.send(Echo("still here"), 1)
    is_right: bool = await asyncio.wait_for(done, 30)
    conn.close("asked")
    return is_right


async def stranger(
    address: TcpAddress, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Bytes to and from `address`, with TLS where there is a context."""
    name = {"server_hostname": "localhost"} if tls else {}
    return await asyncio.open_connection(address.host, address.port, ssl=tls, **name)


def anybody() -> ssl.SSLContext:
    """A client that has no certificate and trusts any server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def heard(reader: asyncio.StreamReader, count: int = 1000) -> list[Message]:
    """Every message until the end of the stream, however that comes about, or `count` of them."""
    decoder, found = FrameDecoder(), []
    with suppress(ConnectionError, ssl.SSLError):
        while len(found) < count and (data := await asyncio.wait_for(reader.read(65536), 30)):
            found += [CATALOGUE.decode(f.payload, 0)[0] for f in decoder.receive(data, [])]
    return found


async def gone(writer: asyncio.StreamWriter) -> None:
    """Close and wait until the loop has let go of it."""
    writer.close()
    with suppress(OSError):
        await asyncio.wait_for(writer.wait_closed(), 30)
