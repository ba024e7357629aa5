"""An engine behind a gateway: its private socket, the canary through it, drains that leave streams
to the next engine, and what cannot serve a gateway."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from engine.messages import LeaveMsg
from plumbing.pod.paths import engine_http_socket
from plumbing.wire.sockets import SOCKET_PATH_BYTES_MAX
from tests.engine.pod import QUICK, Pod, environment, program
from tests.engine.stub_lock import StubLock
from tests.helpers import run_command, until


@pytest.fixture
def private(directory: Path) -> Path:
    return Path(engine_http_socket(str(directory), "e-0"))


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(20)
    sock.connect(str(path))
    return sock


def ask(path: Path) -> str:
    """What the backend says to each client that connects."""
    with connect(path) as sock:
        return sock.makefile().readline()


def test_engine_serves_on_its_private_socket(pod: Pod, lock: StubLock, private: Path):
    """Goal: behind a gateway an engine accepts there, and only there. Method: a stale file in its
    place, then one request to it, and a connection to the service's address, which waits; the
    process that serves dies, and its successor has a socket of its own."""
    private.write_text("stale")
    engine = pod.engine("e-0", "--continuation", "weights-1", flags=QUICK)
    document = engine.until("active")
    assert ask(private) == "e-0 1\n"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert document["backend"]["serves_on"] == str(private)
    assert document["lock"]["is_behind_gateway"]
    assert "understudy_engine_behind_gateway 1.0" in engine.get("/metrics")[1]
    assert lock.want is not None
    assert lock.want.continuation == "weights-1"
    with socket.create_connection(lock.address) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        client.setblocking(False)
        engine.kill("backend-http")
        engine.until("active", number=2)
        with pytest.raises(BlockingIOError):
            client.recv(1)
    assert ask(private) == "e-0 2\n"


def test_connections_that_wait_break_with_the_incarnation(
    pod: Pod, lock: StubLock, private: Path, directory: Path
):
    """Goal: a gateway learns of a death at once. Method: a backend that does not accept, a
    connection in its backlog, and SIGKILL; then the same with SIGKILL to the supervisor."""
    stuck = directory / "stuck"
    stuck.touch()
    engine = pod.engine("e-0", "--accept-none-if", str(stuck), flags=QUICK)
    for target in ("backend-http", "supervisor"):
        engine.until("active")
        with connect(private) as client:
            engine.kill(target)
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        if target == "backend-http":
            engine.until("active", number=2)


@pytest.mark.parametrize(
    ("continues", "leave", "expected"),
    [
        (True, "sigterm", "resume"),
        (True, "drain", "resume"),
        (True, "drain --finish", "finish"),
        (False, "sigterm", "finish"),
    ],
)
def test_departure_leaves_streams_where_the_next_engine_continues(
    pod: Pod, lock: StubLock, private: Path, continues: bool, leave: str, expected: str
):
    """Goal: SIGTERM and `engine drain` are a pause where another engine can continue. Method: tell
    the engine of a standby that can or cannot, then each way to leave."""
    note = private.with_name("note")
    engine = pod.active("e-0", "--note-drain", str(note), flags=QUICK)
    lock.call(lock.tell_standby, True, continues)
    until(lambda: engine.status()["health"]["has_standby"], "the news of the standby")
    if leave == "sigterm":
        engine.terminate()
    else:
        with engine.client() as client:
            client.request(LeaveMsg(finish=leave.endswith("--finish")))
    assert engine.wait() == 0
    assert note.read_text() == expected
    assert not private.exists()


def test_path_of_the_private_socket_may_be_too_long(directory: Path):
    """Goal: a path that cannot be bound is refused at the start, not at a takeover. Method: one
    that only the private socket's name makes too long."""
    where = f"{directory}/".ljust(81, "d")
    name = "e-23456789"
    assert len(os.path.join(where, f"engine_{name}.sock")) <= SOCKET_PATH_BYTES_MAX
    command = [*program("engine"), "run", "--dir", where, "--engine-id", name]
    found = run_command([*command, "--backend", "command", "--", "true"], env=environment())
    assert found.returncode == 2
    assert "wire.path_too_long" in found.stderr
    assert f"engine_{name}.http.sock" in found.stderr
