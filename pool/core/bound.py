"""How long a ticket can wait at most, part by part, so that `explain` can print it.

    max(max_wait, 2 s) + (D_i + S_i) + Σ_j (W_j + P_j + D_j + S_j) + W_i
      + starve_after · (p − p_best)

i is the ticket's model, j each model that shares devices with it, also through others. W is the
budget of a raise, resumed streams included, P the protection of a turn, D a drain, S the release of
memory. A competitor has at most one turn first, since what a yielding model still wants is younger
than the ticket; and the second term is that of a ticket just behind its own model's barrier. Once
the last term is over, no later ticket goes before it. The 2 s are `IDLE_MS_MAX` of `who_sleeps.py`,
in which a head may wait for an awake model to be idle rather than have others unloaded: they begin
with the ticket, as `max_wait` does, and add nothing unless that is shorter.

A budget is a minute at least, and most raises take milliseconds: so beside the bound there is the
same sum with what was measured in the place of every budget (`measured_bound`). It holds for as
long as nothing takes longer than it did.

Models that never yield take no turns. The bound is of a ticket whose model fits: it says nothing
where a lease or a stranger takes the room.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from pool.core.model import Model
from pool.core.states import PoolRules
from pool.core.who_sleeps import IDLE_MS_MAX, protection_ms


class TurnBound(Struct, frozen=True):
    """The longest turn of one competitor, from its raise to the proof that its memory is free."""

    model: str
    raise_ms: float
    protection_ms: float
    drain_ms: float  # infinite: requests that cannot be parked are never cut
    release_ms: float

    @property
    def total_ms(self) -> float:
        return self.raise_ms + self.protection_ms + self.drain_ms + self.release_ms


class WaitBound(Struct, frozen=True):
    """The parts of the bound, in the order of the formula."""

    max_wait_ms: float  # `IDLE_MS_MAX` at least
    own_drain_ms: float
    own_release_ms: float
    turns: tuple[TurnBound, ...]
    raise_ms: float
    behind_ms: float  # until no ticket of a better priority goes first any more

    @property
    def total_ms(self) -> float:
        own_ms = self.max_wait_ms + self.own_drain_ms + self.own_release_ms + self.raise_ms
        return own_ms + sum(turn.total_ms for turn in self.turns) + self.behind_ms


def drain_ms(model: Model) -> float:
    """Until the last request has ended or is parked; infinite if some can be neither."""
    if not model.cannot_park:
        return model.rules.park_ms
    return float("inf") if model.rules.cut_ms is None else model.rules.cut_ms


def measured_bound(
    name: str, priority: int, models: Sequence[Model], rules: PoolRules
) -> WaitBound | None:
    """If nothing takes longer than it did. None: not everything has been measured yet."""
    if unmeasured(name, models):
        return None
    return bound(name, priority, _in_turn(name, models), rules, is_measured=True)


def unmeasured(name: str, models: Sequence[Model]) -> list[str]:
    """The models that `measured_bound` waits for: they have not been awake yet."""
    return [each.name for each in _in_turn(name, models) if each.raise_ms is None]


def _in_turn(name: str, models: Sequence[Model]) -> list[Model]:
    """The model and those that take turns with it."""
    (model,) = (each for each in models if each.name == name)
    return [model, *(each for each in sharing_with(name, models) if not each.is_pinned)]


def bound(
    name: str,
    priority: int,
    models: Sequence[Model],
    rules: PoolRules,
    *,
    is_measured: bool = False,
) -> WaitBound:
    """Of a ticket of that priority for the model `name`, from the budgets of all raises, or from
    what they took."""

    def raised_ms(each: Model) -> float:
        return each.raise_ms or 0.0 if is_measured else each.raise_budget_ms

    sharing = sharing_with(name, models)
    (model,) = (each for each in models if each.name == name)
    in_use = [each.rules.priority for each in (model, *sharing)]
    in_use += [each.ticket.priority for each in (model, *sharing) if each.ticket is not None]
    behind = max(0, priority - min(in_use))
    return WaitBound(
        max_wait_ms=max(model.rules.max_wait_ms, IDLE_MS_MAX),
        own_drain_ms=drain_ms(model),
        own_release_ms=model.costs.release_ms or 0.0,
        turns=tuple(
            TurnBound(
                each.name,
                raised_ms(each),
                protection_ms(each, rules),
                drain_ms(each),
                each.costs.release_ms or 0.0,
            )
            for each in sharing
            if not each.is_pinned
        ),
        raise_ms=raised_ms(model),
        behind_ms=behind * rules.starve_after_ms,
    )


def sharing_with(name: str, models: Sequence[Model]) -> list[Model]:
    """All models that share devices with it, also through others."""
    (model,) = (each for each in models if each.name == name)
    devices = {*model.rules.devices}
    rest = [each for each in models if each.name != name]
    found: list[Model] = []
    while True:
        near = [each for each in rest if not devices.isdisjoint(each.rules.devices)]
        if not near:
            return sorted(found, key=lambda each: each.name)
        rest = [each for each in rest if devices.isdisjoint(each.rules.devices)]
        found += near
        devices.update(*(each.rules.devices for each in near))
