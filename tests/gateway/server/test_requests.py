"""Goal: a request is read whole, once, within limits, however its bytes arrive."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.server.requests import (
    HEAD_BYTES_MAX,
    HttpRequest,
    Intake,
    RequestReader,
    is_hop_path,
)
from tests.gateway.server.harness import CHAT, scene
from tests.gateway.server.test_streams import ASKED, BODY
from tests.helpers import auntil


def reader(body_bytes_max=1000, refused=None, memory=None):
    intake = memory or Intake(
        1 << 20, lambda: body_bytes_max, (lambda headers: refused) if refused else None
    )
    return RequestReader(intake)


def read(*parts: bytes, **options) -> RequestReader:
    found = reader(**options)
    for part in parts:
        found.feed(part)
    return found


POST = b"POST /v1/completions?a=b HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2;x=y\r\nab\r\n1\r\nc\r\n0\r\nX-Trailer: 1\r\n\r\n"
)
H2C = (
    b"POST /v1/h2c HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: x\r\nContent-Length: 3\r\n\r\nabc"
)
GET = b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n"


def test_what_an_engine_gets_of_a_head():
    """Goal: what is the client's passes, what is the connection's or the hop's does not."""
    found = read(
        b"POST /v1/x?q=1 HTTP/1.1\r\nHost: me\r\nAuthorization: Bearer k\r\nTraceparent: 00-1\r\n"
        b"X-Understudy-Journal: 1,1,1\r\nx-understudy-gateway: 1\r\nTE: trailers\r\n"
        b"Connection: keep-alive, X-Mine\r\nX-Mine: 1\r\nAccept-Encoding: gzip\r\n"
        b"X-Request-Id: abc-1\r\nContent-Length: 0\r\n\r\n"
    )
    request = found.ready
    assert request.head == (
        b"POST /v1/x?q=1 HTTP/1.1\r\nhost: me\r\nauthorization: Bearer k\r\ntraceparent: 00-1\r\n"
        b"x-request-id: abc-1\r\n"
    )
    assert (request.path, request.request_id) == ("/v1/x", b"abc-1")


@pytest.mark.parametrize("sent", [b"", b"a b", b"x" * 129, b"\xff"])
def test_a_request_id_that_is_not_sane_is_replaced(sent):
    request = read(GET[:-2] + b"X-Request-Id: " + sent + b"\r\n\r\n").ready
    assert len(request.request_id) == 32
    assert b"x-request-id: " + request.request_id in request.head


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (CHUNKED.replace(b"chunked\r\n", b"chunked\r\nContent-Length: 3\r\n"), 400),
        (POST.replace(b"Length: 3", b"Length: 3\r\nContent-Length: 4"), 400),
        (CHUNKED.replace(b"chunked", b"gzip, chunked"), 501),
        (GET.replace(b"\r\n", b"\n"), 400),
        (GET[:-2] + b"X: a\r\n b\r\n\r\n", 400),  # folded
        (GET[:-2] + b"X-Understudy-Journal : 1\r\n\r\n", 400),
        (GET[:-2] + b"Host: other\r\n\r\n", 400),
        (POST.replace(b"Length: 3", b"Length: %d" % (2**64 + 3)), 400),
        (CHUNKED.replace(b"1.1", b"1.0"), 400),
        (CHUNKED.replace(b": chunked", b": identity\r\nTransfer-Encoding: chunked"), 501),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 501),  # TLS to a port without it
        (b"FETCH / HTTP/1.1\r\n\r\n", 501),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 405),
        (GET.replace(b"1.1", b"2.0"), 505),
        (POST.replace(b"Length: 3", b"Length: 1001"), 413),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * HEAD_BYTES_MAX + b" HTTP/1.1\r\n\r\n", 431),
    ],
)
def test_what_is_refused(sent, status):
    """Method: whole in one piece, and byte by byte for a start; a refused reader stays so."""
    for parts in ([sent], [sent[at : at + 1] for at in range(200)] + [sent[200:]]):
        found = read(*parts)
        assert found.refused is not None
        assert found.refused.status == status
        found.feed(GET)
        assert found.ready is None


def test_a_head_that_never_ends_is_refused():
    found = reader()
    for _ in range(HEAD_BYTES_MAX // 1000 + 2):
        found.feed(b"GET / HTTP/1.1\r\n" if found.is_idle else b"X: " + b"x" * 1000 + b"\r\n")
    assert found.refused is not None
    assert found.refused.status == 431


def test_a_request_behind_another_one_is_not_read():
    found = read(POST + GET)
    assert (found.ready.method, found.ready.keeps_alive, found.count) == (b"POST", False, 1)


def test_a_request_for_a_websocket_is_a_plain_one_with_its_body():
    """Goal: no bytes pass to an engine unread."""
    wants = b"Host: h\r\nConnection: Upgrade\r\nUpgrade: websocket"
    for sent, body in ((POST, b"abc"), (CHUNKED, b"abc"), (GET, b"")):
        request = read(sent.replace(b"Host: h", wants)).ready
        assert b"pgrade" not in request.head
        assert request.body == body


@pytest.mark.parametrize(
    ("path", "is_hop"),
    [
        ("/understudy/hello", True),
        ("/understudy", True),
        ("//understudy//hello", True),
        ("/./understudy/x", True),
        ("/v1/../understudy/x", True),
        ("/Understudy/x", True),
        ("/v1/understudy/x", False),
        ("/understudying", False),
    ],
)
def test_paths_of_the_hop_in_every_spelling(path, is_hop):
    assert is_hop_path(path) is is_hop


WEBSOCKET = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
)
# What turns one reading of a request into another one, where a parser is lax.
POISON = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"\x0b", b"\xff", b"0\r\n\r\n", b";a=b"),
    *(b"\r\n\r\n", b"\r\n folded", b"ffffffffffffffff", b"-1", b"%00", b"/../understudy/hello"),
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n"),
    *(b"X-Understudy-Journal: 1,1,1\r\n", b"Host: other\r\n", b"Expect: 100-continue\r\n"),
)
PLACES = st.integers(0, 10_000)
MISTAKES = st.lists(
    st.tuples(PLACES, st.integers(0, 3), st.sampled_from(POISON) | st.binary(max_size=4)),
    max_size=4,
)


def spoilt(data: bytes, mistakes) -> bytes:
    """`data` with bytes inserted, and as many as `length` removed, at each place: half of them are
    beginnings of lines."""
    for place, length, inserted in mistakes:
        at = place % (len(data) + 1)
        if place % 2:
            at = data.find(b"\r\n", at) + 2
        data = data[:at] + inserted + data[at + length :]
    return data


def outcome(found: RequestReader):
    fresh = re.compile(rb"x-request-id: [0-9a-f]{32}\r\n")
    request = found.ready
    asked = request and (request.path, request.body, fresh.sub(b"", request.head))
    return asked, found.refused and found.refused.status


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([POST, CHUNKED, GET, H2C, WEBSOCKET]), min_size=1, max_size=3),
    MISTAKES,
    st.lists(PLACES, max_size=4),
)
def test_no_bytes_are_read_in_two_ways_and_no_engine_gets_more_than_one_head(sent, mistakes, at):
    """Method: requests with mistakes in one piece, split at some places, and byte by byte. Of what
    is accepted, the head that an engine gets is one head, without framing and private headers."""
    data = spoilt(b"".join(sent), mistakes)
    whole = read(data)
    bounds = [0, *sorted(each % (len(data) + 1) for each in at), len(data)]
    assert outcome(read(*(data[a:b] for a, b in pairwise(bounds) if b > a))) == outcome(whole)
    assert outcome(read(*(data[i : i + 1] for i in range(len(data))))) == outcome(whole)
    if whole.ready is not None:
        first, *lines = whole.ready.head.removesuffix(b"\r\n").split(b"\r\n")
        assert re.fullmatch(rb"[A-Z-]+ [^ \r\n]+ HTTP/1\.1", first)
        for line in lines:
            name, colon, value = line.partition(b": ")
            assert re.fullmatch(rb"[!-9;-~]+", name)
            assert colon
            assert not {b"\r", b"\n", b"\0"} & {value[i : i + 1] for i in range(len(value))}
            assert name not in (b"content-length", b"transfer-encoding")
            assert not name.startswith(b"x-understudy-")


@pytest.mark.parametrize(
    "endless",
    [b"0\r\nX: %b", b"0\r\n%b: 1\r\n", b"1;x=%b", b"1\r\nx\r\n0\r\n" + b"X: %b\r\n" * 2],
    ids=["trailer", "name-of-a-trailer", "extension", "trailers"],
)
def test_what_surrounds_a_body_is_limited(endless):
    """Goal: no request takes memory that nobody counts. Method: a body that is small, in a frame
    that never ends."""
    memory = Intake(1 << 20, lambda: 1000, lambda headers: None)
    found = read(CHUNKED.split(b"\r\n\r\n")[0] + b"\r\n\r\n", memory=memory)
    before, _, after = endless.partition(b"%b")
    found.feed(before)
    for _ in range(HEAD_BYTES_MAX // 1000 + 10):
        found.feed(b"x" * 1000)
        if after.endswith(b"\r\n"):
            found.feed(after.replace(b"%b", b"y"))
            found.feed(before.rpartition(b"\r\n")[2])
    assert found.refused is not None
    assert found.refused.status in (400, 431)
    assert memory.bytes == 0


NOT_UTF8 = b'"\xff"'


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[1]", b"null", b"[" * 100_000, b'{"messages": {"a": 1}, "input": [1]}'),
        *(b'{"%b": %b}' % (name, NOT_UTF8) for name in (b"model", b"prompt_cache_key", b"input")),
        b'{"messages": [{"role": %b}]}' % NOT_UTF8,
        *(b'{"model": "\\ud800"}', b'{"prompt_cache_key": "\xed\xa0\x80"}'),
    ],
)
def test_a_front_takes_no_body_for_a_fault_of_its_own(body: bytes):
    """Goal: a client's bytes never end a front, which would lose the streams of all others. Method:
    what is no JSON, of other types, or not UTF-8 where a front reads text."""
    assert HttpRequest(body=body).key == b""


@pytest.mark.parametrize("count", [b"9" * 5000, b"-1", b"x", b""])
def test_a_journal_whose_counts_are_no_numbers_has_none(count: bytes):
    request = HttpRequest(b"POST", b"/", body=b"{}", journal=b"%b,%b,1" % (count, count))
    request.finish(frozenset())
    assert (request.body_bytes, request.journal_tokens) == (2, 0)


def test_a_body_in_chunks_of_one_byte_is_read():
    """Goal: the limit of what surrounds a body hits no body that is whole. Method: the smallest
    chunks, one for each read."""
    found = read(CHUNKED.split(b"\r\n\r\n")[0] + b"\r\n\r\n", body_bytes_max=HEAD_BYTES_MAX)
    for _ in range(HEAD_BYTES_MAX // 2):
        found.feed(b"1\r\nx\r\n")
    found.feed(b"0\r\n\r\n")
    request = found.ready
    assert request.body == b"x" * (HEAD_BYTES_MAX // 2)


STATUSES = {b"100", b"200", b"400", b"404", b"405", b"413", b"431", b"501", b"503", b"505"}


@scene()
async def test_hostile_clients_disturb_nobody(bench):
    """Goal: each gets answers that are HTTP, or none, and takes nothing with it. Method: many at
    once send requests with mistakes, in pieces, and leave: at once, in the middle of an answer, or
    at its end. Beside them one client reads a stream, and another asks again and again."""
    dice, seen = random.Random(1), set[bytes]()
    stream = b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b"
    nested = stream % (CHAT.encode(), 10_000, b'{"stream":true,"a":'.ljust(10_000, b"["))
    stream %= CHAT.encode(), len(BODY), BODY

    async def hostile() -> None:
        kinds = [POST, CHUNKED, GET, H2C, stream, stream, nested]
        mistakes = [
            (dice.randrange(10_000), dice.randrange(4), dice.choice(POISON))
            for _ in range(dice.choice((0, 0, 1, 1, 2, 5)))
        ]
        data = spoilt(b"".join(dice.choices(kinds, k=dice.choice((1, 2)))), mistakes)
        client, at, answers = await bench.client(), dice.randrange(len(data) + 1), b""
        client.send(data[:at])
        await asyncio.sleep(0)
        client.send(data[at:] if dice.random() < 0.7 else b"")
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(dice.choice((0.0, 0.05))):
                if dice.random() < 0.5:
                    client.writer.write_eof()
                answers = await client.reader.read(dice.choice((1, 50, 300, -1)))
        client.close()
        assert b"HTTP/1.1 ".startswith(answers[:9])
        seen.update(re.findall(rb"(?:^|\n|\})HTTP/1\.1 (\d+) ", answers))

    engine = await bench.active(hold_after_groups=2)
    held = await bench.asking(CHAT, ASKED)
    await held.head()
    for _ in range(20):
        await asyncio.gather(*(hostile() for _ in range(10)))
        assert (await bench.once(CHAT, {"messages": [], "max_tokens": 2})).status == 200
    await auntil(lambda: bench.load.connections == 1, "all but one to be gone")
    await auntil(lambda: engine.open_connections == 1, "the engine's connections to be closed")
    assert bench.load.in_flight == 1
    engine.released.set()
    assert (await held.chunks())[0].endswith(b"data: [DONE]\n\n")
    assert seen  # which of them depends on how soon they leave
    assert seen <= STATUSES
