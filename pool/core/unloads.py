"""When a head waits rather than have models unloaded.

Who is unloaded has to load again: half a second with the smallest model, half a minute with vLLM.
An awake model that was asked a moment ago is idle within `IDLE_MS_MAX`, and then has room to give;
one that is at work may be idle by then, because most requests are short.

The surprising thing: a head waits for that only in its own first `IDLE_MS_MAX`, however often
models are asked anew meanwhile. So this wait passes with `max_wait`, and no head before it adds
another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from plumbing.pod.messages import Tier
from pool.core.states import ModelState
from pool.core.victims import IDLE_MS_MAX, Candidate, Head, candidates, choose, has_work
from pool.core.view import ModelView, PoolRules, Victim

_MAY_BE_IDLE_SOON = frozenset({ModelState.AWAKE, ModelState.WAKING})


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
    """Until when to wait, and whom to ask then, so that fewer than `unloads` models are unloaded:
    for an awake model that is idle at that time, else for those that are at work."""
    last_ms = head.ticket.since_ms + IDLE_MS_MAX
    if now_ms >= last_ms:
        return None
    for at_ms in sorted({each.idle_ms for each in found if now_ms < each.idle_ms <= last_ms}):
        chosen = _choose_at(at_ms, head, short, models, rules)
        if len(unloaded(chosen, models)) < unloads:
            return at_ms, chosen
    at_best = [_as_if_idle(model) for model in models]
    chosen = _choose_at(last_ms, head, short, at_best, rules)
    return (last_ms, chosen) if len(unloaded(chosen, models)) < unloads else None


def _choose_at(
    at_ms: float,
    head: Head,
    short: Mapping[str, int],
    models: Iterable[ModelView],
    rules: PoolRules,
) -> dict[Victim, Sequence[int]]:
    """Whom the head would ask then, of those who may be asked."""
    then = candidates(head, short, models, at_ms, rules)
    return choose([each for each in then if each.ready_ms <= at_ms], short)


def _as_if_idle(model: ModelView) -> ModelView:
    """As it is if its work has ended, and it has been quiet since."""
    if model.state not in _MAY_BE_IDLE_SOON or not has_work(model):
        return model
    return replace(
        model,
        state=ModelState.AWAKE,
        tier=Tier.AWAKE,
        awake_since_ms=None,
        last_request_ms=model.last_request_ms - IDLE_MS_MAX,
        in_flight=0,
        ticket=None,
    )
