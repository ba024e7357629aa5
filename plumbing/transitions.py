"""Tables of transitions: which state an event leads to, checked when they are made.

An event that a table does not name for a state is illegal there. Who has the state says so in its
own words, and changes nothing. `page` writes a table for docs/states.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from typing import Generic, TypeVar

from plumbing.errors import InvariantError

S = TypeVar("S", bound=Enum)
E = TypeVar("E")
Edge = tuple[str, str, str]  # from, event, to


class Table(Generic[S, E]):
    """`moves`: the state that an event leads to; `stays`: by state, the events that change
    nothing."""

    def __init__(
        self,
        moves: Mapping[tuple[S, E], S],
        stays: Mapping[S, Collection[E]] | None = None,
        *,
        start: Collection[S],
    ) -> None:
        """`start`: the states in which one begins.

        Raises:
            InvariantError: a move that leads nowhere, an event with two meanings, a state that
                cannot be reached.
        """
        kept = [(state, event) for state, events in (stays or {}).items() for event in events]
        self._targets = dict(moves) | {pair: pair[0] for pair in kept}
        reached = {*start, *moves.values()}
        if any(state is target for (state, _), target in moves.items()):
            raise InvariantError("a move leads to its own state")
        if len(self._targets) < len(moves) + len(kept):
            raise InvariantError("an event has two meanings in one state")
        if reached != set(type(next(iter(reached)))):
            raise InvariantError(f"only {sorted(map(str, reached))} can be reached")

    def target(self, state: S, event: E) -> S | None:
        """Where `event` leads; None: it is illegal here."""
        return self._targets.get((state, event))

    def __iter__(self) -> Iterator[tuple[S, E, S]]:
        return ((state, event, target) for (state, event), target in self._targets.items())

    def edges(self) -> list[Edge]:
        """All of them, as text."""
        return [(str(state), str(event), str(target)) for state, event, target in self]


def page(edges: Iterable[Edge]) -> list[str]:
    """A Mermaid diagram, one arrow for each pair of states; then one line of what stays."""
    arrows: Mapping[tuple[str, str], list[str]] = defaultdict(list)
    kept: Mapping[str, list[str]] = defaultdict(list)
    for state, event, target in edges:
        (kept[state] if state == target else arrows[state, target]).append(event)
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
    lines += ["```", ""]
    if kept:
        listed = "; ".join(f"{state}: {', '.join(events)}" for state, events in kept.items())
        lines += [f"No change: {listed}.", ""]
    return lines
