"""A TCP connection over a transport in states that real ones pass through too quickly."""

from __future__ import annotations

import asyncio
from typing import cast

from plumbing.wire.frames import encode_frame
from plumbing.wire.peer import NO_UID, Peer
from plumbing.wire.tcp import TcpConnection
from tests.helpers import auntil
from tests.plumbing.wire.echo import CATALOGUE, Echo, EchoHandler
from tests.plumbing.wire.tcp_rig import Client

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
