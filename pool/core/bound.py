"""How long a ticket can wait at most.

    max(max_wait, 2 s) + (D_i + S_i) + Σ_j (W_j + P_j + D_j + S_j) + W_i
      + starve_after · (p − p_best)

i is the ticket's model, j each model that shares devices with it, also through others. W is the
budget of a raise, resumed streams included, P the protection of a turn, D a drain, S the release of
memory. A competitor has at most one turn first, since what a yielding model still wants is younger
than the ticket; and the second term is that of a ticket just behind its own model's barrier. Once
the last term is over, no later ticket goes before it. The 2 s are `IDLE_MS_MAX` of `who_yields.py`,
in which a head may wait for an awake model to be idle rather than have others unloaded: they begin
with the ticket, as `max_wait` does, and add nothing unless that is shorter.

A budget is a minute at least, and most raises take milliseconds: so there is the same sum with what
was measured in the place of every budget, which holds as long as nothing takes longer than it did.

Models that never yield take no turns. The bound is of a ticket whose model fits: it says nothing
where a lease or a stranger takes the room.
"""

from __future__ import annotations

from collections.abc import Sequence

from pool.core.model import Model
from pool.core.states import PoolRules
from pool.core.who_yields import IDLE_MS_MAX, protection_ms


def bound_ms(
    name: str,
    priority: int,
    models: Sequence[Model],
    rules: PoolRules,
    *,
    is_measured: bool = False,
) -> float | None:
    """Of a ticket of that priority for the model `name`: with the budgets of all raises, or with
    what they took, None while one of them was not measured yet. Infinite: a drain has no end."""
    (model,) = (each for each in models if each.name == name)
    sharing = sharing_with(name, models)
    turns = [each for each in sharing if not each.is_pinned]
    raises = [each.raise_ms if is_measured else each.raise_budget_ms for each in (model, *turns)]
    known = [ms for ms in raises if ms is not None]
    if len(known) < len(raises):
        return None
    in_use = [each.rules.priority for each in (model, *sharing)]
    in_use += [each.ticket.priority for each in (model, *sharing) if each.ticket is not None]
    behind = max(0, priority - min(in_use))
    return (
        max(model.rules.max_wait_ms, IDLE_MS_MAX)
        + sum(known)
        + sum(_drain_ms(each) + (each.costs.release_ms or 0.0) for each in (model, *turns))
        + sum(protection_ms(each, rules) for each in turns)
        + behind * rules.starve_after_ms
    )


def _drain_ms(model: Model) -> float:
    """Until the last request has ended or is parked; infinite if some can be neither."""
    if not model.cannot_park:
        return model.rules.park_ms
    return float("inf") if model.rules.cut_ms is None else model.rules.cut_ms


def sharing_with(name: str, models: Sequence[Model]) -> list[Model]:
    """All models that share devices with it, also through others."""
    (model,) = (each for each in models if each.name == name)
    devices = {*model.rules.devices}
    rest = [each for each in models if each.name != name]
    found: list[Model] = []
    while near := [each for each in rest if not devices.isdisjoint(each.rules.devices)]:
        rest = [each for each in rest if each not in near]
        found += near
        devices.update(*(each.rules.devices for each in near))
    return sorted(found, key=lambda each: each.name)
