"""Tables of transitions: what is refused when one is made, and what is written of it."""

from __future__ import annotations

from enum import StrEnum

import pytest

from plumbing.errors import InvariantError
from plumbing.transitions import Table, page


class Door(StrEnum):
    OPEN = "open"
    SHUT = "shut"


OPEN_SHUTS = {(Door.OPEN, "push"): Door.SHUT}


@pytest.mark.parametrize(
    ("moves", "stays", "start"),
    [
        ({(Door.OPEN, "push"): Door.OPEN}, {}, Door),
        (OPEN_SHUTS, {Door.OPEN: ("push",)}, Door),
        ({}, {Door.OPEN: ("push",)}, (Door.OPEN,)),
    ],
)
def test_table_that_contradicts_itself_is_refused_when_it_is_made(moves, stays, start):
    """Goal: a mistake ends the import. Method: a move in place, two meanings, a lost state."""
    with pytest.raises(InvariantError):
        Table(moves, stays, start=start)


def test_table_names_each_target_and_nothing_else():
    """Goal: what is not named is illegal, and the page has the rest. Method: every pair."""
    table = Table(OPEN_SHUTS, {Door.SHUT: ("push", "knock")}, start=(Door.OPEN,))
    assert table.target(Door.OPEN, "push") is Door.SHUT
    assert table.target(Door.SHUT, "knock") is Door.SHUT
    assert table.target(Door.OPEN, "knock") is None
    assert page(table.edges())[2:] == [
        *("    open --> shut: push", "```", ""),
        *("No change: shut: push, knock.", ""),
    ]
