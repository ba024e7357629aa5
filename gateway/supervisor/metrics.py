"""The gateway's metrics, made at each scrape from what its children have counted.

prometheus_client's counters cannot take over what another process has counted, so these are
families of a collector. Every known label is exported as zero from the first scrape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from gateway.core.events import Ending
from gateway.messages import (
    ADDED_BUCKETS_S,
    LIMITS,
    PAUSE_BUCKETS_S,
    POOL_LIMITS,
    Distribution,
    GatewayTotals,
    PoolOutcome,
)
from gateway.supervisor import report
from gateway.supervisor.engine_side import WAKE_BUCKETS_S
from gateway.supervisor.parts import GatewayParts
from plumbing.gateway_protocol import Continuation
from plumbing.pod.messages import Tier
from plumbing.service.metrics import PREFIX, Metrics

COUNTERS = {
    "delivered_tokens": "Tokens that clients were sent, each once.",
    "replayed_tokens": "Tokens that engines were given to resume requests; clients had them.",
    "pauses": "Streams that were interrupted, and waited to be resumed.",
    "resumes": "Streams that went on after an interruption.",
    "continuations_lost": "Streams that can no longer be continued, for lack of memory.",
    "lost_requests": "Requests in flight in a process of the gateway that died.",
    "child_restarts": "Processes of the gateway that died and were replaced.",
    "sleeps": "Engines that the gateway has let rest, since there was no request.",
    "wakes": "Engines that the gateway has woken for a request.",
}
GAUGES = {
    "in_flight_requests": "Requests in the gateway.",
    "waiting_requests": "Requests that wait for an engine, nothing of them answered.",
    "parked_requests": "Streams that wait to be resumed.",
    "parked_oldest_seconds": "How long the oldest of them has waited.",
    "replaying_requests": "Streams that an engine plays again, up to where their clients are.",
    "suspect_requests": "Requests that were in an engine at two deaths without progress.",
    "connections": "Connections of clients.",
    "held_bytes": "Memory of journals, bodies and held answers.",
    "held_bytes_max": "The limit of it, above which requests cannot be continued.",
    "accepting": "1 while connections are accepted.",
    "ready": "1 while /ready is 200.",
    "spare_ready": "1 while a process is ready to take over.",
    "lock_server_connected": "1 while the lock server is connected.",
    "engine_resting": "1 while requests wait, since the engine that holds the lock rests.",
}


class GatewayMetrics:
    """`metrics` is what is scraped."""

    def __init__(self, gateway: GatewayParts) -> None:
        self.metrics = Metrics()
        self.metrics.registry.register(_Children(gateway))


class _Children(Collector):
    def __init__(self, gateway: GatewayParts) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        nursery = self._gateway.nursery
        totals = nursery.counted()
        counts = {
            "delivered_tokens": totals.tokens,
            "replayed_tokens": totals.replayed_tokens,
            "pauses": totals.pauses,
            "resumes": totals.resumes,
            "continuations_lost": totals.continuations_lost,
            "lost_requests": nursery.lost_requests,
            "child_restarts": nursery.core.restarts.deaths_total,
            "sleeps": self._gateway.engine.goals[Tier.WARM],
            "wakes": self._gateway.engine.goals[Tier.AWAKE],
        }
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(_name(name), text, value=counts[name])
        values = report.gauges(self._gateway)
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(_name(name), text, value=values[name])
        yield _requests(totals)
        if self._gateway.pool.models:
            yield _models(report.by_model(self._gateway))
            yield from _pool(self._gateway, totals)
        limits = CounterMetricFamily(
            _name("limit_hits"), "Number of times a limit was reached, by limit.", labels=["limit"]
        )
        names = (*LIMITS, *(POOL_LIMITS if self._gateway.pool.models else ()))
        known = dict.fromkeys(names, 0)
        for limit, count in sorted((known | dict(totals.limits)).items()):
            limits.add_metric([limit], count)
        yield limits
        text = "How long streams paused, from the break to the first new token."
        yield _histogram("pause_seconds", text, PAUSE_BUCKETS_S, totals.pause_s)
        text = "Time from a request, read whole, to its first byte sent to an engine that was free."
        yield _histogram("added_seconds", text, ADDED_BUCKETS_S, totals.added_s)
        text = "Time from a wake that the gateway asked for until the engine is active."
        wakes = self._gateway.engine.wakes.so_far()
        yield _histogram("wake_seconds", text, WAKE_BUCKETS_S, wakes)


def _models(found: Mapping[str, Mapping[str, int]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        _name("model_requests"),
        "Requests for each model of a pool: in its engine, waiting, parked.",
        labels=["model", "state"],
    )
    for model, counts in found.items():
        for state, count in counts.items():
            family.add_metric([model, state], count)
    return family


def _pool(gateway: GatewayParts, totals: GatewayTotals) -> Iterator[Metric]:
    """What has become of each model's requests, by the names of the pool's metrics."""
    side = gateway.pool
    zeros = itertools.product(side.models, PoolOutcome)
    counts = dict.fromkeys(zeros, 0)
    counts |= {(each.model, each.outcome): each.count for each in totals.models}
    family = CounterMetricFamily(
        f"{PREFIX}_pool_requests",
        "Requests for each model of a pool, by what has become of them.",
        labels=["model", "outcome"],
    )
    for (model, outcome), count in counts.items():
        lost = side.lost[model] if outcome is PoolOutcome.LOST else 0
        family.add_metric([model, outcome.value], count + lost)
    yield family
    text = "1 while the gateway is connected to the pool; without it nothing switches."
    yield GaugeMetricFamily(_name("pool_connected"), text, value=side.problem is None)


def _requests(totals: GatewayTotals) -> CounterMetricFamily:
    counted = {(each.ending, str(each.continuation)): each.count for each in totals.requests}
    zeros = itertools.product(map(str, Ending), map(str, Continuation))
    family = CounterMetricFamily(
        _name("requests"),
        "Requests by how they ended, and by what a failover would have done to them.",
        labels=["outcome", "continuation"],
    )
    for key, count in (dict.fromkeys(zeros, 0) | counted).items():
        family.add_metric(list(key), count)
    return family


def _histogram(
    name: str, text: str, bounds_s: tuple[float, ...], found: Distribution
) -> HistogramMetricFamily:
    bounds = [*(str(float(bound)) for bound in bounds_s), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(found.counts), strict=True))
    return HistogramMetricFamily(_name(name), text, buckets=buckets, sum_value=found.sum_s)


def _name(name: str) -> str:
    return f"{PREFIX}_gateway_{name}"
