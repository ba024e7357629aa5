"""What the gateways have, and who is before whom: tickets and requests in flight, by model, and the
order of tickets within a model and between models.

    level = priority − ⌊age ÷ starve_after⌋      the lower one first, then the one that came first

So a better priority is worth a fixed time, and no ticket waits behind it for ever. Between models a
ticket that its model's last turn has not served counts from that turn's drain: with its old age its
model would get a second turn before others had one.

A gateway that is not connected keeps what it has said: its requests are, as far as anybody knows,
where they were. That ends when it is heard again, or when its process has ended. Where nobody can
tell of its end, as after a restart of the pool, one of a new name takes its place, unless that
replaces one that is known to have ended: a pod has one service address, so a new gateway usually
means that the old one is no more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct

from pool.core.events import DemandCame, ModelDemand, Ticket, TicketKind
from pool.core.states import NEVER_MS, PoolRules

NOTHING = ModelDemand()


class Demand:
    """The last word of every gateway."""

    def __init__(self) -> None:
        self._said: dict[str, Mapping[str, ModelDemand]] = {}
        self._gone: dict[str, bool] = {}  # and whether the kernel tells of their end
        self._vacant = 0  # how many are known to have ended, and are not replaced yet
        self.is_heard = False  # by any gateway since the start: until then it is unknown who waits

    @property
    def gateways(self) -> tuple[str, ...]:
        """All that may have requests."""
        return tuple(self._said)

    def restore(self, gateways: Iterable[str]) -> None:
        """Those that this pool knew before it was restarted."""
        self._said = {gateway: {} for gateway in gateways}
        self._gone = dict.fromkeys(self._said, False)

    def hear(self, event: DemandCame) -> set[str]:
        """Of which models something has changed."""
        before = self._said.get(event.gateway, {})
        changed = {name for name, each in event.models.items() if before.get(name) != each}
        changed.update(name for name in before if name not in event.models)
        if event.gateway not in self._said and self._vacant:
            self._vacant -= 1
        elif event.gateway not in self._said:
            for name in [name for name, is_watched in self._gone.items() if not is_watched]:
                changed.update(self._said.pop(name))
                del self._gone[name]
        if event.gateway in self._gone or not self.is_heard:
            changed.update(event.models)
        self._gone.pop(event.gateway, None)
        self.is_heard = True
        self._said[event.gateway] = event.models
        return changed

    def lose(self, gateway: str, *, is_dead: bool, is_watched: bool) -> None:
        """It is not connected. `is_dead`: and its requests have ended with it."""
        if is_dead:
            self._vacant += self._said.pop(gateway, None) is not None
            self._gone.pop(gateway, None)
        elif gateway in self._said:
            self._gone[gateway] = is_watched

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

    def keep_alive_ms(self, model: str) -> float | None:
        found = [demand.keep_alive_ms for demand in self._of(model)]
        return max((ms for ms in found if ms is not None), default=None)

    def is_quiet(self, model: str, door: int) -> bool:
        """Whether every gateway obeys this door and has nothing at an engine. With no gateway to
        ask, that is unknown."""
        if not self._said or self._gone:
            return False
        return all(each.door >= door and not each.in_flight for each in self._of(model))


ROUNDING_MS = 0.001  # sums of floats are not exact, and what is due must be so at its instant


class TicketView(Struct, frozen=True):
    """Of one model's tickets (or the one of a lease or an order), the one that decides: what
    `first_ticket` has chosen."""

    priority: int
    since_ms: float


def level_of(priority: int, since_ms: float, now_ms: float, rules: PoolRules) -> int:
    """The priority that its age has earned it."""
    return priority - int(max(0.0, now_ms - since_ms + ROUNDING_MS) // rules.starve_after_ms)


def order_of(ticket: TicketView, now_ms: float, rules: PoolRules) -> tuple[int, float]:
    """What tickets are sorted by."""
    return level_of(ticket.priority, ticket.since_ms, now_ms, rules), ticket.since_ms


def first_ticket(
    tickets: Iterable[Ticket], drained_ms: float | None, now_ms: float, rules: PoolRules
) -> TicketView | None:
    """The one of a model's tickets that decides for it, as other models see it. `drained_ms`: when
    its last drain began; None: it had no turn yet."""
    floor_ms = float("-inf") if drained_ms is None else drained_ms
    oldest: dict[int, float] = {}  # of each priority; the others are behind it for ever
    for ticket in tickets:
        if ticket.since_ms < oldest.get(ticket.priority, NEVER_MS):
            oldest[ticket.priority] = ticket.since_ms
    views = (TicketView(priority, max(floor_ms, ms)) for priority, ms in oldest.items())
    return min(views, key=lambda each: order_of(each, now_ms, rules), default=None)


def next_level_ms(since_ms: float, now_ms: float, rules: PoolRules) -> float:
    """When a ticket of that age counts for more."""
    return since_ms + (1 - level_of(0, since_ms, now_ms, rules)) * rules.starve_after_ms


def next_change_ms(
    tickets: Collection[Ticket | TicketView],
    drained_ms: float | None,
    now_ms: float,
    rules: PoolRules,
) -> float:
    """Not later than when time alone makes another one of these the first one. Of tickets of one
    priority the oldest stays first."""
    if len({ticket.priority for ticket in tickets}) < 2:
        return NEVER_MS
    floor_ms = float("-inf") if drained_ms is None else drained_ms
    return min(next_level_ms(max(ticket.since_ms, floor_ms), now_ms, rules) for ticket in tickets)
