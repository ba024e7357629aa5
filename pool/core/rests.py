"""Who goes down because nobody has asked for it: keep-alive, and what follows when asleep.

    awake     quiet for `keep_alive`, and awake for `min_runtime`   → its `rest` tier
    asleep    above its `rest` tier, as above                        → its `rest` tier
    warm      asleep for `offload_after`, with a copy in host memory → offloaded
    above cold, asleep for `unload_after`                            → cold

Never a pinned model, one with a ticket, or one that was asked to make room. Without a copy in host
memory a model whose rest is `offloaded` stays warm: only `unload_after` makes it cold.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from plumbing.pod.messages import Tier
from pool.core.states import ModelState
from pool.core.victims import quiet_since_ms
from pool.core.view import ModelView, Victim


def rests_of(
    models: Sequence[ModelView], asked: Collection[str], now_ms: float
) -> tuple[tuple[Victim, ...], float]:
    """Who rests now, and when the next one will; infinite: nobody."""
    found: list[Victim] = []
    next_ms = float("inf")
    for model in models:
        may_rest = not (model.rules.is_pinned or model.is_blind)
        if model.ticket is not None or not may_rest or model.name in asked:
            continue
        due = [(at_ms, tier) for at_ms, tier in _dues(model) if at_ms != float("inf")]
        ready = [tier for at_ms, tier in due if at_ms <= now_ms]
        if ready:
            found.append(Victim(model.name, ready[-1]))
        next_ms = min([next_ms, *(at_ms for at_ms, _ in due if at_ms > now_ms)])
    return tuple(found), next_ms


def _dues(model: ModelView) -> list[tuple[float, Tier]]:
    """When it goes where, the deepest last."""
    rules = model.rules
    rest = Tier.WARM if rules.rest is Tier.OFFLOADED and not model.has_copy else rules.rest
    keep_alive_ms = rules.keep_alive_ms if model.keep_alive_ms is None else model.keep_alive_ms
    match model.state:
        case ModelState.AWAKE if not model.in_flight and rest is not Tier.AWAKE:
            awake_ms = (model.awake_since_ms or 0.0) + rules.min_runtime_ms
            return [(max(quiet_since_ms(model) + keep_alive_ms, awake_ms), rest)]
        case ModelState.WARM | ModelState.OFFLOADED:
            asleep_ms = model.asleep_since_ms or 0.0
            rest_ms = max(asleep_ms, model.last_request_ms + keep_alive_ms)
            due = []
            if model.state is ModelState.WARM and model.has_copy:
                if rest is Tier.OFFLOADED:
                    due.append((rest_ms, Tier.OFFLOADED))
                if rules.offload_after_ms is not None:
                    due.append((asleep_ms + rules.offload_after_ms, Tier.OFFLOADED))
            if rest is Tier.COLD:
                due.append((rest_ms, Tier.COLD))
            if rules.unload_after_ms is not None:
                due.append((asleep_ms + rules.unload_after_ms, Tier.COLD))
            return due
        case _:
            return []
