"""The client that blocks: each way in which a call of it can end."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from plumbing.errors import (
    ProtocolError,
    RemoteError,
    UnderstudyError,
    UnreachableError,
    WaitTimeoutError,
)
from plumbing.wire import blocking, sockets
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.frames import encode_frame
from plumbing.wire.messages import fault_of
from tests.helpers import descriptors_below, open_fds
from tests.plumbing.wire.echo import CATALOGUE, Echo


@pytest.fixture
def pair() -> Iterator[tuple[BlockingClient, socket.socket]]:
    """A client and the other end of its socket."""
    ours, theirs = socket.socketpair()
    with BlockingClient.from_socket(ours, CATALOGUE) as client, theirs:
        yield client, theirs


def _frame(text: str, request_id: int = 0, fds: int = 0) -> bytes:
    return encode_frame(CATALOGUE.encode(Echo(text), request_id), fds)


def test_blocking_client_can_be_interrupted(pair: tuple[BlockingClient, socket.socket]):
    """Goal: another thread can end a wait. Method: interrupt it while it waits; a second interrupt,
    after the socket was closed, does nothing."""
    client, _ = pair
    found: list[UnderstudyError] = []

    def wait() -> None:
        try:
            client.receive(60)
        except UnreachableError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    client.interrupt()
    thread.join(60)
    assert [error.code for error in found] == ["wire.closed"]
    client.close()
    client.interrupt()


def test_blocking_client_times_out_when_the_server_does_not_read(
    pair: tuple[BlockingClient, socket.socket], monkeypatch: pytest.MonkeyPatch
):
    """Goal: sending has the call's deadline. Method: a full socket that is never read."""
    client, _ = pair
    monkeypatch.setattr(blocking, "REQUEST_TIMEOUT_S", 0.01)

    def talk() -> None:
        while True:
            client.notify(Echo("x" * 90_000))

    with pytest.raises(WaitTimeoutError, match="room to send echo"):
        talk()


def test_blocking_client_retries_while_too_many_descriptors_are_in_flight(
    pair: tuple[BlockingClient, socket.socket], monkeypatch: pytest.MonkeyPatch
):
    """Goal: after ETOOMANYREFS the frame is sent again. Method: raise it twice."""
    client, theirs = pair
    send, left = sockets.send, [2]

    def busy(*arguments: Any) -> int:
        if left[0]:
            left[0] -= 1
            raise BlockingIOError(errno.ETOOMANYREFS, "busy")
        return send(*arguments)

    monkeypatch.setattr(sockets, "send", busy)
    client.notify(Echo("patience"), [OwnedFd(os.memfd_create("x"))])
    data, fds = sockets.receive(theirs)
    assert data == _frame("patience", fds=1)
    close_all(fds)


@pytest.mark.parametrize("is_said", [True, False])
def test_blocking_client_raises_the_reason_why_it_was_dropped(
    is_said: bool, pair: tuple[BlockingClient, socket.socket]
):
    """Goal: if a server sent a reason before it closed, that is the error, not the broken pipe.
    Method: an error frame, or none, has arrived before the client sends."""
    client, theirs = pair
    if is_said:
        fault = fault_of(UnderstudyError("test.go_away", "go away"))
        theirs.sendall(encode_frame(CATALOGUE.encode(fault), 0))
    theirs.close()
    with pytest.raises(UnderstudyError) as caught:
        client.request(Echo("question"))
    assert caught.value.code == ("test.go_away" if is_said else "wire.closed")
    assert isinstance(caught.value, RemoteError if is_said else UnreachableError)


def test_blocking_client_refuses_a_bad_frame_and_leaks_nothing(
    pair: tuple[BlockingClient, socket.socket],
):
    """Goal: a bad frame is an error, and descriptors that arrived with other frames are closed."""
    client, theirs = pair
    passed = os.memfd_create("x")
    before = len(open_fds())
    nonsense = encode_frame(msgpack.packb([0, {"type": "nonsense"}]), 0)
    socket.send_fds(theirs, [_frame("fine", fds=1) + nonsense], [passed])
    with pytest.raises(ProtocolError, match=r"wire\.unknown_type"):
        client.receive(5)
    assert len(open_fds()) == before
    os.close(passed)


def test_blocking_client_waits_for_room_in_the_backlog(tmp_path: Path):
    """Goal: a full backlog is retried; if it stays full, that is an error. Method: a listener that
    accepts late."""
    path = str(tmp_path / "full.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as filler:
        listener.bind(path)
        listener.listen(0)
        filler.connect(path)
        with pytest.raises(UnreachableError, match="cannot reach"):
            BlockingClient(path, CATALOGUE, connect_timeout_s=0.05)
        made: list[BlockingClient] = []
        thread = threading.Thread(target=lambda: made.append(BlockingClient(path, CATALOGUE)))
        thread.start()
        listener.accept()[0].close()
        thread.join(30)
        made[0].close()


def test_blocking_client_at_the_limit_of_descriptors_raises_it(tmp_path: Path):
    """Goal: no descriptor for a socket is an error that names the limit and can be retried."""
    with descriptors_below(0), pytest.raises(UnreachableError, match="limit of 0 open") as caught:
        BlockingClient(str(tmp_path / "any.sock"), CATALOGUE)
    assert caught.value.code == "wire.no_descriptors"
