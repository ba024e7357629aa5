"""The table of a request's life, exhaustively."""

from __future__ import annotations

import itertools

import pytest

from gateway.core.client_request import TABLE, ClientRequest, RequestState, Turn
from gateway.core.machine import UNSENT
from plumbing.errors import InvariantError


def test_turn_that_is_not_in_the_table_raises_and_changes_nothing():
    request = ClientRequest(1, "/", 0, True, True, 0.0)
    known = {(state, turn) for state, turn, _ in TABLE}
    for state, turn in set(itertools.product(RequestState, Turn)) - known:
        request.state = state
        with pytest.raises(InvariantError):
            request.fire(turn)
        assert request.state is state


def test_request_always_has_a_way_to_its_end_and_none_back():
    """Goal: no request is stuck, none comes back. Method: read the table."""
    ends = {RequestState.DONE}
    for _ in RequestState:
        ends |= {source for source, _, target in TABLE if target in ends}
    assert ends == set(RequestState)
    assert not any(source is RequestState.DONE for source, _, _ in TABLE)


def test_request_that_has_sent_something_never_begins_anew():
    """Goal: nothing is doubled. Method: no way from a state that has sent to one that has not."""
    for source, _, target in TABLE:
        if source not in UNSENT:
            assert target not in UNSENT
    back = {turn for _, turn, target in TABLE if target is RequestState.STREAMING}
    assert back == {Turn.STREAM, Turn.JOIN}
    joins = [source for source, turn, _ in TABLE if turn is Turn.JOIN]
    assert joins == [RequestState.REPLAYING]
