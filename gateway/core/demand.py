"""What all children of a gateway have for the pool, as one: the parent's side of tickets.

A child's word is all that it has, and counts until its next word or its end. The surprising thing:
a door counts as obeyed only once every child that has spoken obeys it. A child that has not spoken
is no exception: it is told all doors before it is let accept, and speaks before that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pool.core.events import ModelDemand, Ticket

TICKETS_MAX = 512  # of one model in one message, as many as the largest queue has
STARVE_AFTER_MS = 60_000.0  # of the pool's order, in which those beyond the limit are the last
CHILD_STEP = 1 << 40  # ids of a later child are above those of an earlier one


class Demands:
    """Of one gateway."""

    def __init__(self) -> None:
        self._children: dict[int, Mapping[str, ModelDemand]] = {}

    def said(self, child: int, models: Mapping[str, ModelDemand]) -> None:
        self._children[child] = models

    def gone(self, child: int) -> None:
        self._children.pop(child, None)

    def whole(self, doors: Mapping[str, int]) -> dict[str, ModelDemand]:
        """The demand for each model of `doors`, the numbers that children were told last. Without
        any child nothing is sent, and the next one is told those."""
        return {model: self._of(model, number) for model, number in doors.items()}

    def _of(self, model: str, number: int) -> ModelDemand:
        found = {
            child: models[model] for child, models in self._children.items() if model in models
        }
        newest = max(
            found.values(), key=lambda each: each.last_request_ms or 0.0, default=ModelDemand()
        )
        return ModelDemand(
            tickets=_first(
                Ticket(
                    child * CHILD_STEP + each.id,
                    each.since_ms,
                    each.priority,
                    each.deadline_ms,
                    each.kind,
                )
                for child, demand in found.items()
                for each in demand.tickets
            ),
            in_flight=sum(each.in_flight for each in found.values()),
            cannot_park=sum(each.cannot_park for each in found.values()),
            last_request_ms=newest.last_request_ms,
            keep_alive_ms=newest.keep_alive_ms,
            door=min((each.door for each in found.values()), default=number),
        )


def _first(tickets: Iterable[Ticket]) -> tuple[Ticket, ...]:
    """As many as one message may have, oldest first."""
    found = list(tickets)
    if len(found) > TICKETS_MAX:
        found.sort(key=lambda each: each.since_ms + each.priority * STARVE_AFTER_MS)
        del found[TICKETS_MAX:]
    return tuple(sorted(found, key=lambda each: each.id))
