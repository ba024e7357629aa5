"""At the limit of descriptors: failures say so and leak none."""

from __future__ import annotations

import errno
import os
import resource
import socket
from pathlib import Path

import pytest

from plumbing.errors import RemoteError, UnreachableError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.connection import Connection, UnixConnection, connect
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.tcp import connect_tcp
from plumbing.wire.tcp_address import TcpAddress
from tests.helpers import open_fds, room_for, until
from tests.plumbing.wire.certificates import shared
from tests.plumbing.wire.echo import CATALOGUE, LOOPS, Echo, EchoHandler, ServerThread, run_on

loops = pytest.mark.parametrize("loop", LOOPS)


def _fds(count: int) -> list[OwnedFd]:
    return [OwnedFd(os.memfd_create(f"passed-{index}")) for index in range(count)]


@loops
@pytest.mark.parametrize("room", [0, 1], ids=["for its socket", "for the peer's pidfd"])
def test_connect_without_descriptors_says_so_and_leaks_none(loop: str, room: int, tmp_path: Path):
    """Goal: a shortage is told apart from a server that is gone. Method: a real limit."""

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "short.sock"))
            listener.listen()
            before = len(open_fds())
            with room_for(room), pytest.raises(UnreachableError, match="limit of") as caught:
                await connect(listener.getsockname(), CATALOGUE, EchoHandler())
            assert caught.value.code == "wire.no_descriptors"
            assert len(open_fds()) == before

    run_on(loop, main())


@loops
def test_connect_over_tcp_without_descriptors_says_so(loop: str):
    """Goal: as above, over TCP."""

    async def main() -> None:
        with room_for(0), pytest.raises(UnreachableError, match="limit of") as caught:
            await connect_tcp(TcpAddress("127.0.0.1", 9), CATALOGUE, EchoHandler(), shared())
        assert caught.value.code == "wire.no_descriptors"

    run_on(loop, main())


@loops
def test_connection_that_its_handler_refuses_leaves_the_socket_to_the_caller(loop: str):
    """Goal: no pidfd of the peer leaks. Method: a handler that raises when it is opened."""

    class Refusing(EchoHandler):
        def opened(self, conn: Connection) -> None:
            raise OSError(errno.EMFILE, "refused")

    async def main() -> None:
        ours, theirs = socket.socketpair()
        before = len(open_fds())
        with pytest.raises(OSError, match="refused"):
            UnixConnection(ours, CATALOGUE, Refusing())
        assert len(open_fds()) == before
        ours.close()
        theirs.close()

    run_on(loop, main())


def test_receiver_at_its_fd_limit_refuses_and_keeps_serving(tmp_path: Path):
    """Goal: at RLIMIT_NOFILE some descriptors are lost. The sender gets an error, nothing leaks,
    and another client's next request is answered. Method: lower this process's limit."""
    with ServerThread(str(tmp_path / "echo.sock")) as thread:
        other = BlockingClient(thread.path, CATALOGUE)
        client = BlockingClient(thread.path, CATALOGUE)
        until(lambda: thread.handler.opened_count == 2, "both connections")
        filler = [OwnedFd(os.memfd_create("filler")) for _ in range(40)]
        room = filler[-1].fileno()  # those sent lie above it, so closing them makes no room
        sent = _fds(60)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
        try:
            with pytest.raises(RemoteError) as caught:
                client.request(Echo("too many"), sent)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            close_all(filler)
        assert caught.value.code == "wire.truncated_fds"
        assert other.request(Echo("still here")).message == Echo("still here")
        client.close()
        other.close()
        until(lambda: len(thread.handler.reasons) == 2, "the server to see both ends")
