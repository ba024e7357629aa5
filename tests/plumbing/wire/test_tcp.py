"""The server over TCP: the same words as on a Unix socket, for those who prove who they are."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from plumbing.errors import ProtocolError
from plumbing.wire import connection
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.frames import encode_frame
from plumbing.wire.messages import FaultMsg
from plumbing.wire.peer import NO_UID, Peer
from plumbing.wire.tcp import TcpConnection, connect_tcp
from tests.helpers import auntil
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


FRAME = encode_frame(CATALOGUE.encode(Echo("x")), 0)


class Transport:
    """It is in one state, and notes what it is asked to do."""

    def __init__(self, *, is_closing: bool = False) -> None:
        self._is_closing = is_closing
        self.calls: list[str] = []

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, _: bytes) -> None:
        self.calls.append("write")

    def abort(self) -> None:
        self.calls.append("abort")

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")


def _over(transport: Transport, handler: EchoHandler) -> TcpConnection:
    peer = Peer(NO_UID, 0, None, "none", "10.0.0.1:1", "10.0.0.1")
    return TcpConnection(cast("asyncio.Transport", transport), peer, CATALOGUE, handler)


def test_tcp_connection_with_a_closing_transport_closes_at_once():
    """Goal: nothing can be sent over a transport that is closing: the connection closes with its
    own reason."""

    async def main() -> None:
        transport, handler = Transport(is_closing=True), EchoHandler()
        conn = _over(transport, handler)
        conn.send(Echo("x"))
        conn.close_soon("enough")
        assert conn.is_closed
        conn.connection_lost(OSError("late"))
        conn.data_received(FRAME)
        await asyncio.sleep(0)
        assert handler.reasons == ["enough"]
        assert transport.calls[-1] == "abort"

    asyncio.run(main())


def test_tcp_connection_handles_its_frames_while_the_transport_closes():
    """Goal: a closing transport is neither paused nor resumed, which uvloop would refuse, and the
    frames that arrived are handled."""

    async def main() -> None:
        handler = Client()
        transport = Transport(is_closing=True)
        conn = _over(transport, handler)
        conn.data_received(FRAME * 20)
        await auntil(lambda: len(handler.received_messages) == 20, "every frame")
        await asyncio.sleep(0)
        assert transport.calls == []
        conn.close("done")

    asyncio.run(main())


def test_tcp_connection_accepts_data_while_paused():
    """Goal: TLS may deliver decrypted data after it was paused; it is handled in order, a few
    frames at a time."""

    async def main() -> None:
        handler = Client()
        transport = Transport()
        conn = _over(transport, handler)
        conn.data_received(FRAME * 20)
        conn.data_received(encode_frame(CATALOGUE.encode(Echo("last")), 0))
        assert len(handler.received_messages) < 20
        await auntil(lambda: transport.calls == ["pause", "resume"], "reading to go on")
        assert len(handler.received_messages) == 21
        assert handler.received_messages[-1] == Echo("last")
        conn.close("done")

    asyncio.run(main())


def test_tcp_connection_keeps_reading_after_close_soon():
    """Goal: a paused connection resumes reading when it closes, to detect the peer's end; what it
    reads is dropped."""

    async def main() -> None:
        handler = Client()
        transport = Transport()
        conn = _over(transport, handler)
        conn.data_received(FRAME * 20)
        count = len(handler.received_messages)
        conn.close_soon("enough")
        conn.data_received(FRAME)
        assert transport.calls == ["pause", "resume"]
        await asyncio.sleep(0)
        assert len(handler.received_messages) == count
        conn.connection_lost(None)
        await asyncio.sleep(0)
        assert handler.reasons == ["enough"]

    asyncio.run(main())
