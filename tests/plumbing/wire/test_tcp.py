"""The server over TCP: the same words as on a Unix socket, for those who prove who they are."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plumbing.errors import ProtocolError
from plumbing.wire import connection
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.frames import encode_frame
from plumbing.wire.messages import FaultMsg
from plumbing.wire.tcp import Security, TcpConnection, connect_tcp
from tests.helpers import auntil, open_fds
from tests.plumbing.wire.certificates import shared
from tests.plumbing.wire.echo import CATALOGUE, LOOPS, Echo, EchoHandler, Refuse, run_on
from tests.plumbing.wire.tcp_rig import (
    Client,
    gone,
    heard,
    serving,
    settings,
    stranger,
)

ROOT = str(Path(__file__).resolve().parents[3])

loops = pytest.mark.parametrize("loop", LOOPS)


def socket_of(end: Connection) -> Any:
    assert isinstance(end, TcpConnection)
    return end._transport.get_extra_info("socket")


@loops
def test_tcp_server_answers_and_both_sides_are_notified_of_the_end(loop: str, tmp_path: Path):
    """Goal: an echo, an error that keeps its code, `closed` called once on both sides, nothing
    leaked; the server knows the client by its certificate's name or its address."""

    async def exchange(ours: Security | None, theirs: Security | None) -> None:
        handler, client = EchoHandler(), Client()
        async with serving(ours, handler) as (server, address):
            conn = await connect_tcp(address, CATALOGUE, client, theirs)
            assert (handler.opened_count, client.opened_count) == (1, 1)
            (peer,) = [other.peer for other in server.connections]
            assert (peer.uid, peer.pid, peer.pidfd, peer.pidfd_source) == (-1, 0, None, "none")
            assert peer.host == "127.0.0.1"
            assert peer.name == "engine-0"
            assert conn.peer.name == "lockserver"
            for text in ("one", "two" * 30_000):
                conn.send(Echo(text), 7)
                await auntil(lambda text=text: Echo(text) in client.received_messages, "the echo")
            conn.send(Refuse(), 8)
            await auntil(lambda: client.reasons, "the end")
            fault = client.received_messages[-1]
            assert isinstance(fault, FaultMsg)
            assert fault.code == "test.refused"
            await auntil(lambda: handler.reasons, "the server to see the end")
        assert (len(handler.reasons), len(client.reasons)) == (1, 1)

    async def main() -> None:
        ours, theirs = settings(tmp_path)
        await exchange(ours, theirs)  # libuv opens one file of its own at the first connection
        before = len(open_fds())
        await exchange(ours, theirs)
        await auntil(lambda: len(open_fds()) <= before, "everything to be closed")

    run_on(loop, main())


def test_tcp_refuses_to_send_descriptors(tmp_path: Path):
    """Goal: sending descriptors over TCP is refused here, and they are closed."""

    async def main() -> None:
        async with serving(shared()) as (server, address):
            assert server.security_problem is None
            conn = await connect_tcp(address, CATALOGUE, Client(), shared())
            fd = OwnedFd(os.memfd_create("x"))
            with pytest.raises(ProtocolError, match="over TCP, none") as caught:
                conn.send(Echo("x"), 0, [fd])
            assert caught.value.code == "wire.too_many_fds"
            assert fd.is_closed
            conn.close("done")

    asyncio.run(main())


@loops
def test_tcp_final_error_reaches_a_peer_that_is_still_sending(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: everything that was sent before the end arrives, the error last: closing a socket with
    bytes unread resets it, which loses unsent data. Method: answers that do not fit the socket, an
    error, and a peer that reads late and keeps sending."""
    monkeypatch.setattr(connection, "FLUSH_DEADLINE_S", 30.0)

    async def main() -> None:
        ours, theirs = settings(tmp_path)
        handler = EchoHandler()
        async with serving(ours, handler) as (server, address):
            reader, writer = await stranger(address, theirs.client_context())
            (ended,) = await auntil(lambda: server.connections, "the connection")
            writer.transport.pause_reading()
            socket_of(ended).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            large = encode_frame(CATALOGUE.encode(Echo("x" * 90_000), 2), 0)
            writer.write(large * 5 + encode_frame(CATALOGUE.encode(Refuse(), 1), 0) + large * 20)
            await auntil(lambda: len(handler.received_messages) == 6, "the refusal")
            assert not ended.is_closed
            writer.transport.resume_reading()
            found = await heard(reader, 6)
            assert found[:5] == [Echo("x" * 90_000)] * 5
            assert isinstance(found[5], FaultMsg)
            assert found[5].code == "test.refused"
            await gone(writer)
            await auntil(lambda: handler.reasons, "the end")
            assert handler.reasons == ["refused as asked [test.refused]"]

    run_on(loop, main())


_CABLE = """
import asyncio, fcntl, socket, struct, sys
sys.path.insert(0, sys.argv[1])
from tests.helpers import auntil
from tests.plumbing.wire.certificates import shared
from tests.plumbing.wire.echo import CATALOGUE, LOOPS, Echo, EchoHandler
from tests.plumbing.wire.tcp_rig import Client, serving
from plumbing.wire import tcp as tcp_connection
from plumbing.wire.tcp import connect_tcp

tcp_connection.UNACKNOWLEDGED_MS_MAX = 300
tcp_connection.KEEPALIVE_IDLE_S = 1

def plug(flags):  # SIOCSIFFLAGS, man 7 netdevice: struct ifreq has 40 bytes
    with socket.socket() as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh22x", b"lo", flags))

async def main():
    handler, client = EchoHandler(), Client()
    async with serving(shared(), handler) as (_, address):
        conn = await connect_tcp(address, CATALOGUE, client, shared())
        conn.send(Echo("heard"))
        await auntil(lambda: client.received_messages, "the echo")
        plug(0)
        conn.send(Echo("lost"))
        await auntil(lambda: client.reasons, "the end on the side that spoke")
        await auntil(lambda: handler.reasons, "the end on the side that had nothing to say")
        print(client.reasons, handler.reasons, len(client.received_messages))

plug(0x49)  # IFF_UP, IFF_LOOPBACK, IFF_RUNNING
with asyncio.Runner(loop_factory=LOOPS[sys.argv[2]]) as runner:
    runner.run(main())
"""


@loops
def test_tcp_half_open_connection_ends(loop: str):
    """Goal: a peer whose host vanishes is detected by missing acknowledgements, of data or of
    keepalives. Method: a network namespace whose only device goes down, and short timeouts."""
    command = ["unshare", "--user", "--map-root-user", "--net"]
    probe = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=60)
    if probe.returncode:
        pytest.skip(f"no network namespace can be made here: {probe.stderr.strip()}")
    done = subprocess.run(
        [*command, sys.executable, "-c", _CABLE, ROOT, loop],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the peer is gone") == 2
