"""Asking over real sockets: answers, errors, silence, and a watch that outlives its peer."""

from __future__ import annotations

import asyncio

import pytest

from lockserver.client import messages as wire
from plumbing.errors import RemoteError, UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.pod.observers import PeerWatch, ask
from plumbing.wire.server import Server
from tests.helpers import auntil, free_port, open_fds
from understudy.http_get import BODY_MAX_BYTES, get


class Answering:
    """A server's handler that answers `status`, refuses `beat`, and is silent to the rest."""

    def __init__(self) -> None:
        self.connections: list = []

    def opened(self, conn):
        self.connections.append(conn)

    def received(self, conn, message, request_id, fds):
        if isinstance(message, wire.StatusMsg | wire.WatchMsg):
            conn.send(wire.StatusReplyMsg({"token": 5}), request_id)
        elif isinstance(message, wire.BeatMsg):
            raise UnderstudyError("test.refused", "no beats here")

    def closed(self, conn, reason):
        self.connections.remove(conn)


@pytest.fixture
def path(tmp_path):
    directory = tmp_path / "pod"
    directory.mkdir(mode=0o700)
    return str(directory / "lockserver.sock")


def test_ask_gets_an_answer_an_error_or_a_reason(path):
    """Goal: every way a question can end. Method: one server, one question each."""

    async def main():
        before = len(open_fds())
        with pytest.raises(UnreachableError):
            await ask(path, wire.CATALOGUE, wire.StatusMsg())
        server = Server(path, wire.CATALOGUE, Answering(), service="test")
        await server.start()
        answered = await ask(path, wire.CATALOGUE, wire.StatusMsg())
        assert answered.message == wire.StatusReplyMsg({"token": 5})
        assert answered.pid > 0
        with pytest.raises(RemoteError, match="no beats here"):
            await ask(path, wire.CATALOGUE, wire.BeatMsg(1))
        silent = wire.GrantedMsg("active", "engine-0", "engine-0-0123456789abcdef", 1)
        with pytest.raises(WaitTimeoutError, match="did not answer"):
            await ask(path, wire.CATALOGUE, silent, timeout_s=0.1)
        await server.close()
        await auntil(lambda: len(open_fds()) <= before, "descriptors to be closed")

    asyncio.run(main())


def test_watch_comes_back_after_its_peer_restarted(path):
    """Goal: a drill sees across deaths. Method: close the server, start another, send again."""

    async def main():
        heard: list = []
        watch = PeerWatch(path, wire.CATALOGUE, wire.WatchMsg(), heard.append)
        for round_number in (1, 2):
            handler = Answering()
            server = Server(path, wire.CATALOGUE, handler, service="test")
            await server.start()
            await auntil(lambda n=round_number: len(heard) == n, "the first answer")
            await server.close()
        await watch.close()

    asyncio.run(main())


def test_get_never_raises_and_says_why():
    """Goal: probes of servers in any state. Method: nobody, garbage, an endless body, silence."""

    async def main():
        before = len(open_fds())
        nobody = await get(f"http://127.0.0.1:{free_port()}/live")
        assert nobody.status == 0
        assert "cannot reach" in nobody.summary()
        for url in ("http://[::/live", "http://127.0.0.1:70000/", "http://a b:1/"):
            assert (await get(url)).status == 0
        answers = [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (BODY_MAX_BYTES + 1)]
        answers.append(b'HTTP/1.1 503 No\r\n\r\n{"reason": "loading"}')

        async def reply(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers.pop(0))
            writer.close()

        async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/ready"
            assert (await get(url)).status == 0
            assert "exceeds" in (await get(url)).summary()
            assert (await get(url)).summary() == "503: loading"

        async def stay(reader, writer):
            await reader.read()
            writer.close()

        async with await asyncio.start_server(stay, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/ready"
            assert "did not reply" in (await get(url, timeout_s=0.1)).summary()
        await auntil(lambda: len(open_fds()) <= before, "descriptors to be closed")

    asyncio.run(main())
