"""The private socket: who may connect, what an old one leaves, and what breaks with its holder."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from engine.supervisor.lock_side import BackendListener
from tests.helpers import open_fds, room_for


@pytest.fixture
def private(directory: Path) -> BackendListener:
    return BackendListener(str(directory / "engine_e-0.http.sock"))


def connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    return sock


def test_socket_is_private_and_its_copy_the_only_one(private):
    """Goal: only this user connects, and connections that wait end with their listener. Method: the
    mode, and a connection in the backlog whose listener is closed."""
    before = set(open_fds())
    listening = private.listen()
    assert listening is not None
    assert set(open_fds()) - before == {listening.fileno()}
    mode = Path(private.path).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    with connect(private.path) as client:
        listening.close()
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_stale_socket_is_replaced(private):
    """Goal: what an earlier incarnation left keeps nobody from listening, and is not reached any
    more. Method: listen twice at the path, with a connection to the first; remove twice."""
    with private.listen() as old, private.listen() as new:
        with connect(private.path) as client:
            with socket.socket(fileno=new.detach()) as server:
                server.accept()[0].close()
            assert client.recv(1) == b""
        private.remove()
        private.remove()
        assert not Path(private.path).exists()
        assert not old.is_closed


def test_what_another_supervisor_has_bound_stays(private):
    """Goal: a second supervisor of the same engine, which is refused, takes nothing away. Method:
    its end, while the first one listens; then a start, which removes what a dead one left."""
    second = BackendListener(private.path)
    with private.listen():
        second.remove()
        connect(private.path).close()
        second.remove_leftover()
        assert not Path(private.path).exists()


def test_what_cannot_be_bound_is_a_problem_until_it_can(private):
    """Goal: no shortage is fatal, and the reason is told. Method: no descriptor, then something
    else in the socket's place, then neither."""
    with room_for(0):
        assert private.listen() is None
        assert "limit of" in private.problem
    Path(private.path).mkdir()
    assert private.listen() is None
    assert private.path in private.problem
    Path(private.path).rmdir()
    with private.listen():
        assert private.problem is None
