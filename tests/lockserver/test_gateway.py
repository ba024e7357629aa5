"""The service socket: who is lent it, who accepts, what a gateway is told; how it is bound and
taken back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest

from lockserver.cli import parse_service
from lockserver.messages import CATALOGUE, BorrowMsg, Stage
from lockserver.server.gateways import ServiceSocket
from plumbing.errors import ProtocolError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import OwnedFd, close_all
from tests.helpers import auntil, free_port, open_fds
from tests.lockserver.engines import Engine
from tests.lockserver.gateways import Gateway
from tests.lockserver.processes import run_command_of

GATEWAY = "00112233445566aa"


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def server(start_server, port):
    return start_server("--service", f"active=127.0.0.1:{port}")


async def test_gateway_is_lent_the_socket_before_any_engine_exists_and_told_of_each_grant(
    pod_dir, server, port
):
    """Goal: a gateway needs no lock: it gets the socket, why nobody serves, then who does. Method:
    one that connects first, one that connects later; an engine takes the lock, then another."""
    async with Gateway(pod_dir) as first:
        client = caller(port)
        accepted = await first.accept()
        assert await asyncio.get_running_loop().sock_recv(accepted, 4096) == REQUEST
        accepted.close()
        client.close()
        await auntil(lambda: first.reasons, "the reason why nobody serves")
        assert "free" in first.reasons[0]
        async with Engine(pod_dir, "engine-0") as holder, Engine(pod_dir, "engine-1") as other:
            token = await holder.hold()
            await other.stand_by()
            await auntil(lambda: first.grants, "the grant to be told")
            era = server.status()["era"]
            assert first.grants == [("engine-0", token, era)]
            async with Gateway(pod_dir) as second:
                await auntil(lambda: second.heard, "the holder to be told")
                assert second.heard == [("engine-0", token, era)]
                holder.reap()
                holder.relent()
                await other.granted()
                now = ("engine-1", other.token(), era)
                await auntil(lambda: {first.heard[-1], second.heard[-1]} == {now}, "the next")
            assert holder.client.heard("service") == [f"127.0.0.1:{port}"]


async def test_gateway_hands_the_socket_back_to_a_restarted_server_and_no_connection_is_refused(
    pod_dir, server, port
):
    """Goal: the lock server's death costs a gateway and its clients nothing. Method: kill it while
    a gateway, which alone has the socket, accepts; connect meanwhile; restart it."""
    async with Gateway(pod_dir) as gateway, Engine(pod_dir, "engine-0") as holder:
        await gateway.accepts()
        listener = gateway.listeners[0]
        token = await holder.hold()
        await auntil(lambda: gateway.grants, "the grant to be told")
        era = server.status()["era"]
        server.kill()
        waiting = caller(port)
        server.start()
        await auntil(lambda: gateway.connects == 2, "the gateway to reconnect")
        await auntil(
            lambda: server.status()["service"]["active"]["state"] == "lent", "the hand-back"
        )
        assert server.status()["era"] == era
        assert [each["gateway"] for each in server.status()["gateways"]] == [gateway.gateway]
        assert gateway.listeners == [listener]  # it has kept its copy
        accepted = await gateway.accept()
        assert await asyncio.get_running_loop().sock_recv(accepted, 4096) == REQUEST
        accepted.close()
        waiting.close()
        # The holder on file may be serving, so the gateway is told its grant and no reason.
        assert set(gateway.heard[1:] if gateway.reasons else gateway.heard) == {
            ("engine-0", token, era)
        }


async def test_connections_wait_for_a_gateway_and_are_refused_once_none_came_for_the_hold(
    pod_dir, start_server, port
):
    """Goal: no client waits for nobody. Method: connect before the hold is over and after it; then
    a gateway asks, and the address is there again."""
    server = start_server("--service", f"active=127.0.0.1:{port}", "--hold-ms", "500")

    def state() -> str:
        return str(server.status()["service"]["active"]["state"])

    early = caller(port)
    await auntil(lambda: state() == "closed", "the hold to be over")
    with pytest.raises(ConnectionError):
        caller(port)
    with pytest.raises(ConnectionError):
        await asyncio.get_running_loop().sock_recv(early, 4096)
    early.close()
    async with Gateway(pod_dir) as gateway:
        await gateway.accepts()
        assert state() == "lent"
        client = caller(port)
        (await gateway.accept()).close()
        client.close()
    await auntil(lambda: state() == "waiting", "its end to be seen")


async def test_successor_is_lent_the_socket_once_the_first_has_yielded_and_gives_it_back_by_its_end(
    pod_dir, server, port
):
    """Goal: one gateway accepts at a time, the newest that lives. Method: two; the second asks, the
    first yields, the second ends; then one that does not yield."""
    async with Gateway(pod_dir) as first:
        await first.accepts()
        async with Gateway(pod_dir) as second:
            await auntil(lambda: first.yields, "the first to be told")
            assert not second.listeners
            first.set_stage(Stage.YIELDS)
            await second.accepts()
            stages = [each["stage"] for each in server.status()["gateways"]]
            assert stages == ["yields", "accepts"]
        await auntil(lambda: len(first.listeners) == 2, "the first to be lent it again")
        first.set_stage(Stage.ACCEPTS)
        async with Gateway(pod_dir) as third:
            await third.wait_lent()  # after two seconds, since the first one hangs
            assert first.yields == 2


async def test_gateway_that_cannot_be_served_is_told_why_and_how_to_change_it(
    pod_dir, start_server
):
    """Goal: one clear error for a gateway beside a lock server without an address."""
    server = start_server()
    async with Gateway(pod_dir) as gateway:
        await auntil(lambda: gateway.refusals, "the refusal")
        assert set(gateway.refusals) == {"lock.no_service"}
        assert "--" in str(gateway.problem)
        assert gateway.listeners == []
    assert server.status()["gateways"] == []


def test_newest_connection_of_a_gateway_counts(pod_dir, server):
    path = os.path.join(pod_dir, "lockserver.sock")
    with BlockingClient(path, CATALOGUE) as first, BlockingClient(path, CATALOGUE) as second:
        for client, stage in ((first, Stage.ASKS), (second, Stage.ACCEPTS)):
            client.notify(BorrowMsg(GATEWAY, stage))
            close_all(client.receive(30.0).fds)
        (gateway,) = server.status()["gateways"]
        assert (gateway["gateway"], gateway["stage"]) == (GATEWAY, "accepts")


REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


def caller(port: int, request: bytes = REQUEST) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(request)
    sock.setblocking(False)
    return sock


async def test_service_takes_only_its_own_listening_socket():
    """Goal: handing back a wrong socket is the sender's error. Method: one end of a socket pair,
    and a socket on another address."""
    before = len(open_fds())
    with contextlib.closing(ServiceSocket(f"127.0.0.1:{free_port()}")) as service:
        service.bind()
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
        service.take(copy)  # it already has it
    assert len(open_fds()) == before


@pytest.mark.parametrize("bad", ["active", "active=", "active=:80", "active=h:0", "=h:1", "a=h:x"])
def test_service_flag_bad_values_are_refused(bad):
    """Goal: one clear error for a bad flag. Method: parse it."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_service(bad)


def test_service_address_in_use_at_the_first_start_is_one_clear_error(pod_dir):
    """Goal: the error for a port in use names the process. Method: listen there, start a fresh
    server."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        flags = ("--http-port", "0", "--service", f"active=127.0.0.1:{port}")
        ran = run_command_of(pod_dir, "serve", *flags)
    assert ran.returncode == 1
    assert f"127.0.0.1:{port} is in use by pid {os.getpid()}" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
async def test_service_address_taken_while_down_is_waited_for_and_reported(
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
        waits = {each["reason"]: each for each in server.lock()["waits"]}
        assert waits["address_away"]["evidence"] == [service["problem"]]
        assert waits["no_gateway"]["fix"] == f"start one: gateway serve --dir {pod_dir}"
        assert server.lock()["state"] in ("recovering", "held")
    await auntil(
        lambda: server.status()["service"]["active"]["state"] == "waiting", "the freed port"
    )
