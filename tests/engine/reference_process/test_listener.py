"""Accepting from a socket that others hold too: real sockets, no HTTP."""

from __future__ import annotations

import asyncio
import errno
import socket

from engine.backends.reference.service import SharedListener
from tests.engine.reference_process.rig import lend, listening
from tests.helpers import auntil


class Greeter(asyncio.Protocol):
    """Greets and hangs up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")
        transport.close()


def backlog_of(sock: socket.socket) -> int:
    """`tcpi_sacked` of a listening socket is its backlog (tcp_info, net/ipv4/tcp.c)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int.from_bytes(info[28:32], "little")


def connect(owner: socket.socket) -> socket.socket:
    client = socket.create_connection(owner.getsockname())
    client.setblocking(False)
    return client


def is_silent(client: socket.socket) -> bool:
    try:
        client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    return False


def test_listener_accepts_between_start_and_stop_and_leaves_the_rest_to_the_next_one():
    """Goal: a borrowed socket is not accepted from without leave, `listen` is the owner's alone,
    and closing our copy leaves the others. Method: connect first; two listeners in turn; read the
    kernel's backlog."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        owner, _ = listening()
        with owner, connect(owner) as client:
            owner.listen(777)
            first = SharedListener(lend(owner), Greeter)
            await asyncio.sleep(0)
            assert is_silent(client)
            first.start()
            assert await loop.sock_recv(client, 16) == b"hello"
            first.stop()
            first.stop()
            assert not first.is_accepting
            with connect(owner) as late:
                second = SharedListener(lend(owner), Greeter)
                assert is_silent(late)
                second.start()
                assert await loop.sock_recv(late, 16) == b"hello"
                second.stop()
            assert backlog_of(owner) == 777

    asyncio.run(main())


def test_clients_wait_in_the_backlog_while_descriptors_are_short():
    """Goal: nobody is refused or reset. Method: `accept` fails once with EMFILE."""

    class Short(socket.socket):
        is_short = True

        def accept(self):  # type: ignore[no-untyped-def] # as socket's
            if self.is_short:
                self.is_short = False
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    async def main() -> None:
        owner, _ = listening()
        with owner, connect(owner) as client:
            listener = SharedListener(lend(owner), Greeter)
            listener._sock = Short(fileno=listener._sock.detach())
            listener.start()
            await auntil(lambda: listener._retry is not None, "the pause")
            assert await asyncio.get_running_loop().sock_recv(client, 16) == b"hello"
            listener.stop()

    asyncio.run(main())
