"""Goal: the event stream: a snapshot first, resumption by id, and slow readers that lose only
their own events."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from plumbing.errors import UsageError
from plumbing.service import sse
from plumbing.service.events import EventLog
from tests.fake_clock import FakeClock
from tests.helpers import auntil, open_fds
from tests.plumbing.service.test_http import fetch, serving


def make_log(count=0, ring_max=8):
    log = EventLog("engine-1", FakeClock(), ring_max=ring_max)
    for number in range(1, count + 1):
        log.record("engine.state", f"event {number}")
    return log


class Stream:
    """One reader of /events: `next()` is the next message as (kind, id, document)."""

    def __init__(self, reader, writer):
        self._reader = reader
        self._writer = writer
        self._messages = []

    async def chunk(self):
        size = int(await self._reader.readline(), 16)
        chunk = await self._reader.readexactly(size)
        await self._reader.readline()
        return chunk.decode()

    async def next(self):
        while not self._messages:
            self._messages = [each for each in (await self.chunk()).split("\n\n") if each]
        message = self._messages.pop(0)
        if message.startswith(":"):
            return "comment", None, message
        fields = dict(line.split(": ", 1) for line in message.split("\n"))
        event_id = int(fields["id"]) if "id" in fields else None
        return fields["event"], event_id, json.loads(fields["data"])

    async def close(self):
        self._writer.close()
        await self._writer.wait_closed()


@asynccontextmanager
async def follow(port, query="", headers=""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /events{query} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"text/event-stream" in head
    assert b"X-Accel-Buffering: no" in head
    stream = Stream(reader, writer)
    try:
        yield stream
    finally:
        await stream.close()


def test_snapshot_comes_first_and_then_every_later_event():
    """Goal: the plain reader; method: two events before the connection, two after."""

    async def main():
        log = make_log(2)
        async with (
            serving(events=log, status=lambda: {"schema": 1}) as http,
            follow(http.port) as stream,
        ):
            snapshot = {"schema": 1, "as_of_event_id": 2}
            assert await stream.next() == ("snapshot", 2, snapshot)
            event = log.record("lock.granted", "granted", data={"token": 3})
            assert await stream.next() == ("lock.granted", 3, event.to_dict())

    asyncio.run(main())


@pytest.mark.parametrize(
    ("query", "headers"), [("?since=3", ""), ("", "Last-Event-ID: 3\r\n")], ids=["since", "header"]
)
def test_resuming_replays_what_was_missed_without_gap_or_repeat(query, headers):
    """Goal: both ways to resume; method: five events, the reader has seen three."""

    async def main():
        log = make_log(5)
        async with serving(events=log) as http, follow(http.port, query, headers) as stream:
            kind, event_id, document = await stream.next()
            assert (kind, event_id) == ("snapshot", 3)
            assert document["as_of_event_id"] == 5
            log.record("engine.state", "event 6")
            assert [(await stream.next())[1] for _ in range(3)] == [4, 5, 6]

    asyncio.run(main())


@pytest.mark.parametrize("since", [1, 99], ids=["too-old", "of-an-earlier-process"])
def test_resuming_from_an_unknown_id_gives_a_snapshot_of_now(since):
    """Goal: no silent gap; method: an id that left the ring, and one never given out."""

    async def main():
        log = make_log(20, ring_max=8)
        async with serving(events=log) as http, follow(http.port, f"?since={since}") as stream:
            assert (await stream.next())[:2] == ("snapshot", 20)
            log.record("engine.state", "next")
            assert (await stream.next())[1] == 21

    asyncio.run(main())


def test_filters_by_type_glob_and_severity():
    """Goal: ?types= and ?min_severity=; method: events on both sides, also in the replay."""

    async def main():
        log = make_log()
        log.record("engine.state", "no: severity")
        log.record("lock.granted", "no: type", severity="error")
        log.record("engine.canary", "yes", severity="warning")
        query = "?since=0&types=engine.*,doctor.finding&min_severity=warn"
        async with serving(events=log) as http, follow(http.port, query) as stream:
            await stream.next()
            log.record("engine.state", "no: severity")
            log.record("doctor.finding", "yes", severity="error")
            assert [(await stream.next())[1] for _ in range(2)] == [3, 5]

    asyncio.run(main())


@pytest.mark.parametrize(
    "query",
    ["since=x", "since=-1", "min_severity=loud", "since=%C2%B2", "since=" + "9" * 5000],
    ids=["word", "negative", "severity", "superscript", "long"],
)
def test_query_that_is_not_understood_is_400_with_a_sentence(query):
    """Goal: bad input is answered; method: one wrong value each."""

    async def main():
        async with serving() as http:
            status, _, body = await fetch(http.port, f"/events?{query}")
            assert status == 400
            assert json.loads(body)["error"]["code"].startswith("service.bad_")

    asyncio.run(main())


def test_silent_stream_sends_comments(monkeypatch):
    """Goal: proxies keep it open; method: a heartbeat of 1 ms, two of them, then an event."""

    monkeypatch.setattr(sse, "HEARTBEAT_S", 0.001)

    async def main():
        log = make_log()
        async with serving(events=log) as http, follow(http.port) as stream:
            await stream.next()
            for _ in range(2):
                assert await stream.next() == ("comment", None, ": heartbeat")
            log.record("engine.state", "x")
            kind = "comment"
            while kind == "comment":
                kind, _, _ = await stream.next()
            assert kind == "engine.state"

    asyncio.run(main())


def test_slow_consumer_loses_its_oldest_and_is_told_how_many():
    """Goal: bounded memory, counted loss; method: more events than its queue at one go."""

    async def main():
        log = make_log()
        async with (
            serving(events=log) as http,
            follow(http.port) as slow,
            follow(http.port, "?types=lock.*") as other,
        ):
            await slow.next()
            await other.next()
            for number in range(sse.QUEUE_MAX + 44):
                log.record("engine.state", str(number))
            log.record("lock.granted", "x")
            assert await slow.next() == ("dropped", None, {"dropped": 45})
            got = [(await slow.next())[1] for _ in range(sse.QUEUE_MAX)]
            assert got == list(range(46, sse.QUEUE_MAX + 46))
            assert (await other.next())[0] == "lock.granted"

    asyncio.run(main())


def test_reader_that_never_reads_delays_nobody():
    """Goal: one stuck connection is its own affair; method: fill it far beyond its buffers."""

    async def main():
        log = make_log()
        async with (
            serving(events=log) as http,
            follow(http.port) as stuck,
            follow(http.port, "?types=lock.*") as other,
        ):
            await stuck.next()
            await other.next()
            for number in range(200):
                log.record("engine.state", "x" * 65536)
                if number % 20 == 0:
                    assert (await fetch(http.port, "/live"))[0] == 200
            log.record("lock.granted", "x")
            assert (await other.next())[0] == "lock.granted"

    asyncio.run(main())


def test_reader_that_leaves_is_forgotten_at_once_and_leaks_nothing():
    """Goal: no wait for a heartbeat; method: leave, and see the subscription and fds go."""

    async def main():
        log = make_log()
        async with serving(events=log) as http:
            await fetch(http.port, "/live")
            before = open_fds()
            async with follow(http.port) as stream:
                await stream.next()
                assert len(log._subscribers) == 1
            await auntil(lambda: not log._subscribers, "the end of the subscription", 10)
            await auntil(lambda: open_fds().keys() == before.keys(), "the descriptor's end", 10)

    asyncio.run(main())


def test_one_reader_too_many_is_503_and_counted(monkeypatch):
    """Goal: a limit on readers; method: a limit of one."""
    monkeypatch.setattr(sse, "READERS_MAX", 1)

    async def main():
        async with serving(events=make_log()) as http, follow(http.port) as stream:
            await stream.next()
            status, _, body = await fetch(http.port, "/events")
            assert status == 503
            assert json.loads(body)["error"]["code"] == "service.too_many_readers"
            _, _, page = await fetch(http.port, "/metrics")
            assert 'understudy_limit_hits_total{limit="event_readers"} 1.0' in page

    asyncio.run(main())


def test_stop_ends_open_streams():
    """Goal: a server stops although somebody follows it; method: stop, then read to EOF."""

    async def main():
        async with serving(events=make_log()) as http, follow(http.port) as stream:
            await stream.next()
            await http.stop()
            assert await stream._reader.read() in (b"", b"0\r\n\r\n")

    asyncio.run(main())


def test_filter_refuses_an_unknown_severity():
    """Goal: a typo is not "everything"; method: parse one."""
    with pytest.raises(UsageError, match="min_severity is 'loud'"):
        sse.Filter.parse("", "loud")
