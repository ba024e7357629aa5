"""The counts of all children of a gateway, ended ones included, so that no counter falls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gateway.messages import Distribution, GatewayTotals, ModelTotal, PoolOutcome, RequestTotal
from plumbing.gateway_protocol import Continuation


def add(parts: Iterable[GatewayTotals]) -> GatewayTotals:
    """The sum of `parts`."""
    found = list(parts)
    requests: Counter[tuple[str, Continuation]] = Counter()
    limits: Counter[str] = Counter()
    models: Counter[tuple[str, PoolOutcome]] = Counter()
    for each in found:
        limits.update(each.limits)
        for total in each.requests:
            requests[total.ending, total.continuation] += total.count
        for ended in each.models:
            models[ended.model, ended.outcome] += ended.count
    return GatewayTotals(
        requests=tuple(RequestTotal(*key, count) for key, count in sorted(requests.items())),
        tokens=sum(each.tokens for each in found),
        replayed_tokens=sum(each.replayed_tokens for each in found),
        pauses=sum(each.pauses for each in found),
        resumes=sum(each.resumes for each in found),
        continuations_lost=sum(each.continuations_lost for each in found),
        pause_s=_add_up(each.pause_s for each in found),
        added_s=_add_up(each.added_s for each in found),
        limits=dict(limits),
        models=tuple(ModelTotal(*key, count) for key, count in sorted(models.items())),
    )


def _add_up(parts: Iterable[Distribution]) -> Distribution:
    found = list(parts)
    columns = zip(*(each.counts for each in found), strict=True)
    return Distribution(tuple(map(sum, columns)), sum(each.sum_s for each in found))
