"""Peers over TCP that are broken or mean: each costs itself a connection, and others nothing."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers import auntil, open_fds
from tests.wire.certificates import Authority, write_secret
from tests.wire.echo import CATALOGUE, LOOPS, Echo, EchoHandler, run_on
from tests.wire.tcp_rig import (
    KINDS,
    Client,
    answers,
    anybody,
    gone,
    heard,
    reset,
    serving,
    settings,
    stranger,
    tls_of,
)
from understudy.errors import UnreachableError
from understudy.wire import connection, listener, tcp
from understudy.wire.address import TcpAddress
from understudy.wire.frames import HEADER, MAGIC, VERSION, encode_frame
from understudy.wire.messages import Fault, Hello
from understudy.wire.security import Security
from understudy.wire.tcp import connect_tcp

loops = pytest.mark.parametrize("loop", LOOPS)
kinds = pytest.mark.parametrize("kind", KINDS)

HELLO = encode_frame(CATALOGUE.encode(Hello(), 1), 0)


@loops
@kinds
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x00" * 64, "wire.bad_magic"),
        (b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n", "wire.bad_magic"),
        (HEADER.pack(MAGIC, VERSION + 1, 0, 0, 0), "wire.version"),
        (HEADER.pack(MAGIC, VERSION, 0, 0, 2**31), "wire.frame_too_large"),
        (HEADER.pack(MAGIC, VERSION, 3, 0, 10), "wire.too_many_fds"),
        (encode_frame(b"\xc1\xc1\xc1", 0), "wire.bad_payload"),
        (HELLO[:-3], "wire.frame_deadline"),
        (b"", "wire.first_frame_deadline"),
    ],
    ids=["zeros", "http", "version", "huge", "descriptors", "payload", "half a frame", "silence"],
)
def test_tcp_bad_input_costs_its_sender_only(
    loop: str, kind: str, data: bytes, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: who got in and then talks nonsense, announces descriptors, or stops talking, hears why
    and is dropped; others are served. Method: raw bytes after the handshake; short deadlines where
    the peer is silent."""
    monkeypatch.setattr(connection, "FLUSH_DEADLINE_S", 0.1)  # TLS cannot say that one side ended
    if code.endswith("_deadline"):
        monkeypatch.setattr(connection, "FRAME_DEADLINE_S", 0.05)
        monkeypatch.setattr(listener, "FIRST_FRAME_DEADLINE_S", 5.0 if data else 0.05)

    async def main() -> None:
        ours, theirs = settings(kind, tmp_path)
        handler = EchoHandler()
        async with serving(ours, handler) as (server, address):
            reader, writer = await stranger(address, tls_of(theirs))
            writer.write(data)
            (fault,) = await heard(reader)
            assert isinstance(fault, Fault)
            assert fault.code == code
            await gone(writer)
            await auntil(lambda: handler.reasons, "the server to see the end")
            assert await answers(address, theirs)
            await auntil(lambda: not server.connections, "nobody to be left")

    run_on(loop, main())


# ---------------------------------------------------------------------- during the handshake


async def _bytes(address: TcpAddress, data: bytes) -> asyncio.StreamWriter:
    _, writer = await stranger(address)
    writer.write(data)
    return writer


@loops
@pytest.mark.parametrize("kind", ["psk", "tls"])
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x00" * 64, "TLS failed"),
        (b"GET / HTTP/1.1\r\n\r\n", "TLS failed: http request"),
        (HELLO, "TLS failed: wrong version number"),
        (b"\x16\x03\x01\x02\x00\x01", "longer than"),
        (b"", "longer than"),
    ],
    ids=["zeros", "http", "our frames in plain", "half a hello", "silence"],
)
def test_tcp_peer_that_speaks_no_tls_is_refused(
    loop: str,
    kind: str,
    data: bytes,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Goal: bytes that are no handshake, and a handshake that does not go on, end that socket; the
    service never hears of it, others get in meanwhile, and the server can say why. Method: raw
    bytes, and a short deadline where nothing follows."""
    if "longer" in why:
        monkeypatch.setattr(tcp, "HANDSHAKE_DEADLINE_S", 0.3)

    async def main() -> None:
        ours, theirs = settings(kind, tmp_path)
        handler = EchoHandler()
        async with serving(ours, handler) as (server, address):
            writer = await _bytes(address, data)
            assert await answers(address, theirs)
            await auntil(lambda: server.refused_count, "the refusal")
            assert why in str(server.last_refusal)
            assert str(server.last_refusal).startswith("127.0.0.1:")
            assert handler.opened_count == 1
            await auntil(lambda: not server._handshakes, "the handshake to be over")
            await gone(writer)

    run_on(loop, main())


@loops
@pytest.mark.parametrize("kind", KINDS)
def test_tcp_reset_in_the_middle(loop: str, kind: str, tmp_path: Path):
    """Goal: a peer that is reset in its handshake, or in a frame, costs nothing more. Method: both,
    with a linger time of zero; then somebody else is served and nothing is left open."""

    async def main() -> None:
        ours, theirs = settings(kind, tmp_path)
        handler = EchoHandler()
        async with serving(ours, handler) as (server, address):
            assert await answers(address, theirs)
            await auntil(lambda: not server.connections, "the first to be gone")
            before = len(open_fds())
            for data in (b"", b"\x16\x03\x01\x02\x00\x01", HELLO):
                reset(await _bytes(address, data))
            for data in (b"", HELLO[:-3], HELLO):
                _, writer = await stranger(address, tls_of(theirs))
                writer.write(data)
                reset(writer)
            assert await answers(address, theirs)
            await auntil(lambda: not server.connections and not server._handshakes, "the ends")
            await auntil(lambda: len(handler.reasons) == handler.opened_count, "each end once")
            await auntil(lambda: len(open_fds()) <= before, "everything to be closed")

    run_on(loop, main())


def _another_key(place: Path, _: Authority | None) -> tuple[Security | None, str, str]:
    return (
        Security(psk=write_secret(str(place / "other"), b"q" * 32)),
        "each must trust the other's",
        "it has another pre-shared key",
    )


def _another_ca(place: Path, ca: Authority) -> tuple[Security | None, str, str]:
    (place / "other").mkdir()
    other = Authority(place / "other", "other").issue("engine-1")
    return Security(other.cert, other.key, ca.path), "unable to get local issuer", "said welcome"


def _its_ca_does_not_know_us(place: Path, ca: Authority) -> tuple[Security | None, str, str]:
    (place / "other").mkdir()
    good, other = ca.issue("engine-1"), Authority(place / "other", "other")
    return (
        Security(good.cert, good.key, other.path),
        "each must trust",
        "certificate is not trusted",
    )


def _expired(_: Path, ca: Authority) -> tuple[Security | None, str, str]:
    return ca.issue("engine-1", age_days=5), "certificate has expired", "said welcome"


def _not_yet_valid(_: Path, ca: Authority) -> tuple[Security | None, str, str]:
    return ca.issue("engine-1", age_days=-5), "not yet valid", "said welcome"


def _for_servers_only(_: Path, ca: Authority) -> tuple[Security | None, str, str]:
    return ca.issue("engine-1", uses=("server",)), "certificate purpose", "said welcome"


def _by_an_engine(_: Path, ca: Authority) -> tuple[Security | None, str, str]:
    return ca.issue("engine-1", issuer="engine-0"), "not trusted", "said welcome"


@loops
@pytest.mark.parametrize(
    "made",
    [
        _another_key,
        _another_ca,
        _its_ca_does_not_know_us,
        _expired,
        _not_yet_valid,
        _for_servers_only,
        _by_an_engine,
    ],
)
def test_tcp_stranger_is_refused_and_both_sides_can_say_why(
    loop: str, made: Callable[..., tuple[Security, str, str]], tmp_path: Path
):
    """Goal: a wrong key and each wrong certificate is refused before the service hears of it, and
    the client's own handler hears of nothing either. Method: a table; the words of both sides."""

    async def main() -> None:
        if made is _another_key:
            ca = None
            ours, friend = settings("psk", tmp_path)
        else:
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
@pytest.mark.parametrize("kind", ["psk", "tls"])
def test_tcp_client_without_a_certificate_or_with_old_tls_is_refused(
    loop: str, kind: str, tmp_path: Path
):
    """Goal: TLS alone is not enough: without a certificate, or below TLS 1.3, nobody gets in.
    Method: a client that believes anything and proves nothing."""

    async def main() -> None:
        ours, theirs = settings(kind, tmp_path)
        old = theirs and theirs._make(ssl.PROTOCOL_TLS_CLIENT)
        assert old
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
@pytest.mark.parametrize("hosts", [("lock.example.org",), ("10.0.0.1",)])
def test_tcp_server_must_have_the_name_that_was_asked_for(
    loop: str, hosts: tuple[str, ...], tmp_path: Path
):
    """Goal: an engine's certificate cannot play the lock server: the name in it is checked. Method:
    a server whose certificate, of the right CA, names another host."""

    async def main() -> None:
        ca = Authority(tmp_path)
        async with serving(ca.issue("lockserver", hosts=hosts)) as (_, address):
            with pytest.raises(UnreachableError, match="mismatch"):
                await connect_tcp(address, CATALOGUE, Client(), ca.issue("engine-0"))

    run_on(loop, main())


# ---------------------------------------------------------------------- too many, too slow


@loops
@pytest.mark.parametrize("kind", ["plain", "tls"])
@pytest.mark.parametrize("limit", ["connections_max", "per_address_max"])
def test_tcp_connections_are_limited(loop: str, kind: str, limit: str, tmp_path: Path):
    """Goal: one too many, in all or of one address, is told so; when one leaves there is room.
    Method: a server with room for two."""

    async def main() -> None:
        ours, theirs = settings(kind, tmp_path)
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
@pytest.mark.parametrize("limit", ["HANDSHAKES_MAX", "HANDSHAKES_PER_ADDRESS_MAX"])
def test_tcp_unfinished_handshakes_are_limited(
    loop: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: sockets that never finish their handshake cannot pile up: beyond the limit they are cut
    off at once, and when they are gone others get in. Method: a limit of three, and mute peers."""
    monkeypatch.setattr(tcp, limit, 3)

    async def main() -> None:
        ours, theirs = settings("tls", tmp_path)
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
@kinds
def test_tcp_reader_that_does_not_read_is_dropped(loop: str, kind: str, tmp_path: Path):
    """Goal: what waits for one peer is bounded; the peer that does not read is dropped, and the
    others are served. Method: a peer that asks and asks and never reads an answer."""

    async def main() -> None:
        ours, theirs = settings(kind, tmp_path)
        handler = EchoHandler()
        async with serving(ours, handler) as (_, address):
            _, writer = await stranger(address, tls_of(theirs))
            writer.transport.pause_reading()
            ask = encode_frame(CATALOGUE.encode(Echo("x" * 90_000), 1), 0)
            while not handler.reasons:
                writer.write(ask)
                await asyncio.sleep(0)
            assert "does not read" in handler.reasons[0]
            assert await answers(address, theirs)
            writer.transport.abort()

    run_on(loop, main())


@loops
@kinds
def test_tcp_peer_that_ignores_the_end_is_cut_off(
    loop: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: a connection that was told to go has so long to go. Method: a peer that hears an error
    and neither closes nor reads; a short deadline."""
    monkeypatch.setattr(connection, "FLUSH_DEADLINE_S", 0.1)

    async def main() -> None:
        ours, theirs = settings(kind, tmp_path)
        handler = EchoHandler()
        async with serving(ours, handler) as (server, address):
            _, writer = await stranger(address, tls_of(theirs))
            writer.transport.pause_reading()
            writer.write(b"nonsense")
            await auntil(lambda: handler.reasons, "the end")
            assert "bad_magic" in handler.reasons[0]
            assert server.connections == set()
            writer.transport.abort()

    run_on(loop, main())


# ---------------------------------------------------------------------- hostile servers


@loops
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x15\x03\x01\x00\x02\x02\x28", "not a frame of this protocol"),
        (encode_frame(CATALOGUE.encode(Echo("hello yourself"), 1), 0), "echo came instead"),
        (b"", "did not answer within"),
        (None, "before it said welcome"),
    ],
    ids=["a TLS alert", "no welcome", "silence", "the end"],
)
def test_tcp_server_that_does_not_say_welcome(
    loop: str, data: bytes | None, words: str, monkeypatch: pytest.MonkeyPatch
):
    """Goal: whatever answers at the address, connecting ends in time with a reason, the handler
    hears of nothing, and nothing is left open. Method: a server of raw bytes, which does not end
    its side by itself."""
    monkeypatch.setattr(connection, "FLUSH_DEADLINE_S", 0.1)

    async def main() -> None:
        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peers.append((reader, writer))
            if data is None:
                writer.close()
            elif data:
                writer.write(data)

        client = Client()
        for _ in range(2):  # libuv opens one file of its own at the first connection
            peers: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
            before = len(open_fds())
            server = await asyncio.start_server(say, "127.0.0.1", 0)
            address = TcpAddress("127.0.0.1", server.sockets[0].getsockname()[1])
            with pytest.raises(UnreachableError, match=words) as caught:
                await connect_tcp(address, CATALOGUE, client, None, 0.3 if data == b"" else 30.0)
            assert caught.value.code == "wire.unreachable"
            for reader, writer in peers:
                said = [type(message) for message in await heard(reader)]  # until it closes
                assert data is None or said in ([Hello], [Hello, Fault])
                await gone(writer)
            server.close()
            await server.wait_closed()
        await auntil(lambda: len(open_fds()) <= before, "everything to be closed")
        assert (client.opened_count, client.reasons) == (0, [])

    run_on(loop, main())


@loops
@pytest.mark.parametrize("kind", ["psk", "tls"])
def test_tcp_security_on_one_side_only_is_said(loop: str, kind: str, tmp_path: Path):
    """Goal: TLS against plain, either way round, ends at once with what to compare."""

    async def main() -> None:
        ours, theirs = settings(kind, tmp_path)
        async with serving(ours) as (_, address):
            with pytest.raises(UnreachableError, match="the same kind of security"):
                await connect_tcp(address, CATALOGUE, Client(), None)
        async with serving(None) as (_, address):
            with pytest.raises(UnreachableError, match="TLS failed"):
                await connect_tcp(address, CATALOGUE, Client(), theirs)

    run_on(loop, main())


@loops
@kinds
def test_tcp_connecting_that_is_cancelled_leaves_nothing(loop: str, kind: str, tmp_path: Path):
    """Goal: cancelling at any moment of connecting closes the socket, and the handler has heard of
    as many ends as beginnings. Method: cancel after one, two, three turns of the loop and so on,
    until it connects before that."""

    async def main() -> None:
        ours, theirs = settings(kind, tmp_path)
        client = Client()
        async with serving(ours) as (server, address):
            assert await answers(address, theirs)
            await auntil(lambda: not server.connections, "the first to be gone")
            before = len(open_fds())
            for turns in range(2000):
                coroutine = connect_tcp(address, CATALOGUE, client, theirs)
                task = asyncio.ensure_future(coroutine)
                for _ in range(turns):
                    await asyncio.sleep(0)
                is_late = task.done()
                task.cancel()
                with suppress(asyncio.CancelledError):
                    (await task).close("enough")
                await auntil(lambda: len(client.reasons) == client.opened_count, "the ends")
                if is_late:
                    break
            assert is_late
            await auntil(lambda: not server.connections and not server._handshakes, "the ends")
            await auntil(lambda: len(open_fds()) == before, "everything to be closed")

    run_on(loop, main())
