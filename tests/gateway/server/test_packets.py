"""Goal: what belongs together reaches a client in one packet: a write is one, and costs more than
all that the gateway does with an event. Method: real doors that keep count of their writes."""

import pytest

from gateway.server.client import ClientConnection
from plumbing import gateway_protocol as hop
from tests.gateway.server.harness import CHAT, with_bench
from tests.gateway.server.test_streams import ASKED, assert_whole
from tests.gateway.stub_engine import group_of, last_events


class Counted:
    """A transport that keeps what is written to it."""

    def __init__(self, transport, writes):
        self._transport, self._writes = transport, writes

    def write(self, data):
        self._writes.append(bytes(data))
        self._transport.write(data)

    def __getattr__(self, name):
        return getattr(self._transport, name)


@pytest.fixture
def writes(monkeypatch):
    found: list[bytes] = []
    made = ClientConnection.connection_made
    monkeypatch.setattr(
        ClientConnection, "connection_made", lambda self, to: made(self, Counted(to, found))
    )
    return found


def in_one_read(*parts):
    """A route: the head of a marked stream and these parts of it, in one write."""

    async def route(request, reply):
        kept = []
        reply.writer.write = kept.append
        reply.head(content_type="text/event-stream", continuation=reply.engine.continuation)
        for part in parts:
            reply.write(part(request))
        reply.end()
        reply.writer.transport.write(b"".join(kept))

    return route


def test_what_an_engine_sends_at_once_is_one_packet(tmp_path, writes):
    """Method: an answer that comes whole, and the next one on the same connection."""

    async def scenario(bench):
        engine = await bench.active()
        groups = [lambda request, at=at: group_of(request, at, 1) for at in range(5)]
        engine.routes[CHAT] = in_one_read(*groups, lambda r: last_events(r) + hop.END)
        client = await bench.client()
        for count in (1, 2):
            client.ask(CHAT, ASKED)
            assert_whole(await client.answer())
            assert len(writes) == count
        assert all(each.startswith(b"HTTP/1.1 200") for each in writes)
        assert all(each.endswith(b"\r\n0\r\n\r\n") for each in writes)

    with_bench(tmp_path, scenario)


def test_an_error_that_an_engine_causes_is_sent_before_the_connection_closes(tmp_path):
    """Method: the next engine plays another answer, and each part of it comes in one read."""

    async def scenario(bench):
        dying = await bench.active(cut_after_groups=2)
        client = await bench.client()
        client.ask(CHAT, ASKED)
        await dying.died.wait()
        another = await bench.engine("engine-1", 2)
        another.routes[CHAT] = in_one_read(lambda request: group_of(request, 3, 1))
        await bench.grant(another)
        answer = await client.answer()
        assert not answer.is_whole
        assert answer.events()[-1]["error"]["code"] == "gateway.replay_mismatch"

    with_bench(tmp_path, scenario)
