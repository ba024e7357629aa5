"""Which model sleeps because it has no requests, when, and how deep: the one place that decides it,
in every pod.

    awake     quiet for `keep_alive`, and awake for `min_runtime`    → its `rest` tier
              ordered to sleep, once it has no request               → its `rest` tier
    asleep    above its `rest` tier, as above                        → its `rest` tier
    asleep    for `offload_after`, `unload_after`                    → offloaded, cold

Times asleep count from when the model stopped being awake. A model is offloaded only if its weights
have a copy in host memory: without one a model whose rest is `offloaded` stays warm, and only
`unload_after` makes it cold.

A pod without a pool file is a pool of one model. Nothing competes with that for memory, so the pod
has no pool process: its gateway applies the first row, with `--sleep-after` as `keep_alive`
(`gateway.core.sleep_door`). So this module imports little. Who sleeps to make room for others is
decided in `who_yields.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from plumbing.pod.messages import Tier
from pool.core.states import NEVER_MS, ModelState

if TYPE_CHECKING:  # a gateway needs no more than `sleeps_at_ms`
    from pool.core.model import Model


def sleeps_at_ms(
    last_request_ms: float, awake_since_ms: float, keep_alive_ms: float, min_runtime_ms: float = 0.0
) -> float:
    """When a model that is awake, and has no request, goes to sleep. One that was woken a moment
    ago has not been asked yet."""
    quiet_since_ms = max(last_request_ms, awake_since_ms)
    return max(quiet_since_ms + keep_alive_ms, awake_since_ms + min_runtime_ms)


class Victim(Struct, frozen=True):
    """`model` goes down to `tier`."""

    model: str
    tier: Tier


def rests_of(
    models: Sequence[Model], asked: Collection[str], now_ms: float
) -> tuple[tuple[Victim, ...], float]:
    """Who goes to sleep now, and when the next one will; infinite: none will."""
    found: list[Victim] = []
    next_ms = NEVER_MS
    for model in models:
        may_rest = not (model.is_pinned or model.is_blind)
        if model.ticket is not None or not may_rest or model.name in asked:
            continue
        due = [(at_ms, tier) for at_ms, tier in _dues(model) if at_ms < NEVER_MS]
        ready = [tier for at_ms, tier in due if at_ms <= now_ms]
        if ready:
            found.append(Victim(model.name, ready[-1]))
        next_ms = min([next_ms, *(at_ms for at_ms, _ in due if at_ms > now_ms)])
    return tuple(found), next_ms


def _dues(model: Model) -> list[tuple[float, Tier]]:
    """When it goes where, the deepest last."""
    rules = model.rules
    rest = Tier(rules.rest)
    if rest is Tier.OFFLOADED and not model.has_copy:
        rest = Tier.WARM
    keep_alive_ms = rules.keep_alive_ms if model.keep_alive_ms is None else model.keep_alive_ms
    match model.state:
        case ModelState.AWAKE if not model.in_flight and model.is_sleep_ordered:
            return [(float("-inf"), rest)]
        case ModelState.AWAKE if not model.in_flight:
            awake_ms = model.awake_since_ms or 0.0
            last_ms, least_ms = model.last_request_ms, rules.min_runtime_ms
            return [(sleeps_at_ms(last_ms, awake_ms, keep_alive_ms, least_ms), rest)]
        case ModelState.WARM | ModelState.OFFLOADED:
            asleep_ms = model.asleep_since_ms or 0.0
            rest_ms = max(asleep_ms, model.last_request_ms + keep_alive_ms)
            due = []
            if model.state is ModelState.WARM and model.has_copy:
                due.append((asleep_ms + rules.offload_after_ms, Tier.OFFLOADED))
            if model.state is ModelState.WARM and rest is Tier.OFFLOADED:
                due.append((rest_ms, Tier.OFFLOADED))
            if rest is Tier.COLD:
                due.append((rest_ms, Tier.COLD))
            return [*due, (asleep_ms + rules.unload_after_ms, Tier.COLD)]
        case _:
            return []
