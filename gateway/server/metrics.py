"""The metrics of a gateway, made at each scrape from what `Accounts` has counted, so the hot path
pays for no label. Every known label is exported as zero from the first scrape.

The gateway imports this module once it accepts: Prometheus's library is an eighth of a start.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from gateway.core.events import BreakCause, Ending
from gateway.core.fleet import LOSSES, MOVES, Fleet
from gateway.core.pods import Choice, PodState
from gateway.server.accounts import LIMITS, POOL_LIMITS, HistogramTally, PoolOutcome
from gateway.server.endpoints import counts_of
from gateway.server.exchange import GatewayExchange
from gateway.server.links import GatewayEngineLink, GatewayLockLink, GatewayPoolLink
from plumbing.gateway_protocol import Continuation
from plumbing.pod.messages import Tier
from plumbing.service.metrics import PREFIX, Metrics


@dataclass(frozen=True)
class _Collected(Collector):
    exchange: GatewayExchange
    is_ready: Callable[[], bool]

    def registered(self) -> Metrics:
        metrics = Metrics()
        metrics.registry.register(self)
        return metrics

    def limits(self) -> Iterable[str]:
        return LIMITS

    def collect(self) -> Iterator[Metric]:
        accounts, load = self.exchange.accounts, self.exchange.load()
        text = "Tokens sent to clients, each counted once."
        yield _counter("delivered_tokens", text, accounts.tokens)
        text = "Tokens sent to engines to resume requests; clients already had them."
        yield _counter("replayed_tokens", text, accounts.replayed_tokens)
        text = "Streams that were resumed after an interruption."
        yield _counter("resumes", text, accounts.resumed)
        text = "Streams that can no longer be continued, for lack of memory."
        yield _counter("continuations_lost", text, accounts.continuations_lost)
        yield _gauge("in_flight_requests", "Requests in the gateway.", load.in_flight)
        text = "Requests that wait for an engine and have no answer yet."
        yield _gauge("waiting_requests", text, load.waiting)
        yield _gauge("parked_requests", "Streams that wait to be resumed.", load.parked)
        text = "How long the oldest parked stream has waited."
        yield _gauge("parked_oldest_seconds", text, load.parked_oldest_ms / 1000)
        text = "Streams that an engine is replaying, up to where their clients are."
        yield _gauge("replaying_requests", text, load.replaying)
        text = "Requests in flight at two engine deaths without progress between."
        yield _gauge("suspect_requests", text, load.suspects)
        yield _gauge("connections", "Connections of clients.", load.connections)
        text = "Memory of journals, bodies and held answers."
        yield _gauge("held_bytes", text, load.memory_bytes)
        text = "Limit of that memory; requests above it cannot be continued."
        yield _gauge("held_bytes_max", text, self.exchange.memory_bytes_max)
        text = "1 while connections are accepted."
        yield _gauge("accepting", text, self.exchange.is_accepting)
        yield _gauge("ready", "1 while /ready is 200.", self.is_ready())
        text = "Streams that were interrupted and waited for an engine, by cause."
        yield _by(accounts.paused, "pauses", text, "cause", map(str, BreakCause))
        yield _counters(
            _name("requests"),
            "Requests by how they ended, and by what a failover would have done to them.",
            {"outcome": map(str, Ending), "continuation": map(str, Continuation)},
            {(ending, str(each)): count for (ending, each), count in accounts.requests.items()},
        )
        text = "Number of times a limit was reached, by limit."
        yield _by(accounts.limits, "limit_hits", text, "limit", self.limits())
        text = "How long streams paused, from the break to the first new token."
        yield _histogram("pause_seconds", text, accounts.pauses)
        text = "Time from a request, read whole, to its first byte sent to an engine that was free."
        yield _histogram("added_seconds", text, accounts.added)


@dataclass(frozen=True)
class OfGateway(_Collected):
    """What is scraped of a gateway."""

    lock: GatewayLockLink
    engine: GatewayEngineLink
    pool: GatewayPoolLink

    def limits(self) -> Iterable[str]:
        return (*LIMITS, *POOL_LIMITS) if self.pool.models else LIMITS

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        text, goals = "1 while the lock server is connected.", self.engine.goals
        yield _gauge("lock_server_connected", text, self.lock.is_served)
        text = "1 while requests wait because the engine that holds the lock sleeps."
        yield _gauge("engine_resting", text, self.engine.core.door is not None)
        text = "Times that the gateway put an engine to sleep because no request came."
        yield _counter("sleeps", text, goals[Tier.WARM])
        text = "Times that the gateway woke an engine for a request."
        yield _counter("wakes", text, goals[Tier.AWAKE])
        text = "Time from a wake that the gateway requested until the engine is active."
        yield _histogram("wake_seconds", text, self.engine.wakes)
        if self.pool.models:
            yield from of_models(self.exchange, self.pool)


@dataclass(frozen=True)
class OfFront(_Collected):
    """What is scraped of a front."""

    fleet: Fleet

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        fleet = self.fleet
        text = "Pods that this front knows, by state."
        family = GaugeMetricFamily(_name("pods"), text, labels=["state"])
        states = Counter(map(fleet.state, fleet.pods.values()))
        for state in PodState:
            family.add_metric([state], states[state])
        yield family
        text = "Pods whose streams all broke off: gone, restarted, or silent for a minute."
        yield _by(fleet.losses, "pod_losses", text, "cause", LOSSES)
        text = "Streams that went on at another pod, by cause."
        yield _by(fleet.moves, "moves", text, "cause", MOVES)
        text = "Replays at another pod that were not what the client had, and were not sent."
        differed = self.exchange.accounts.replays_differed
        yield _counter("replays_differed", text, differed)
        text = "Requests by why they got their pod: first by prefix, load bound, less load."
        yield _by(fleet.choices, "choices", text, "by", Choice)


def _by(
    counts: Mapping[Any, int], name: str, text: str, label: str, known: Iterable[str]
) -> CounterMetricFamily:
    found: dict[tuple[str, ...], int] = {(str(each),): count for each, count in counts.items()}
    return _counters(_name(name), text, {label: map(str, known)}, found)


def of_models(exchange: GatewayExchange, pool: GatewayPoolLink) -> Iterator[Metric]:
    """Of a pool: what there is for each model, and what has become of its requests, by the names of
    the pool's metrics."""
    text = "Requests for each model of a pool: in its engine, waiting, parked."
    family = GaugeMetricFamily(_name("model_requests"), text, labels=["model", "state"])
    for model, demand in exchange.demand().items():
        for state, count in counts_of(demand).items():
            family.add_metric([model, state], count)
    yield family
    counts = exchange.accounts.models
    yield _counters(
        f"{PREFIX}_pool_requests",
        "Requests for each model of a pool, by outcome.",
        {"model": pool.models, "outcome": map(str, PoolOutcome)},
        {(model, str(outcome)): count for (model, outcome), count in counts.items()},
    )
    text = "1 while the gateway is connected to the pool; without it nothing switches."
    is_connected = pool.outage is None
    yield _gauge("pool_connected", text, is_connected)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_name(name), text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(_name(name), text, value=value)


def _counters(
    name: str,
    text: str,
    labels: Mapping[str, Iterable[str]],
    counts: Mapping[tuple[str, ...], int],
) -> CounterMetricFamily:
    """`labels`: their known values, which are there from the first scrape on."""
    family = CounterMetricFamily(name, text, labels=list(labels))
    known = dict.fromkeys(itertools.product(*labels.values()), 0)
    for key, count in (known | dict(counts)).items():
        family.add_metric(list(key), count)
    return family


def _histogram(name: str, text: str, found: HistogramTally) -> HistogramMetricFamily:
    bounds = [*(str(float(bound)) for bound in found.bounds_s), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(found.counts), strict=True))
    return HistogramMetricFamily(_name(name), text, buckets=buckets, sum_value=found.sum_s)


def _name(name: str) -> str:
    return f"{PREFIX}_gateway_{name}"
