"""Goal: a stream is cut behind its comments and nowhere else, however its bytes arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.events import BreakCause
from gateway.server import groups
from gateway.server.groups import GroupCutter
from plumbing.hop import END, HANDED_OVER, group_end

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


@given(GROUPS, EVENTS, st.lists(st.integers(0, 10_000), max_size=12))
def test_groups_do_not_depend_on_how_bytes_arrive(parts, last, at):
    """Method: any stream, split anywhere."""
    cutter = GroupCutter()
    found = cut(cutter, written(parts) + last + END, at)
    assert [group[:2] for group in found] == parts
    assert cutter.last == last
    assert cutter.broken is None


@given(GROUPS, EVENTS, st.lists(st.integers(0, 10_000), max_size=12))
def test_half_a_group_at_a_handover_is_thrown_away(parts, half, at):
    cutter = GroupCutter()
    found = cut(cutter, written(parts) + half + HANDED_OVER, at)
    assert [group[:2] for group in found] == parts
    assert cutter.broken is BreakCause.HANDED_OVER
    assert cutter.last is None


def test_every_split_of_one_stream():
    """Method: each pair of places to split at, so each comment is cut at each of its bytes."""
    parts = [(b'data: {"a":1}\n\n', [1]), (b"", [2, 3]), (b"data: x\n\n", [])]
    data = written(parts) + b"data: [DONE]\n\n" + END
    for first in range(len(data)):
        for second in range(first, min(first + 9, len(data))):
            cutter = GroupCutter()
            found = cut(cutter, data, [first, second])
            assert [group[:2] for group in found] == parts, (first, second)
            assert cutter.last == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "comment", [b": u=1,2|1\n\n", b": u=a|1\n\n", b": u=1\n\n", b": u=1|0,1\n\n", b": u=-1|1\n\n"]
)
def test_a_comment_that_is_not_the_hops_breaks_the_stream(comment):
    cutter = GroupCutter()
    good = written([(b"data: 1\n\n", [7])])
    found = cutter.feed(good + b"data: 2\n\n" + comment + good)
    assert [tokens for _, tokens, _ in found] == [[7]]
    assert cutter.broken is BreakCause.GARBAGE
    assert cutter.feed(good) == []


def test_events_up_to_the_limit_are_kept_and_more_break(monkeypatch):
    monkeypatch.setattr(groups, "GROUP_BYTES_MAX", 1000)
    cutter = GroupCutter()
    for _ in range(10):
        assert cutter.feed(b"x" * 100) == []
    assert cutter.broken is None
    cutter.feed(b"x")
    assert cutter.broken is BreakCause.GARBAGE


def test_an_error_event_without_a_comment_is_shown_to_the_core():
    """Goal: vLLM's last words do not wait for a comment that never comes."""
    cutter = GroupCutter()
    error = b'data: {"error": {"message": "EngineCore died"}}\n\ndata: [DONE]\n\n'
    assert cutter.feed(error[:20]) == []
    [group] = cutter.feed(error[20:])
    assert group == (error, [], [])
