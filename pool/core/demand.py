"""What all gateways have: tickets and requests in flight, by model.

A gateway that is not connected keeps what it has said: its requests are, as far as anybody knows,
where they were. That ends when it is heard again, or when its process has ended. Where nobody can
tell of its end, as after a restart of the pool, one of a new name takes its place: a pod has one
service address, so a new gateway usually means that the old one is no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pool.core.events import DemandCame, ModelDemand, Ticket, TicketKind

NOTHING = ModelDemand()


class Demand:
    """The last word of every gateway."""

    def __init__(self) -> None:
        self._said: dict[str, Mapping[str, ModelDemand]] = {}
        self._gone: set[str] = set()
        self._watched: set[str] = set()  # of these: somebody tells of their end
        self.is_heard = False  # by any gateway since the start: until then nobody knows who waits

    @property
    def gateways(self) -> tuple[str, ...]:
        """All that may have requests."""
        return tuple(self._said)

    def restore(self, gateways: Iterable[str]) -> None:
        """Those that this pool knew before it was restarted."""
        self._said = {gateway: {} for gateway in gateways}
        self._gone = set(self._said)

    def hear(self, event: DemandCame) -> set[str]:
        """Of which models something has changed."""
        before = self._said.get(event.gateway, {})
        changed = {name for name, each in event.models.items() if before.get(name) != each}
        changed.update(name for name in before if name not in event.models)
        if event.gateway not in self._said:
            for name in self._gone - self._watched:
                changed.update(self._said.pop(name))
                self._gone.discard(name)
        if event.gateway in self._gone or not self.is_heard:
            changed.update(event.models)
        self._gone.discard(event.gateway)
        self._watched.discard(event.gateway)
        self.is_heard = True
        self._said[event.gateway] = event.models
        return changed

    def lose(self, gateway: str, *, is_dead: bool, is_watched: bool) -> None:
        """It is not connected. `is_dead`: and its requests have ended with it."""
        self._watched.discard(gateway)
        if is_dead:
            self._said.pop(gateway, None)
            self._gone.discard(gateway)
        elif gateway in self._said:
            self._gone.add(gateway)
            if is_watched:
                self._watched.add(gateway)

    def _of(self, model: str) -> Iterator[ModelDemand]:
        return (models.get(model, NOTHING) for models in self._said.values())

    def tickets(self, model: str) -> list[Ticket]:
        return [ticket for demand in self._of(model) for ticket in demand.tickets]

    def in_flight(self, model: str) -> int:
        return sum(demand.in_flight for demand in self._of(model))

    def cannot_park(self, model: str) -> int:
        return sum(demand.cannot_park for demand in self._of(model))

    def is_resuming(self, model: str) -> bool:
        """Whether a stream that was parked waits for its next token."""
        return any(
            demand.resuming or any(each.kind is TicketKind.PARKED for each in demand.tickets)
            for demand in self._of(model)
        )

    def last_request_ms(self, model: str) -> float | None:
        found = [demand.last_request_ms for demand in self._of(model)]
        return max((ms for ms in found if ms is not None), default=None)

    def keep_alive_ms(self, model: str) -> float | None:
        found = [demand.keep_alive_ms for demand in self._of(model)]
        return max((ms for ms in found if ms is not None), default=None)

    def is_quiet(self, model: str, door: int) -> bool:
        """Whether every gateway obeys this door and has nothing at an engine. With no gateway to
        ask, nobody knows."""
        if not self._said or self._gone:
            return False
        return all(each.door >= door and not each.in_flight for each in self._of(model))
