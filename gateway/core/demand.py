"""What all children of a gateway have for the pool, as one: the parent's side of tickets.

A child's word is all that it has, and counts until its next word or its end. Doors have numbers of
the parent's own towards children, since those of a pool that has started again compare with no
other's.

The surprising thing: a door counts as obeyed only once every child that has spoken obeys it. A
child that has not spoken is no exception: it is told all doors before it is let accept, and speaks
before that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import structs

from pool.core.events import ModelDemand, Ticket

TICKETS_MAX = 512  # of one model in one message, as many as the largest queue has,
TICKETS_IN_ALL = 2048  # and of all: a parked stream has one too, and a frame is 256 KiB
STARVE_AFTER_MS = 60_000.0  # of the pool's order, in which those beyond the limit are the last
CHILD_STEP = 1 << 40  # ids of a later child are above those of an earlier one


class ChildDemands:
    """Of one gateway, for these models."""

    def __init__(self, models: Collection[str]) -> None:
        self._models = tuple(models)
        self._told: dict[str, tuple[int, int]] = {}  # our number of a model's door, and the pool's
        self._last = 0
        self._children: dict[int, Mapping[str, ModelDemand]] = {}

    @property
    def is_heard(self) -> bool:
        """Whether there is a child that has spoken."""
        return bool(self._children)

    def said(self, child: int, models: Mapping[str, ModelDemand]) -> None:
        self._children[child] = models

    def of_child(self, child: int) -> Mapping[str, ModelDemand]:
        """Its last word."""
        return self._children.get(child, {})

    def gone(self, child: int) -> None:
        self._children.pop(child, None)

    def tell(self, model: str, number: int) -> int:
        """All children are told the pool's door `number` for this model now, as the one that is
        returned."""
        self._last += 1
        self._told[model] = (self._last, number)
        return self._last

    def whole(self) -> dict[str, ModelDemand]:
        """The demand for each model. `door` is 0 while the present one is not obeyed. Without any
        child nothing is sent, and the next one is told the present door."""
        whole = {model: self._of(model) for model in self._models}
        busy = sum(bool(each.tickets) for each in whole.values())
        most = min(TICKETS_MAX, TICKETS_IN_ALL // max(1, busy))
        return {
            model: structs.replace(each, tickets=_first(each.tickets, most))
            if len(each.tickets) > most
            else each
            for model, each in whole.items()
        }

    def _of(self, model: str) -> ModelDemand:
        told, number = self._told.get(model, (0, 0))
        found = {
            child: models[model] for child, models in self._children.items() if model in models
        }
        newest = max(
            found.values(), key=lambda each: each.last_request_ms or 0.0, default=ModelDemand()
        )
        return ModelDemand(
            tickets=tuple(
                Ticket(
                    child * CHILD_STEP + each.id,
                    each.since_ms,
                    each.priority,
                    each.deadline_ms,
                    each.kind,
                )
                for child, demand in sorted(found.items())
                for each in demand.tickets
            ),
            in_flight=sum(each.in_flight for each in found.values()),
            cannot_park=sum(each.cannot_park for each in found.values()),
            resuming=sum(each.resuming for each in found.values()),
            last_request_ms=newest.last_request_ms,
            keep_alive_ms=newest.keep_alive_ms,
            door=number if all(each.door >= told for each in found.values()) else 0,
        )


def _first(tickets: Iterable[Ticket], most: int) -> tuple[Ticket, ...]:
    """Those that are first in the order of the policy, in the order of their ids."""
    found = sorted(tickets, key=lambda each: each.since_ms + each.priority * STARVE_AFTER_MS)
    return tuple(sorted(found[:most], key=lambda each: each.id))
