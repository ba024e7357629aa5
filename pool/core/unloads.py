"""When a head waits rather than have models unloaded.

Who is unloaded has to load again: half a second with the smallest model, half a minute with vLLM.
An awake model that was asked a moment ago is idle within `IDLE_MS_MAX`, and then has room to give.

The surprising thing: a head waits for that only in its own first `IDLE_MS_MAX`, however often
models are asked anew meanwhile. So this wait passes with `max_wait`, and no head before it adds
another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from plumbing.part.tier import Tier
from pool.core.states import ModelState
from pool.core.victims import IDLE_MS_MAX, Candidate, Head, candidates, choose
from pool.core.view import ModelView, PoolRules, Victim


def unloaded(chosen: Iterable[Victim], models: Iterable[ModelView]) -> tuple[str, ...]:
    """Who of them would have to load again. A load that is broken off was for nobody."""
    loading = {model.name for model in models if model.state is ModelState.LOADING}
    return tuple(
        victim.model
        for victim in chosen
        if victim.tier is Tier.COLD and not victim.is_shadow and victim.model not in loading
    )


def choose_idle_soon(
    head: Head,
    short: Mapping[str, int],
    models: Collection[ModelView],
    found: Iterable[Candidate],
    unloads: int,
    now_ms: float,
    rules: PoolRules,
) -> tuple[float, dict[Victim, Sequence[int]]] | None:
    """From when an awake model is idle, so that fewer than `unloads` models are unloaded, and whom
    to ask then."""
    last_ms = head.ticket.since_ms + IDLE_MS_MAX
    for at_ms in sorted({each.idle_ms for each in found if now_ms < each.idle_ms <= last_ms}):
        then = candidates(head, short, models, at_ms, rules)
        chosen = choose([each for each in then if each.ready_ms <= at_ms], short)
        if len(unloaded(chosen, models)) < unloads:
            return at_ms, chosen
    return None
