"""Peers of the TCP server: without the right certificate a client is refused and the service never
called; one that misbehaves loses its connection, and the others are not affected."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from plumbing.errors import UnreachableError
from plumbing.wire import tcp
from plumbing.wire.frames import encode_frame
from plumbing.wire.tcp import Security, connect_tcp
from tests.helpers import auntil
from tests.plumbing.wire.certificates import Authority
from tests.plumbing.wire.echo import CATALOGUE, LOOPS, Echo, EchoHandler, run_on
from tests.plumbing.wire.tcp_rig import (
    HELLO,
    Client,
    answers,
    anybody,
    gone,
    heard,
    serving,
    settings,
    stranger,
)

loops = pytest.mark.parametrize("loop", LOOPS)


def _another_ca(place: Path, ca: Authority) -> tuple[Security, str, str]:
    (place / "other").mkdir()
    other = Authority(place / "other", "other").issue("engine-1")
    return Security(other.cert, other.key, ca.path), "unable to get local issuer", "sent welcome"


def _its_ca_does_not_know_us(place: Path, ca: Authority) -> tuple[Security, str, str]:
    (place / "other").mkdir()
    good, other = ca.issue("engine-1"), Authority(place / "other", "other")
    return (
        Security(good.cert, good.key, other.path),
        "each must trust",
        "certificate is not trusted",
    )


def _expired(_: Path, ca: Authority) -> tuple[Security, str, str]:
    return ca.issue("engine-1", age_days=5), "certificate has expired", "sent welcome"


def _not_yet_valid(_: Path, ca: Authority) -> tuple[Security, str, str]:
    return ca.issue("engine-1", age_days=-5), "not yet valid", "sent welcome"


def _for_servers_only(_: Path, ca: Authority) -> tuple[Security, str, str]:
    return ca.issue("engine-1", uses=("server",)), "certificate purpose", "sent welcome"


def _by_an_engine(_: Path, ca: Authority) -> tuple[Security, str, str]:
    return ca.issue("engine-1", issuer="engine-0"), "not trusted", "sent welcome"


@loops
@pytest.mark.parametrize(
    "made",
    [
        _another_ca,
        _its_ca_does_not_know_us,
        _expired,
        _not_yet_valid,
        _for_servers_only,
        _by_an_engine,
    ],
)
def test_tcp_stranger_is_refused_and_both_sides_know_the_reason(
    loop: str, made: Callable[..., tuple[Security, str, str]], tmp_path: Path
):
    """Goal: each wrong certificate is refused before the service is called, and the
    client's own handler is not called either. Method: a table, with the errors of both sides."""

    async def main() -> None:
        ca = Authority(tmp_path)
        ours, friend = ca.issue("lockserver"), ca.issue("engine-0")
        theirs, server_says, client_says = made(tmp_path, ca)
        handler, client = EchoHandler(), Client()
        async with serving(ours, handler) as (server, address):
            with pytest.raises(UnreachableError) as caught:
                await connect_tcp(address, CATALOGUE, client, theirs)
            assert client_says in caught.value.message
            await auntil(lambda: server.refused_count == 1, "the server to refuse it")
            assert server_says in str(server.last_refusal)
            assert (handler.opened_count, client.opened_count, client.reasons) == (0, 0, [])
            assert await answers(address, friend)

    run_on(loop, main())


@loops
def test_tcp_client_without_a_certificate_or_with_old_tls_is_refused(loop: str, tmp_path: Path):
    """Goal: TLS alone is not enough: without a certificate, or below TLS 1.3, a client is refused.
    Method: a client that trusts any server and has no certificate."""

    async def main() -> None:
        ours, theirs = settings(tmp_path)
        old = theirs._make(ssl.PROTOCOL_TLS_CLIENT)
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
        handler = EchoHandler()
        async with serving(ours, handler) as (server, address):
            reader, writer = await stranger(address, anybody())
            writer.write(HELLO)
            assert await heard(reader) == []
            await auntil(lambda: server.refused_count == 1, "the refusal")
            assert "did not return a certificate" in str(server.last_refusal)
            await gone(writer)
            with pytest.raises((OSError, ssl.SSLError)):
                await stranger(address, old)
            await auntil(lambda: server.refused_count == 2, "the refusal")
            assert "unsupported protocol" in str(server.last_refusal)
            assert handler.opened_count == 0

    run_on(loop, main())


@loops
@pytest.mark.parametrize("limit", ["HANDSHAKES_MAX", "HANDSHAKES_PER_ADDRESS_MAX"])
def test_tcp_unfinished_handshakes_are_limited(
    loop: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: unfinished handshakes are limited: sockets beyond the limit are closed at once, and
    later ones are accepted when there is room. Method: a limit of three, and silent peers."""
    monkeypatch.setattr(tcp, limit, 3)

    async def main() -> None:
        ours, theirs = settings(tmp_path)
        async with serving(ours) as (server, address):
            mutes = []
            for count in range(1, 4):
                mutes.append(socket.create_connection((address.host, address.port)))
                await auntil(lambda n=count: len(server._handshakes) == n, "the handshake")
            with pytest.raises(UnreachableError):
                await connect_tcp(address, CATALOGUE, Client(), theirs)
            assert "too many unfinished handshakes" in str(server.last_refusal)
            for mute in mutes:
                mute.close()
            await auntil(lambda: not server._handshakes, "the handshakes to be over")
            assert await answers(address, theirs)

    run_on(loop, main())


@loops
@pytest.mark.parametrize("limit", ["connections_max", "per_address_max"])
def test_tcp_connections_are_limited(loop: str, limit: str, tmp_path: Path):
    """Goal: one connection too many, in all or from one address, gets an error; when one closes
    there is room. Method: a limit of two."""

    async def main() -> None:
        ours, theirs = settings(tmp_path)
        async with serving(ours, **{limit: 2}) as (server, address):
            conns = [await connect_tcp(address, CATALOGUE, Client(), theirs) for _ in range(2)]
            client = Client()
            with pytest.raises(UnreachableError) as caught:
                await connect_tcp(address, CATALOGUE, client, theirs)
            assert caught.value.code == "wire.too_many_connections"
            subject = "echo" if limit == "connections_max" else "127.0.0.1"
            assert caught.value.message.startswith(f"{subject} has 2 connections")
            assert (client.opened_count, client.reasons) == (0, [])
            conns.pop().close("done")
            await auntil(lambda: len(server.connections) < 2, "room")
            assert await answers(address, theirs)
            conns.pop().close("done")

    run_on(loop, main())


@loops
def test_tcp_reader_that_does_not_read_is_dropped(loop: str, tmp_path: Path):
    """Goal: the queue of a peer is bounded; a peer that does not read is dropped, and the others
    are served. Method: a peer that sends requests and never reads an answer."""

    async def main() -> None:
        ours, theirs = settings(tmp_path)
        handler = EchoHandler()
        async with serving(ours, handler) as (_, address):
            _, writer = await stranger(address, theirs.client_context())
            writer.transport.pause_reading()
            ask = encode_frame(CATALOGUE.encode(Echo("x" * 90_000), 1), 0)
            while not handler.reasons:
                writer.write(ask)
                await asyncio.sleep(0)
            assert "does not read" in handler.reasons[0]
            assert await answers(address, theirs)
            writer.transport.abort()

    run_on(loop, main())
