"""Passing descriptors: what was measured to go wrong elsewhere (each test names its finding)."""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plumbing.errors import ProtocolError, RemoteError, UnreachableError
from plumbing.wire import connection as unix_connection
from plumbing.wire import sockets
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.connection import Connection, connect
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.frames import encode_frame
from tests.helpers import auntil, descriptors_below, open_fds, room_for, until
from tests.plumbing.wire.echo import (
    CATALOGUE,
    Echo,
    EchoHandler,
    ServerThread,
    on_loops,
)


def _fds(count: int) -> list[OwnedFd]:
    return [OwnedFd(os.memfd_create(f"passed-{index}")) for index in range(count)]


def test_owned_fd_closes_once_and_warns_when_leaked():
    """Goal: one owner, one close; a leaked descriptor warns and is closed."""
    with pytest.raises(ValueError, match="not a file descriptor"):
        OwnedFd(-1)  # what a failed system call returns
    fd = OwnedFd(os.memfd_create("x"))
    twin = fd.duplicate()
    assert not os.get_inheritable(twin.fileno())
    number = fd.detach()
    with pytest.raises(ValueError, match="closed"):
        fd.fileno()
    fd.close()
    os.close(number)
    with twin:
        pass
    twin.close()
    forgotten = OwnedFd(os.memfd_create("y"))
    number = forgotten.fileno()
    with pytest.warns(ResourceWarning, match=f"{number} was never closed"):
        del forgotten
    assert number not in open_fds()


@on_loops
async def test_sending_fds_leaves_socket_flags_alone(tmp_path: Path):
    """Goal: sending must not clear O_NONBLOCK, on either end, and the blocking client must not set
    it on a socket that may be shared. Method: read the flags afterwards."""
    ours, theirs = socket.socketpair()
    handler = EchoHandler()
    conn = Connection(ours, CATALOGUE, handler)
    flags_before = fcntl.fcntl(theirs.fileno(), fcntl.F_GETFL)
    client = BlockingClient.from_socket(theirs, CATALOGUE)
    reply = await asyncio.to_thread(client.request, Echo("a"), _fds(1))
    close_all(reply.fds)
    assert fcntl.fcntl(ours.fileno(), fcntl.F_GETFL) & os.O_NONBLOCK
    assert fcntl.fcntl(client.fileno(), fcntl.F_GETFL) == flags_before
    client.close()
    await auntil(lambda: handler.reasons, "the end of the connection")
    assert conn.is_closed


def test_fds_match_frames_when_the_kernel_merges_writes():
    """Goal: `A`, `B+fd`, `C`, `D+fd` arrive merged; each frame still gets its own. Method: write
    four frames before the first read."""
    ours, theirs = socket.socketpair()
    client = BlockingClient.from_socket(theirs, CATALOGUE)
    inodes = []
    for text, count in (("A", 0), ("B", 1), ("C", 0), ("D", 2)):
        fds = _fds(count)
        inodes.append([os.fstat(fd.fileno()).st_ino for fd in fds])
        frame = encode_frame(CATALOGUE.encode(Echo(text)), count)
        assert sockets.send(ours, memoryview(frame), fds) == len(frame)
        close_all(fds)
    for text, expected in zip("ABCD", inodes, strict=True):
        reply = client.receive()
        assert reply.message == Echo(text)
        assert [os.fstat(fd.fileno()).st_ino for fd in reply.fds] == expected
        close_all(reply.fds)
    client.close()
    ours.close()


async def test_partial_sends_carry_the_fds_once(tmp_path: Path):
    """Goal: a frame that the socket takes in pieces delivers its descriptors once, and the queue
    empties. Method: a small send buffer, a large frame, a slow reader."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    conn = Connection(ours, CATALOGUE, EchoHandler())
    client = BlockingClient.from_socket(theirs, CATALOGUE)
    message = Echo("y" * 90_000)
    conn.send(message, 7, _fds(2))
    conn.send(Echo("after"), 8, _fds(1))
    first = await asyncio.to_thread(client.receive)
    assert (first.message, len(first.fds), first.request_id) == (message, 2, 7)
    second = await asyncio.to_thread(client.receive)
    assert (second.message, len(second.fds)) == (Echo("after"), 1)
    close_all(first.fds + second.fds)
    client.close()
    conn.close("done")
    await asyncio.sleep(0)


def test_close_all_closes_all_whatever_one_of_them_raises():
    """Goal: a descriptor that was closed behind its owner's back does not leak the others."""
    fds = _fds(3)
    numbers = [fd.fileno() for fd in fds]
    os.close(numbers[1])
    with pytest.raises(OSError, match="Bad file descriptor"):
        close_all(fds)
    assert not set(numbers) & set(open_fds())


@dataclass
class _Busy:
    """A socket while the kernel takes no message."""

    number: int

    def sendmsg(self, *_: object) -> int:
        raise OSError(self.number, os.strerror(self.number))


@on_loops
@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.ENOMEM])
async def test_send_is_retried_while_the_kernel_is_busy(
    number: int, monkeypatch: pytest.MonkeyPatch
):
    """Goal: a frame waits while too many descriptors are in flight, or memory is short: the peer is
    not taken for gone; a connection that is closed meanwhile does not send. Method: the error three
    times, then forever."""
    monkeypatch.setattr(unix_connection, "RETRY_S", 0.01)
    ours, theirs = socket.socketpair()
    conn = Connection(ours, CATALOGUE, EchoHandler())
    send, left = sockets.send, [3]

    def busy(sock: Any, *rest: Any) -> int:
        if left[0]:
            left[0] -= 1
            sock = _Busy(number)
        return send(sock, *rest)

    monkeypatch.setattr(sockets, "send", busy)
    conn.send(Echo("patience"), 1, _fds(1))
    client = BlockingClient.from_socket(theirs, CATALOGUE)
    reply = await asyncio.to_thread(client.receive)
    assert reply.message == Echo("patience")
    assert left == [0]
    close_all(reply.fds)
    left[0] = 1
    conn.send(Echo("too late"), 1, _fds(1))
    conn.close("enough")
    client.close()
    await asyncio.sleep(2 * unix_connection.RETRY_S)
    assert left == [0]


@on_loops
@pytest.mark.parametrize("room", [0, 1], ids=["for its socket", "for the peer's pidfd"])
async def test_connect_without_descriptors_says_so_and_leaks_none(room: int, tmp_path: Path):
    """Goal: a shortage is told apart from a server that is gone. Method: a real limit."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "short.sock"))
        listener.listen()
        before = len(open_fds())
        with room_for(room), pytest.raises(UnreachableError, match="limit of") as caught:
            await connect(listener.getsockname(), CATALOGUE, EchoHandler())
        assert caught.value.code == "wire.no_descriptors"
        assert len(open_fds()) == before


@on_loops
async def test_connection_that_its_handler_refuses_leaves_the_socket_to_the_caller():
    """Goal: no pidfd of the peer leaks. Method: a handler that raises when it is opened."""

    class Refusing(EchoHandler):
        def opened(self, conn: Connection) -> None:
            raise OSError(errno.EMFILE, "refused")

    ours, theirs = socket.socketpair()
    before = len(open_fds())
    with pytest.raises(OSError, match="refused"):
        Connection(ours, CATALOGUE, Refusing())
    assert len(open_fds()) == before
    ours.close()
    theirs.close()


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
        with descriptors_below(room), pytest.raises(RemoteError) as caught:
            client.request(Echo("too many"), sent)
        close_all(filler)
        assert caught.value.code == "wire.truncated_fds"
        assert other.request(Echo("still here")).message == Echo("still here")
        client.close()
        other.close()
        until(lambda: len(thread.handler.reasons) == 2, "the server to see both ends")


def test_foreign_ancillary_data_is_refused():
    """Goal: control messages other than descriptors end the connection. Method: credentials."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    credentials = array.array("i", [os.getpid(), os.getuid(), os.getgid()])
    ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials)])
    with pytest.raises(ProtocolError, match=r"wire\.truncated_fds"):
        sockets.receive(theirs)
    ours.close()
    theirs.close()
