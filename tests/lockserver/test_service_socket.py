"""The service socket: lent, held with 503s while no gateway accepts, handed back afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest

from lockserver.server import service_socket
from lockserver.server.service_socket import ServiceSocket, parse_service
from plumbing.errors import ProtocolError
from plumbing.wire.fds import OwnedFd
from tests.helpers import auntil, free_port, open_fds
from tests.lockserver.engines import Engine
from tests.lockserver.gateways import Gateway

REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


def caller(port: int, request: bytes = REQUEST) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(request)
    sock.setblocking(False)
    return sock


async def read_all(sock: socket.socket) -> bytes:
    data = b""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(30):
        while more := await loop.sock_recv(sock, 65536):
            data += more
    sock.close()
    return data


@contextlib.contextmanager
def service_on(port: int, hold_ms: float = 0.0):
    service = ServiceSocket("active", f"127.0.0.1:{port}", hold_ms)
    assert service.bind()
    try:
        yield service
    finally:
        service.close()


def test_service_held_answers_503_with_an_openai_error_that_says_why():
    """Goal: no client hangs without an answer. Method: a request while no gateway accepts, after
    hold_ms."""

    async def scenario() -> None:
        with service_on(free_port(), hold_ms=1000) as service:
            port = service._sockaddr[1]
            sock = caller(port)
            service.watch(is_accepted=False, now_ms=0)
            service.watch(is_accepted=False, now_ms=999)
            assert service.state == "lent"
            service.watch(is_accepted=False, now_ms=1000)
            assert service.state == "holding"
            head, _, body = (await read_all(sock)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nRetry-After: 1" in head
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("service_unavailable", "no_gateway")

    asyncio.run(scenario())


def test_service_leaves_new_connections_to_the_gateway_and_answers_accepted_ones():
    """Goal: the server stops accepting once a gateway does, and drops no connection. Method: accept
    a connection that has sent no request yet, then a gateway accepts; send its request, and open
    another."""

    async def scenario() -> None:
        with service_on(free_port()) as service:
            port = service._sockaddr[1]
            service.watch(is_accepted=False, now_ms=0)
            early = caller(port, b"GET /v1/models HTTP/1.1\r\n")
            await auntil(lambda: service._callers, "the early one to be accepted")
            service.watch(is_accepted=True, now_ms=1)
            late = caller(port)
            early.send(b"Host: x\r\n\r\n")
            assert b"503" in await read_all(early)
            copy = service.copy()
            assert copy is not None
            with socket.socket(fileno=copy.detach()) as gateway:
                accepted, _ = gateway.accept()
                assert accepted.recv(4096) == REQUEST
                accepted.close()
            late.close()

    asyncio.run(scenario())


def test_service_bad_callers_cost_nothing():
    """Goal: random bytes, endless headers and clients that leave early. Method: each of them, then
    count descriptors."""

    async def scenario() -> None:
        with service_on(free_port()) as service:
            port = service._sockaddr[1]
            service.watch(is_accepted=False, now_ms=0)
            before = len(open_fds())
            caller(port, b"\0\xff" * 100).close()
            caller(port, b"").close()
            endless = caller(port, b"x" * 70_000)
            assert b"503" in await read_all(endless)
            await auntil(lambda: len(open_fds()) == before, "every caller to be closed")

    asyncio.run(scenario())


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
    with pytest.raises(ValueError, match="LOCK=HOST:PORT"):
        parse_service(bad)


def test_service_is_lent_and_handed_back_after_a_server_restart(pod_dir, start_server):
    """Goal: no connection is refused while the server and the gateway are down. Method: engines
    keep copies of the socket; kill the server while a client waits; the restarted one gets the
    socket back and lends it to a gateway, and the client is still in the backlog."""
    port = free_port()
    server = start_server("--service", f"active=127.0.0.1:{port}")

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-0") as holder, Engine(pod_dir, "engine-1") as standby:
            await holder.hold()
            await auntil(lambda: holder.services and standby.services, "the socket to be lent")
            server.kill()
            waiting = caller(port)
            server.start()
            await auntil(
                lambda: server.status()["service"]["active"]["state"] == "lent",
                "the socket to return",
            )
            async with Gateway(pod_dir) as gateway:
                accepted = await gateway.accept()
                assert await asyncio.get_running_loop().sock_recv(accepted, 4096) == REQUEST
                accepted.close()
            waiting.close()

    asyncio.run(scenario())


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
            lambda: server.status()["service"]["active"]["state"] == "lent", "the freed port"
        )

    asyncio.run(freed())


def test_service_holds_only_its_share_of_descriptors(monkeypatch):
    """Goal: callers without a request leave the server its descriptors. Method: a limit of two,
    more callers than that, who then leave."""
    monkeypatch.setattr(service_socket, "HELD_MAX", 2)

    async def scenario() -> None:
        with service_on(free_port()) as service:
            port = service._sockaddr[1]
            mutes = [caller(port, b"GET") for _ in range(5)]
            service.watch(is_accepted=False, now_ms=0)
            await auntil(lambda: len(service._callers) == 2, "the callers")
            assert service.state == "lent"  # the others wait in the backlog
            for mute in mutes:
                mute.close()
            answer = asyncio.ensure_future(read_all(caller(port)))

            def is_answered() -> bool:
                service.watch(is_accepted=False, now_ms=0)  # as at each tick
                return answer.done()

            await auntil(is_answered, "an answer")
            assert b"503" in answer.result()

    asyncio.run(scenario())
