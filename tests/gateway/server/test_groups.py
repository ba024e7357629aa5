"""Goal: a stream is cut behind its comments and nowhere else, however its bytes arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.events import BreakCause, HeadCame
from gateway.core.replay import TOKEN_MAX
from gateway.server.upstream import GroupCutter, Upstream
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import END, HANDED_OVER, group_end

EVENTS = st.sampled_from(
    [
        b"",
        b'data: {"text":"a"}\n\n',
        b'data: {"text":"\\n: u=1|1\\n"}\n\n',  # the comment's grammar within a JSON string
        b"event: x\ndata: {}\n\ndata: : u=\n\n",
        b'data: {"text":"b"}\r\n\r\n',
    ]
)
GROUPS = st.lists(st.tuples(EVENTS, st.lists(st.integers(0, 99_999), max_size=4)), max_size=8)


def written(parts) -> bytes:
    return b"".join(
        events + group_end(tokens, [len(tokens)] if tokens else []) for events, tokens in parts
    )


def cut(cutter: GroupCutter, data: bytes, at: list[int]):
    found, start = [], 0
    for stop in [*sorted(each % (len(data) + 1) for each in at), len(data)]:
        if stop > start:
            found += cutter.feed(data[start:stop])
        start = max(start, stop)
    return found


@pytest.mark.parametrize(("end", "broken"), [(END, None), (HANDED_OVER, BreakCause.HANDED_OVER)])
@given(GROUPS, EVENTS, st.lists(st.integers(0, 10_000), max_size=12))
def test_groups_do_not_depend_on_how_bytes_arrive(end, broken, parts, last, at):
    """Method: any stream, split anywhere. At a handover half a group is thrown away."""
    cutter = GroupCutter()
    found = cut(cutter, written(parts) + last + end, at)
    assert [group[:2] for group in found] == parts
    assert (cutter.last, cutter.broken) == (None if broken else last, broken)


HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    + f"{hop.ENGINE}: e\r\n{hop.TOKEN}: 1\r\n{hop.CONTINUATION}: exact\r\n\r\n".encode()
)
SIZES = st.sampled_from((b"%x\r\n", b"%X\r\n", b"%x;why=because\r\n", b"0%x\r\n"))


class Recorder:
    """The owner, the attempt and the client of an upstream, in one: keeps what it is told."""

    number, request, is_full, is_replaying, is_resumed_by_front = 1, 1, False, False, False
    passing = None  # its client is no front

    def __init__(self) -> None:
        self.groups: list[tuple[bytes, list[int], list[int]]] = []
        self.outbox: list[object] = []
        self.sent, self.last = b"", None

    @property
    def owner(self):
        return self

    def passes(self, events, token):
        assert token <= TOKEN_MAX
        self.groups.append((events, [token], [1]))
        return True

    def group(self, events, tokens, chunks, now_ms):
        self.groups.append((events, tokens, chunks))
        return events

    def end(self, events, now_ms):
        self.last = events
        return events

    def send_body(self, data):
        self.sent += data

    def gather(self):
        pass

    def release(self):
        return False

    def now_ms(self):
        return 0.0

    def handle(self, event):
        assert isinstance(event, HeadCame)

    def perform_outbox(self):
        pass


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


ONE, TWO = b"data: 1\n\n: u=1|1\n\n", b"data: 2\n\n: u=2|1\n\n"
LOOKS_LIKE_A_CHUNK = chunk(TWO)[:-2]  # its last bytes are those of the chunk that it is in
READS = {
    "half a group": (
        [chunk(b"data: 0\n\n"), chunk(ONE), chunk(TWO)],
        [(b"data: 0\n\ndata: 1\n\n", [1]), (b"data: 2\n\n", [2])],
    ),
    "a chunk within a chunk": (
        [
            chunk(ONE + LOOKS_LIKE_A_CHUNK)[: -len(LOOKS_LIKE_A_CHUNK) - 2],
            LOOKS_LIKE_A_CHUNK + b"\r\n",
        ],
        [(b"data: 1\n\n", [1]), (b"%x\r\ndata: 2\n\n" % len(TWO), [2])],
    ),
    "a longer chunk": (
        [chunk(ONE + b"\r\n" + TWO)[: -len(TWO) - 2], TWO + b"\r\n"],
        [(b"data: 1\n\n", [1]), (b"\r\ndata: 2\n\n", [2])],
    ),
    "a comment within an event": (
        [chunk(b"data: 1\n: u=1|1\n\n" + TWO)],
        [(b"data: 1\n", [1]), (b"data: 2\n\n", [2])],
    ),
    "more than a token": (
        [chunk(b"data: 1\n\n: u=%d|1\n\n" % (TOKEN_MAX + 1))],
        [(b"data: 1\n\n", [TOKEN_MAX + 1])],
    ),
    "the end of a comment alone": (
        [chunk(b"1234567|1\n\n"), chunk(ONE)],
        [(b"1234567|1\n\ndata: 1\n\n", [1])],
    ),
}


@pytest.mark.parametrize("name", READS)
def test_what_looks_like_one_chunk_with_one_group(name):
    """Goal: only what is one passes by the parser. Method: reads that are nearly that."""
    reads, expected = READS[name]
    seen = Recorder()
    upstream = Upstream(seen, seen, seen, (), is_to_head=False)
    for each in (HEAD, chunk(b"data: 0\n\n: u=0|1\n\n"), *reads, chunk(END) + b"0\r\n\r\n"):
        upstream.data_received(each)
    assert [group[:2] for group in seen.groups] == [(b"data: 0\n\n", [0]), *expected]
    assert seen.last == b""


@given(GROUPS, st.lists(st.tuples(SIZES, st.integers(1, 3)), min_size=8, max_size=8), st.data())
def test_a_chunk_that_is_not_parsed_means_the_same(parts, framed, data):
    """Goal: what passes by the parser is what it would have found. Method: one group or a few in
    each chunk, sizes as HTTP may spell them, reads that end anywhere."""
    wire, left = HEAD, list(parts)
    for size, count in framed:
        body = written(left[:count])
        del left[:count]
        wire += size % len(body) + body + b"\r\n" if body else b""
    wire += chunk(END) + b"0\r\n\r\n"
    seen = Recorder()
    upstream = Upstream(seen, seen, seen, (), is_to_head=False)
    ends = sorted(data.draw(st.lists(st.integers(1, len(wire)), max_size=12)))
    for start, end in zip([0, *ends], [*ends, len(wire)], strict=True):
        if end > start:
            upstream.data_received(wire[start:end])
    assert [group[:2] for group in seen.groups] == parts
    assert (seen.last, seen.sent) == (b"", b"".join(events for events, _ in parts))
