"""The wire's limits: what one peer can make large, slow or numerous, and what it is told."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from plumbing.errors import RemoteError, UnderstudyError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.connection import FRAMES_PER_TURN, Connection
from plumbing.wire.frames import encode_frame
from plumbing.wire.messages import FAULT_DETAILS_BYTES_MAX, FAULT_MESSAGE_CHARS_MAX, fault_of
from tests.helpers import auntil, until
from tests.plumbing.wire.echo import CATALOGUE, Echo, EchoHandler, ServerThread, on_loops


def test_fault_is_cut_to_its_limits_and_keeps_what_fits():
    """Goal: message and details are bounded for any error; small details survive."""
    error = UnderstudyError("a.b", "m" * 10**6, big="x" * 10**6, field="f", list=[1] * 10**5)
    fault = fault_of(error)
    assert len(fault.message) == FAULT_MESSAGE_CHARS_MAX
    assert fault.details == {"field": "f"}
    assert len(CATALOGUE.encode(fault)) < FAULT_MESSAGE_CHARS_MAX + FAULT_DETAILS_BYTES_MAX


@on_loops
async def test_busy_peer_does_not_starve_others():
    """Goal: a peer that sends a thousand requests at once is served a few at a time. Method: both
    peers have written before the loop looks; where in the order is the quiet one's request?"""
    handler = EchoHandler()
    (ours, talker), (also_ours, quiet) = socket.socketpair(), socket.socketpair()
    frame = encode_frame(CATALOGUE.encode(Echo("again")), 0)
    talker.sendall(frame * 1000)
    quiet.sendall(encode_frame(CATALOGUE.encode(Echo("once")), 0))
    conns = [Connection(sock, CATALOGUE, handler) for sock in (ours, also_ours)]
    await auntil(lambda: len(handler.received_messages) == 1001, "every request")
    assert handler.received_messages.index(Echo("once")) <= 2 * FRAMES_PER_TURN
    talker.sendall(frame)
    await auntil(lambda: len(handler.received_messages) == 1002, "reading to go on")
    for conn in conns:
        conn.close("done")
    await asyncio.sleep(0)
    talker.close()
    quiet.close()


@pytest.mark.parametrize("limit", ["per_peer_max", "connections_max"])
def test_connections_are_limited_in_all_and_of_one_process(limit: str, tmp_path: Path):
    """Goal: one process cannot take all connections; the error names whose limit it is, and when
    one closes there is room. Method: a limit of two."""
    with ServerThread(str(tmp_path / "echo.sock"), **{limit: 2}) as thread:
        clients = [BlockingClient(thread.path, CATALOGUE) for _ in range(2)]
        for client in clients:
            client.request(Echo("in"))
        with (
            BlockingClient(thread.path, CATALOGUE) as third,
            pytest.raises(RemoteError, match=r"wire\.too_many_connections") as caught,
        ):
            third.receive()
        who = "echo" if limit == "connections_max" else f"pid {os.getpid()}"
        assert f"{who} has 2 connections" in caught.value.message
        clients.pop().close()
        until(lambda: len(thread.server.connections) < 2, "room")
        with BlockingClient(thread.path, CATALOGUE) as fourth:
            assert fourth.request(Echo("in")).message == Echo("in")
        clients.pop().close()
