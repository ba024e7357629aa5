"""What a drain leaves to the next engine: a stream whose connection may be closed already."""

from __future__ import annotations

import asyncio
import socket

import uvloop

from engine.backends.reference.application import MarkedStream
from tests.helpers import auntil


class Connection(asyncio.Protocol):
    is_lost = False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True


def test_stream_that_the_gateway_has_left_is_left_alone():
    """Goal: a gateway that parks a stream itself, just before the drain, costs the engine nothing.
    Method: uvloop's transport of a connection that the peer has closed, which refuses writes."""

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        transport, protocol = await asyncio.get_running_loop().connect_accepted_socket(
            Connection, ours
        )
        stream = MarkedStream(transport)
        stream.has_begun = True
        theirs.close()
        await auntil(lambda: protocol.is_lost, "the end to be seen")
        stream.leave()

    uvloop.run(scenario())
