"""Goal: a request is read whole, once, within limits, however its bytes arrive."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.server import requests
from gateway.server.request_reader import HEAD_BYTES_MAX, PIPELINED_MAX, BodyMemory, RequestReader
from gateway.server.requests import is_hop_path
from gateway.server.responses import Refused


def reader(body_bytes_max=1000, refused=None, memory=None):
    memory = memory or BodyMemory(1 << 20)
    return RequestReader(lambda: body_bytes_max, lambda headers: refused, memory)


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


@given(
    st.lists(st.sampled_from([POST, CHUNKED, GET, H2C]), max_size=5),
    st.lists(st.integers(0, 2000), max_size=10),
)
def test_requests_do_not_depend_on_how_bytes_arrive(sent, at):
    """Method: pipelined requests, split anywhere."""
    data = b"".join(sent)
    bounds = [0, *sorted(each % (len(data) + 1) for each in at), len(data)]
    found = read(*(data[a:b] for a, b in pairwise(bounds) if b > a))
    assert found.refused is None
    assert [each.body for each in found.ready] == [b"" if each == GET else b"abc" for each in sent]
    assert found.is_idle
    for each in found.ready:
        assert b"transfer-encoding" not in each.head
        assert b"upgrade" not in each.head


def test_what_an_engine_gets_of_a_head():
    """Goal: what is the client's passes, what is the connection's or the hop's does not."""
    found = read(
        b"POST /v1/x?q=1 HTTP/1.1\r\nHost: me\r\nAuthorization: Bearer k\r\nTraceparent: 00-1\r\n"
        b"X-Understudy-Journal: 1,1,1\r\nx-understudy-gateway: 1\r\nTE: trailers\r\n"
        b"Connection: keep-alive, X-Mine\r\nX-Mine: 1\r\nAccept-Encoding: gzip\r\n"
        b"X-Request-Id: abc-1\r\nContent-Length: 0\r\n\r\n"
    )
    [request] = found.ready
    assert request.head == (
        b"POST /v1/x?q=1 HTTP/1.1\r\nhost: me\r\nauthorization: Bearer k\r\ntraceparent: 00-1\r\n"
        b"x-request-id: abc-1\r\n"
    )
    assert (request.path, request.request_id) == ("/v1/x", b"abc-1")


@pytest.mark.parametrize("sent", [b"", b"a b", b"x" * 129, b"\xff"])
def test_a_request_id_that_is_not_sane_is_replaced(sent):
    [request] = read(GET[:-2] + b"X-Request-Id: " + sent + b"\r\n\r\n").ready
    assert len(request.request_id) == 32
    assert b"x-request-id: " + request.request_id in request.head


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (POST[:-5] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (CHUNKED.replace(b"chunked\r\n", b"chunked\r\nContent-Length: 3\r\n"), 400),
        (POST.replace(b"Length: 3", b"Length: 3\r\nContent-Length: 4"), 400),
        (POST.replace(b"Length: 3", b"Length: -3"), 400),
        (CHUNKED.replace(b"2;x=y", b"zz"), 400),
        (CHUNKED.replace(b"chunked", b"gzip, chunked"), 501),
        (GET.replace(b"\r\n", b"\n"), 400),
        (GET[:-2] + b"X: a\r\n b\r\n\r\n", 400),  # folded
        (GET[:-2] + b"X: a\nX-Understudy-Journal: 1\r\n\r\n", 400),
        (GET[:-2] + b"X: a\rX: b\r\n\r\n", 400),
        (GET[:-2] + b"X-Understudy-Journal : 1\r\n\r\n", 400),
        (GET[:-2] + b"Host: other\r\n\r\n", 400),
        (POST.replace(b"Length: 3", b"Length: 3\r\nContent-Length: 3"), 400),
        (POST.replace(b"Length: 3", b"Length: 3, 3"), 400),
        (POST.replace(b"Length: 3", b"Length: +3"), 400),
        (POST.replace(b"Length: 3", b"Length: %d" % (2**64 + 3)), 400),
        (CHUNKED.replace(b"1.1", b"1.0"), 400),
        (CHUNKED.replace(b"2;x=y\r\n", b"2\n"), 400),
        (CHUNKED.replace(b"2;x=y", b"fffffffffffffffff"), 400),
        (CHUNKED.replace(b"ab\r\n", b"abcd"), 400),
        (CHUNKED.replace(b": chunked", b": identity\r\nTransfer-Encoding: chunked"), 501),
        (CHUNKED.replace(b": chunked", b": chunked, chunked"), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 501),  # TLS to a port without it
        (b"FETCH / HTTP/1.1\r\n\r\n", 501),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 405),
        (GET.replace(b"1.1", b"2.0"), 505),
        (b"GET /understudy/hello HTTP/1.1\r\n\r\n", 404),
        (b"GET http://x/understudy/hello HTTP/1.1\r\n\r\n", 404),
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
        assert not found.ready


def test_a_head_that_never_ends_is_refused():
    found = reader()
    for _ in range(HEAD_BYTES_MAX // 1000 + 2):
        found.feed(b"GET / HTTP/1.1\r\n" if found.is_idle else b"X: " + b"x" * 1000 + b"\r\n")
    assert found.refused is not None
    assert found.refused.status == 431


def test_a_chunked_body_over_the_limit_is_refused():
    found = read(CHUNKED.split(b"\r\n\r\n")[0] + b"\r\n\r\n")
    for _ in range(11):
        found.feed(b"64\r\n" + b"x" * 100 + b"\r\n")
    assert found.refused is not None
    assert found.refused.status == 413
    assert not found.ready


def test_all_bodies_together_have_a_limit():
    """Goal: many large bodies at once are refused before they take the process's memory, and what
    they took is free again, however their requests end."""
    memory = BodyMemory(500)
    head = POST.replace(b"Length: 3", b"Length: 300")[:-3]
    first, second, third = [reader(memory=memory) for _ in range(3)]
    first.feed(head + b"x" * 200)
    second.feed(head + b"x" * 200)
    third.feed(head + b"x" * 200)
    assert third.refused is not None
    assert third.refused.status == 503
    assert memory.bytes == 400
    first.feed(b"x" * 100)
    assert len(first.ready) == 1
    second.close()
    assert memory.bytes == 0


def test_a_check_refuses_before_the_body_is_read():
    refused = Refused(401, "unauthorized", "no")
    found = read(POST[:-3], refused=refused)
    assert found.refused is refused


def test_too_many_pipelined_requests_are_not_read():
    found = read(GET * (PIPELINED_MAX + 5))
    assert len(found.ready) == PIPELINED_MAX
    assert not found.ready[-1].keeps_alive


def test_continue_is_owed_until_the_body_is_there():
    head = POST.replace(b"Length: 3", b"Length: 3\r\nExpect: 100-continue")
    found = read(head[:-3])
    assert found.expects_continue
    found.feed(b"abc")
    assert not found.expects_continue
    assert b"expect" not in found.ready[0].head


def test_a_websocket_is_a_tunnel():
    found = read(
        b"GET /v1/realtime HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: k\r\n\r\nrest"
    )
    [request] = found.ready
    assert request.is_tunnel
    assert found.rest == b"rest"
    assert b"connection: upgrade\r\nupgrade: websocket\r\n" in request.head


def test_a_post_that_asks_for_a_websocket_is_read_with_its_body():
    """Goal: no body passes as a tunnel's bytes, unread."""
    wants = b"Host: h\r\nConnection: Upgrade\r\nUpgrade: websocket"
    for sent in (POST, CHUNKED):
        [request] = read(sent.replace(b"Host: h", wants)).ready
        assert not request.is_tunnel
        assert request.body == b"abc"


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


def test_a_percent_encoded_path_of_the_hop_is_refused():
    found = read(b"GET /%75nderstudy%2Fhello HTTP/1.1\r\n\r\n")
    assert found.refused is not None
    assert found.refused.status == 404


@pytest.mark.parametrize(
    ("body", "is_stream"),
    [
        (b'{"stream": true}', True),
        (b'{"messages": [{"stream": 1}], "stream":false}', False),
        (b'{"stream": null}', False),
        (b'{"x": "\\"stream\\": true"}', False),
        (b"not json", False),
        (b'{"stream": "yes"}', False),
        (b"[1]", False),
    ],
)
def test_whether_a_body_asks_for_a_stream(body, is_stream):
    request = requests.HttpRequest(b"POST", "/", b"", body, b"1")
    assert request.asks_for_stream is is_stream
