"""The wire over TCP: the words of a Unix socket, for those who prove who they are; a stranger is
refused and the service never called, and whoever misbehaves loses its connection alone."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.service.hosts import bind
from plumbing.wire import connection, tcp
from plumbing.wire.frames import encode_frame
from plumbing.wire.messages import FaultMsg
from plumbing.wire.tcp import ACCEPTED, Security, TcpServer, connect_tcp
from plumbing.wire.tcp_address import TcpAddress
from tests.helpers import auntil, open_fds, room_for, run_command
from tests.plumbing.wire.certificates import Authority, shared, write_secret
from tests.plumbing.wire.echo import CATALOGUE, LOOPS, Echo, EchoHandler, Refuse, on_loops
from tests.plumbing.wire.tcp_rig import (
    Client,
    answers,
    anybody,
    gone,
    heard,
    serving,
    settings,
    stranger,
)

ROOT = str(Path(__file__).resolve().parents[3])

loops = pytest.mark.parametrize("loop", LOOPS)


# ---------------------------------------------------------------------- a connection


@on_loops
async def test_tcp_final_error_reaches_a_peer_that_is_still_sending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: everything that was sent before the end arrives, the error last: closing a socket with
    bytes unread resets it, which loses unsent data. Method: answers that do not fit the socket, an
    error, and a peer that reads late and keeps sending."""
    monkeypatch.setattr(connection, "FLUSH_DEADLINE_S", 30.0)
    ours, theirs = settings(tmp_path)
    handler = EchoHandler()
    async with serving(ours, handler) as (server, address):
        reader, writer = await stranger(address, theirs.client_context())
        assert await reader.readexactly(len(ACCEPTED)) == ACCEPTED
        await auntil(lambda: server.connections, "the connection")
        ended: Any = next(iter(server.connections))
        writer.transport.pause_reading()
        ended._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
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
    probe = run_command([*command, "true"])
    if probe.returncode:
        pytest.skip(f"no network namespace can be made here: {probe.stderr.strip()}")
    done = run_command([*command, sys.executable, "-c", _CABLE, ROOT, loop], timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the peer is gone") == 2


# ---------------------------------------------------------------------- the server


async def test_tcp_over_ipv6_and_ipv4_on_one_socket(tmp_path: Path):
    """Goal: a server on [::] serves both, and shows IPv4 peers as such. Method: one of each."""
    authority = Authority(tmp_path)
    theirs = authority.issue("engine-0")
    ours = authority.issue("lockserver", hosts=("::1", "127.0.0.1"))
    server = TcpServer(CATALOGUE, EchoHandler(), service="echo", security=ours)
    try:
        sock = bind("::", 0, "--listen", 10)
    except UnderstudyError as error:
        pytest.skip(f"no IPv6 here: {error}")
    server.listen(sock)
    for host in ("::1", "127.0.0.1"):
        address = TcpAddress(host, sock.getsockname()[1])
        conn = await connect_tcp(address, CATALOGUE, Client(), theirs)
        (peer,) = [other.peer for other in server.connections]
        assert peer.host == host
        conn.close("done")
        await auntil(lambda: not server.connections, "the end")
    await server.close()


@on_loops
async def test_tcp_server_close_ends_connections_and_handshakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: closing leaves nothing open, finished or not. Method: one connection, and one socket
    that never starts its handshake, which has a very long deadline."""
    monkeypatch.setattr(tcp, "HANDSHAKE_DEADLINE_S", 600.0)
    ours, theirs = settings(tmp_path)
    handler, client = EchoHandler(), Client()
    for _ in range(2):  # libuv opens one file of its own at the first connection
        before = len(open_fds())
        async with serving(ours, handler) as (server, address):
            await connect_tcp(address, CATALOGUE, client, theirs)
            mute = socket.create_connection((address.host, address.port))
            await auntil(lambda: server._handshakes, "its handshake to begin")
            await asyncio.wait_for(server.close(), 30)
        assert server.connections == set()
        await auntil(lambda: len(client.reasons) == len(handler.reasons), "the client to hear")
        mute.close()
        await server.close()
    assert handler.reasons == ["echo is stopping"] * 2
    await auntil(lambda: len(open_fds()) <= before, "everything to be closed")


@on_loops
async def test_tcp_renewed_certificates_are_used_by_new_connections(tmp_path: Path):
    """Goal: a new CA applies to the next connection without a restart, open ones stay open, and a
    broken file is a visible problem that keeps the old ones in use. Method: renew while serving."""
    (tmp_path / "new").mkdir()
    old, new = Authority(tmp_path), Authority(tmp_path / "new")
    ours, theirs = old.issue("lockserver"), old.issue("engine-0")
    assert ours.cert
    assert ours.key
    assert ours.ca
    client = Client()
    async with serving(ours) as (server, address):
        conn = await connect_tcp(address, CATALOGUE, client, theirs)
        write_secret(ours.cert, b"nonsense")
        assert "stay in use" in str(server.security.problem)
        assert await answers(address, theirs)
        renewed = new.issue("lockserver")
        for path, source in (
            (ours.cert, renewed.cert),
            (ours.key, renewed.key),
            (ours.ca, renewed.ca),
        ):
            write_secret(path, Path(source).read_bytes())
        assert server.security.problem is None
        assert await answers(address, new.issue("engine-1"))
        stale = Security(theirs.cert, theirs.key, renewed.ca)
        with pytest.raises(UnreachableError):
            await connect_tcp(address, CATALOGUE, Client(), stale)
        conn.send(Echo("as before"))
        await auntil(lambda: client.received_messages, "the old connection's echo")
        conn.close("done")


@on_loops
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"HTTP/1.1 400 Bad Request", "does not say that it accepts us"),
        (b"", "did not answer within"),
        (None, "does not say that it accepts us"),
    ],
    ids=["another protocol", "silence", "the end"],
)
async def test_tcp_server_that_does_not_say_that_it_accepts(
    data: bytes | None, words: str, monkeypatch: pytest.MonkeyPatch
):
    """Goal: whatever answers at the address, connecting fails in time with a reason, the handler is
    not called, and nothing is left open. Method: a server of raw bytes, which does not close by
    itself."""
    monkeypatch.setattr(connection, "FLUSH_DEADLINE_S", 0.1)

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append((reader, writer))
        if data is None:
            writer.close()
        elif data:
            writer.write(data)

    client, tls = Client(), shared().server_context()
    for _ in range(2):  # libuv opens one file of its own at the first connection
        peers: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        before = len(open_fds())
        server = await asyncio.start_server(say, "127.0.0.1", 0, ssl=tls)
        address = TcpAddress("127.0.0.1", server.sockets[0].getsockname()[1])
        with pytest.raises(UnreachableError, match=words) as caught:
            await connect_tcp(address, CATALOGUE, client, shared(), 0.3 if data == b"" else 30.0)
        assert caught.value.code == "wire.unreachable"
        for reader, writer in peers:
            assert await heard(reader) == []  # until it closes
            await gone(writer)
        server.close()
        await server.wait_closed()
    await auntil(lambda: len(open_fds()) <= before, "everything to be closed")
    assert (client.opened_count, client.reasons) == (0, [])


@on_loops
async def test_tcp_server_certificate_must_have_the_expected_name(tmp_path: Path):
    """Goal: an engine's certificate is not accepted as the lock server's: the name is checked.
    Method: a server whose certificate, of the right CA, names another host."""
    ca = Authority(tmp_path)
    async with serving(ca.issue("lockserver", hosts=("10.0.0.1",))) as (_, address):
        with pytest.raises(UnreachableError, match="mismatch"):
            await connect_tcp(address, CATALOGUE, Client(), ca.issue("engine-0"))


async def test_connect_over_tcp_without_descriptors_says_so():
    pair = shared()
    pair.client_context()  # reads its files, which is another error
    with room_for(0), pytest.raises(UnreachableError, match="limit of") as caught:
        await connect_tcp(TcpAddress("127.0.0.1", 9), CATALOGUE, EchoHandler(), pair)
    assert caught.value.code == "wire.no_descriptors"


@on_loops
async def test_tcp_cancelled_connect_leaves_nothing_open(tmp_path: Path):
    """Goal: cancelling at any moment of connecting closes the socket, and the handler's `opened`
    and `closed` are called equally often. Method: cancel after one, two, three turns of the loop
    and so on, until it connects first."""
    ours, theirs = settings(tmp_path)
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


# ---------------------------------------------------------------------- strangers


BOTH = "both sides need"


@on_loops
@pytest.mark.parametrize(
    ("issuer", "trusted", "how", "server_says", "client_says"),
    [
        ("other", "ours", {}, "unable to get local issuer", BOTH),
        ("ours", "other", {}, "each must trust", "certificate is not trusted"),
        ("ours", "ours", {"age_days": 5}, "certificate has expired", BOTH),
        ("ours", "ours", {"age_days": -5}, "not yet valid", BOTH),
        ("ours", "ours", {"uses": ("server",)}, "certificate purpose", BOTH),
        ("ours", "ours", {"issuer": "engine-0"}, "not trusted", BOTH),
    ],
)
async def test_tcp_stranger_is_refused_and_both_sides_know_the_reason(
    issuer, trusted, how, server_says, client_says, tmp_path: Path
):
    """Goal: each wrong certificate is refused before the service is called, and the
    client's own handler is not called either. Method: a table, with the errors of both sides."""
    (tmp_path / "other").mkdir()
    by_name = {"ours": Authority(tmp_path), "other": Authority(tmp_path / "other", "other")}
    ours, friend = (by_name["ours"].issue(name) for name in ("lockserver", "engine-0"))
    issued = by_name[issuer].issue("engine-1", **how)
    theirs = Security(issued.cert, issued.key, by_name[trusted].path)
    handler, client = EchoHandler(), Client()
    async with serving(ours, handler) as (server, address):
        with pytest.raises(UnreachableError) as caught:
            await connect_tcp(address, CATALOGUE, client, theirs)
        assert client_says in caught.value.message
        await auntil(lambda: server.refused_count == 1, "the server to refuse it")
        assert server_says in str(server.last_refusal)
        assert (handler.opened_count, client.opened_count, client.reasons) == (0, 0, [])
        assert await answers(address, friend)


@on_loops
async def test_tcp_client_without_a_certificate_or_with_old_tls_is_refused(tmp_path: Path):
    """Goal: TLS alone is not enough: without a certificate, or below TLS 1.3, a client is refused.
    Method: a client that trusts any server and has no certificate."""
    ours, theirs = settings(tmp_path)
    old = theirs._make(ssl.PROTOCOL_TLS_CLIENT)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    handler = EchoHandler()
    async with serving(ours, handler) as (server, address):
        reader, writer = await stranger(address, anybody())
        writer.write(encode_frame(CATALOGUE.encode(Echo("x"), 1), 0))
        assert await heard(reader) == []
        await auntil(lambda: server.refused_count == 1, "the refusal")
        assert "did not return a certificate" in str(server.last_refusal)
        await gone(writer)
        with pytest.raises((OSError, ssl.SSLError)):
            await stranger(address, old)
        await auntil(lambda: server.refused_count == 2, "the refusal")
        assert "unsupported protocol" in str(server.last_refusal)
        assert handler.opened_count == 0


@on_loops
@pytest.mark.parametrize("limit", ["all", "address"])
async def test_tcp_unfinished_handshakes_are_limited(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: unfinished handshakes are limited: sockets beyond the limit are closed at once, and
    later ones are accepted when there is room. Method: a limit of three, and silent peers."""
    monkeypatch.setattr(tcp, "HANDSHAKES_PER_ADDRESS_MAX", 3 if limit == "address" else 30)
    ours, theirs = settings(tmp_path)
    async with serving(ours, handshakes_max=30 if limit == "address" else 3) as (server, address):
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
