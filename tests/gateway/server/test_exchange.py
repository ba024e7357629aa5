"""Goal: effects are performed in the order of their events, never one inside another.

Method: a core that refuses every request, and that looks whether it is asked while the effects of
an earlier event are still performed: an answer that is out brings the client's next request.
"""

import socket

import pytest

from gateway.core.events import AnswerError, Ending, RequestCame, RequestEnded
from gateway.core.machine import Gateway
from gateway.server.responses import HEAD_BYTES_MAX, ResponseReader
from gateway.server.upstream import Upstream
from tests.gateway.server.harness import with_bench


class Refusing(Gateway):
    is_performing = False

    def handle(self, event, now_ms):
        assert not self.is_performing
        if isinstance(event, RequestCame):
            return self.refuse(event.request)
        return super().handle(event, now_ms)

    def refuse(self, request):
        self.is_performing = True
        yield AnswerError(request, 503, b"{}", 1)
        yield RequestEnded(request, Ending.REFUSED, "no", 0, 0, 0.0)
        self.is_performing = False


def test_the_next_request_waits_until_all_effects_are_performed(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.server.client_listener.Gateway", Refusing)

    async def scenario(bench):
        client = await bench.client()
        client.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 5)
        for _ in range(5):
            assert (await client.answer()).status == 503
        assert bench.endings() == {"refused": 5}

    with_bench(tmp_path, scenario)


def test_a_connection_that_breaks_before_the_request_is_sent_is_closed_once(tmp_path, monkeypatch):
    """Goal: a descriptor's number is not closed again once another connection may have it, which
    would mix up the streams of clients. Method: the engine dies between `connect` and the sending
    of the request, which the loop then writes first of all."""
    opened: list[socket.socket] = []

    def connect(upstream, path):
        ours, theirs = socket.socketpair()
        theirs.close()
        opened.append(ours)
        return ours

    async def scenario(bench):
        await bench.active()
        monkeypatch.setattr(Upstream, "connect", connect)
        answer = await bench.once("/v1/other", {"x": 1})
        assert answer.status == 502
        [connection] = opened
        assert connection.fileno() == -1

    with_bench(tmp_path, scenario)


def test_a_response_whose_head_never_ends_is_none():
    reader = ResponseReader(is_to_head=False)
    reader.feed(b"HTTP/1.1 200 OK\r\n")
    for _ in range(HEAD_BYTES_MAX // 1010):
        reader.feed(b"X: " + b"x" * 1000 + b"\r\n")
    with pytest.raises(ValueError, match="exceeds"):
        reader.feed(b"X: " + b"x" * 10_000 + b"\r\n")


@pytest.mark.parametrize("begun", [b"0\r\nX: ", b"1;x="], ids=["trailer", "extension"])
def test_a_response_whose_frame_never_ends_is_none(begun):
    """Goal: no engine fills this process, which has everybody's streams. Method: each piece of the
    body before is taken, as connections do."""
    reader = ResponseReader(is_to_head=False)
    reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(100):
        reader.feed(b"1\r\nx\r\n")
        assert len(reader.pieces) == 1
        reader.pieces.clear()
    reader.feed(begun)
    for _ in range(HEAD_BYTES_MAX // 10_000):
        reader.feed(b"x" * 10_000)
    with pytest.raises(ValueError, match="exceed"):
        reader.feed(b"x" * 10_000)
