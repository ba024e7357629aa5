"""The service socket: bound, handed back, and in use by others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys

import pytest

from lockserver.server.service_socket import ServiceSocket, parse_service
from plumbing.errors import ProtocolError
from plumbing.wire.fds import OwnedFd
from tests.helpers import auntil, free_port, open_fds

REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


def caller(port: int, request: bytes = REQUEST) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(request)
    sock.setblocking(False)
    return sock


@contextlib.contextmanager
def service_on(port: int):
    service = ServiceSocket(f"127.0.0.1:{port}")
    assert service.bind()
    try:
        yield service
    finally:
        service.close()


def test_service_takes_only_its_own_listening_socket():
    """Goal: handing back a wrong socket is the sender's error. Method: one end of a socket pair,
    and a socket on another address."""

    async def scenario() -> None:
        before = len(open_fds())
        with service_on(free_port()) as service:
            left, right = socket.socketpair()
            right.close()
            with pytest.raises(ProtocolError):
                service.take(OwnedFd(left.detach()))
            with pytest.raises(ProtocolError):
                service.take(OwnedFd(os.memfd_create("no socket at all")))
            with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ProtocolError):
                service.take(OwnedFd(os.dup(other.fileno())))
            copy = service.copy()
            assert copy is not None
            assert service.take(copy) is False  # it already has it
        assert len(open_fds()) == before

    asyncio.run(scenario())


@pytest.mark.parametrize("bad", ["active", "active=", "active=:80", "active=h:0", "=h:1", "a=h:x"])
def test_service_flag_bad_values_are_refused(bad):
    """Goal: one clear error for a bad flag. Method: parse it."""
    with pytest.raises(ValueError, match="active=HOST:PORT"):
        parse_service(bad)


def test_service_address_in_use_at_the_first_start_is_one_clear_error(pod_dir):
    """Goal: the error for a port in use names the process. Method: listen there, start a fresh
    server."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "lockserver.cli", "serve", "--dir", pod_dir),
                *("--http-port", "0", "--service", f"active=127.0.0.1:{port}"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ran.returncode == 1
    assert f"127.0.0.1:{port} is in use by pid {os.getpid()}" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_service_address_taken_while_down_is_waited_for_and_reported(
    pod_dir, start_server, start_engine
):
    """Goal: with a holder on file, the server waits for the socket to be handed back and reports
    the problem. Method: engines that never borrowed it, and another process on the port while the
    server restarts."""
    server = start_server()
    holder = start_engine("engine-0")
    holder.granted()
    server.kill()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        server.flags = ("--service", f"active=127.0.0.1:{port}", "--window-ms", "50")
        server.start()
        service = server.status()["service"]["active"]
        assert service["state"] == "waiting_for_hand_back"
        assert f"pid {os.getpid()}" in service["problem"]
        assert "--service" in service["problem"]
        assert server.lock()["state"] in ("recovering", "held")

    async def freed() -> None:
        await auntil(
            lambda: server.status()["service"]["active"]["state"] == "waiting", "the freed port"
        )

    asyncio.run(freed())
