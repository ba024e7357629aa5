"""Goal: what the gateway and an engine say to each other survives the way, and nothing else passes.

Method: Hypothesis over journals and bodies; a table of broken comments and headers.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbing.gateway_protocol import (
    Journal,
    group_end,
    read_group_end,
    with_journal,
    without_journal,
)

TOKENS = st.integers(0, 2**32 - 1)
CHUNKED = st.lists(st.lists(TOKENS, min_size=1, max_size=5), max_size=8)


def flat(chunks):
    return [token for chunk in chunks for token in chunk], [len(chunk) for chunk in chunks]


@given(CHUNKED)
def test_comment_of_a_group_is_read_as_it_was_written(chunks):
    assert read_group_end(group_end(*flat(chunks))) == flat(chunks)


@given(st.binary(max_size=50), CHUNKED)
def test_body_and_journal_survive_the_way(body, chunks):
    tokens, sizes = flat(chunks)
    data, header = with_journal(body, Journal(tokens, sizes))
    found, journal = without_journal(data, header)
    assert (found, list(journal.tokens), list(journal.chunks)) == (body, tokens, sizes)


BROKEN_COMMENTS = [b"", b": u=5", b": u=5|2\n\n", b": u=|1\n\n", b": u=x|1\n\n", b": u=5|0,1\n\n"]


@pytest.mark.parametrize("comment", [*BROKEN_COMMENTS, b": u=-1|1\n\n", b": v=5|1\n\n"])
def test_broken_comment_is_refused(comment):
    with pytest.raises(ValueError, match=r"."):
        read_group_end(comment)


@pytest.mark.parametrize(
    ("body", "header"),
    [(b"", "0"), (b"abc", "3,1,1"), (b"abc", "3,0"), (b"abc", "-1,1,0"), (b"", f"0,{2**30},1")],
)
def test_journal_that_does_not_fit_its_header_is_refused(body, header):
    with pytest.raises(ValueError, match=r"."):
        without_journal(body, header)


def test_chunks_that_do_not_add_up_are_refused():
    data, header = with_journal(b"", Journal([1, 2], [1]))
    with pytest.raises(ValueError, match="2 tokens"):
        without_journal(data, header)
