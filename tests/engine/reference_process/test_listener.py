"""Accepting from a socket that others hold too: real sockets, no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from engine.backends.reference.service import CONNECTIONS_MAX, SharedListener
from tests.engine.reference_process.rig import lend, listening
from tests.helpers import auntil


class Greeter(asyncio.Protocol):
    """Greets and hangs up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")
        transport.close()


class Host(asyncio.Protocol):
    """Greets and stays."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(b"hello")


def backlog_of(sock: socket.socket) -> int:
    """`tcpi_sacked` of a listening socket is its backlog (tcp_info, net/ipv4/tcp.c)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int.from_bytes(info[28:32], "little")


def connect(owner: socket.socket) -> socket.socket:
    client = socket.create_connection(owner.getsockname())
    client.setblocking(False)
    return client


def test_nothing_is_accepted_before_start():
    """Goal: a borrowed socket is not accepted from without leave. Method: connect first."""

    async def main() -> None:
        owner, _ = listening()
        with owner, connect(owner) as client:
            listener = SharedListener(lend(owner), Greeter)
            await asyncio.sleep(0)
            accepted = await asyncio.get_running_loop().run_in_executor(None, is_silent, client)
            assert accepted
            listener.start()
            assert await asyncio.get_running_loop().sock_recv(client, 16) == b"hello"
            listener.stop()

    asyncio.run(main())


def is_silent(client: socket.socket) -> bool:
    try:
        client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    return False


def test_backlog_of_the_owner_is_kept():
    """Goal: `listen` is the owner's alone. Method: read the kernel's backlog before and after."""

    async def main() -> None:
        owner, _ = listening()
        with owner:
            owner.listen(777)
            listener = SharedListener(lend(owner), Greeter)
            listener.start()
            assert backlog_of(owner) == 777
            listener.stop()
            assert backlog_of(owner) == 777

    asyncio.run(main())


def test_stop_leaves_the_backlog_to_the_next_one():
    """Goal: closing our copy leaves the other copies listening. Method: two listeners in turn."""

    async def main() -> None:
        owner, _ = listening()
        with owner:
            first = SharedListener(lend(owner), Greeter)
            first.start()
            first.stop()
            first.stop()
            with connect(owner) as client:
                second = SharedListener(lend(owner), Greeter)
                second.start()
                loop = asyncio.get_running_loop()
                assert await loop.sock_recv(client, 16) == b"hello"
                second.stop()
            assert not first.is_accepting

    asyncio.run(main())


def test_connection_that_sends_no_request_is_closed_and_another_is_not():
    """Goal: half requests cannot hold descriptors for ever. Method: two connections, of which one
    has sent a request; a short deadline."""

    async def main() -> None:
        owner, _ = listening()
        hosts: list[Host] = []

        def factory() -> Host:
            hosts.append(Host())
            return hosts[-1]

        with owner:
            listener = SharedListener(lend(owner), factory, first_request_s=0.5)
            listener.start()
            loop = asyncio.get_running_loop()
            with connect(owner) as good:
                assert await loop.sock_recv(good, 16) == b"hello"
                listener.request_received(hosts[0])
                quiet = connect(owner)
                assert await loop.sock_recv(quiet, 16) == b"hello"
                with contextlib.suppress(ConnectionResetError):
                    assert await loop.sock_recv(quiet, 16) == b""
                quiet.close()
                await auntil(lambda: not listener._quiet, "every deadline to be over")
                hosts[0].transport.write(b"still here")
                assert await loop.sock_recv(good, 16) == b"still here"
                hosts[0].transport.close()
            listener.stop()

    asyncio.run(main())


def test_full_house_leaves_newcomers_in_the_backlog():
    """Goal: a bounded number of connections; the others wait instead of being refused."""

    async def main() -> None:
        owner, _ = listening()
        open_connections = CONNECTIONS_MAX
        with owner, connect(owner) as client:
            listener = SharedListener(lend(owner), Greeter, lambda: open_connections)
            listener.start()
            await auntil(lambda: listener._retry is not None, "the pause")
            open_connections = 0
            assert await asyncio.get_running_loop().sock_recv(client, 16) == b"hello"
            listener.stop()

    asyncio.run(main())
