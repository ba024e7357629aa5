"""The metrics of a gateway, made at each scrape from what `Accounts` has counted, so the hot path
pays for no label. Every known label is exported as zero from the first scrape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.core.events import BreakCause, Ending
from gateway.core.fleet import LOSSES, MOVES, Fleet
from gateway.core.pods import Choice, PodState
from gateway.server.accounts import LIMITS, POOL_LIMITS, PoolOutcome
from gateway.server.endpoints import counts_of
from gateway.server.exchange import GatewayExchange
from gateway.server.links import GatewayEngineLink, GatewayLockLink, GatewayPoolLink
from plumbing.gateway_protocol import Continuation
from plumbing.pod.messages import Tier
from plumbing.service.metrics import Labels, Metric, Metrics, Tally, Value


@dataclass(frozen=True)
class _GatewayMetrics:
    page: Metrics
    exchange: GatewayExchange
    is_ready: Callable[[], bool]

    def limits(self) -> Iterable[str]:
        return LIMITS

    def refresh(self) -> None:
        """Bring the page up to date."""
        accounts, load = self.exchange.accounts, self.exchange.load()
        text = "Tokens sent to clients, each counted once."
        self.count("delivered_tokens_total", text, accounts.tokens)
        text = "Tokens sent to engines to resume requests; clients already had them."
        self.count("replayed_tokens_total", text, accounts.replayed_tokens)
        text = "Streams that were resumed after an interruption."
        self.count("resumes_total", text, accounts.resumed)
        text = "Streams that can no longer be continued, for lack of memory."
        self.count("continuations_lost_total", text, accounts.continuations_lost)
        self.show("in_flight_requests", "Requests in the gateway.", load.in_flight)
        text = "Requests that wait for an engine and have no answer yet."
        self.show("waiting_requests", text, load.waiting)
        self.show("parked_requests", "Streams that wait to be resumed.", load.parked)
        text = "How long the oldest parked stream has waited."
        self.show("parked_oldest_seconds", text, load.parked_oldest_ms / 1000)
        text = "Streams that an engine is replaying, up to where their clients are."
        self.show("replaying_requests", text, load.replaying)
        text = "Requests in flight at two engine deaths without progress between."
        self.show("suspect_requests", text, load.suspects)
        self.show("connections", "Connections of clients.", load.connections)
        text = "Memory of journals, bodies and held answers."
        self.show("held_bytes", text, load.memory_bytes)
        text = "Limit of that memory; requests above it cannot be continued."
        self.show("held_bytes_max", text, self.exchange.memory_bytes_max)
        text = "1 while connections are accepted."
        self.show("accepting", text, self.exchange.is_accepting)
        self.show("ready", "1 while /ready is 200.", self.is_ready())
        text = "Streams that were interrupted and waited for an engine, by cause."
        self.by(accounts.paused, "pauses_total", text, "cause", BreakCause)
        text = "Requests by how they ended, and by what a failover would have done to them."
        known = {"outcome": [str(each) for each in Ending], "continuation": CONTINUATIONS}
        requests = self.counter("requests_total", text, known)
        for (ending, continuation), count in accounts.requests.items():
            requests.labels(outcome=ending, continuation=str(continuation)).set(count)
        text = "Number of times a limit was reached, by limit."
        self.by(accounts.limits, "limit_hits_total", text, "limit", self.limits())
        text = "How long streams paused: from the break to the first new token, or to the end."
        self.histogram("pause_seconds", text, accounts.pauses)
        text = "Time from a request, read whole, to its first byte sent to an engine that was free."
        self.histogram("added_seconds", text, accounts.added)

    def show(self, name: str, text: str, value: float) -> None:
        self.page.gauge(f"gateway_{name}", text).labels().set(value)

    def count(self, name: str, text: str, value: float) -> None:
        self.counter(name, text).labels().set(value)

    def counter(self, name: str, text: str, labels: Labels = ()) -> Metric[Value]:
        return self.page.counter(f"gateway_{name}", text, labels)

    def by(
        self, counts: Mapping[Any, int], name: str, text: str, label: str, known: Iterable[str]
    ) -> None:
        counter = self.counter(name, text, {label: [str(each) for each in known]})
        for each, count in counts.items():
            counter.labels(**{label: str(each)}).set(count)

    def histogram(self, name: str, text: str, found: Tally) -> None:
        self.page.histogram(f"gateway_{name}", text, make=lambda: found)


CONTINUATIONS = tuple(map(str, Continuation))


@dataclass(frozen=True)
class OfGateway(_GatewayMetrics):
    """What is scraped of a gateway."""

    lock: GatewayLockLink
    engine: GatewayEngineLink
    pool: GatewayPoolLink

    def limits(self) -> Iterable[str]:
        return (*LIMITS, *POOL_LIMITS) if self.pool.models else LIMITS

    def refresh(self) -> None:
        super().refresh()
        text, goals = "1 while the lock server is connected.", self.engine.goals
        self.show("lock_server_connected", text, self.lock.is_served)
        text = "1 while requests wait because the engine that holds the lock sleeps."
        self.show("engine_resting", text, self.engine.core.door is not None)
        text = "Times that the gateway put an engine to sleep because no request came."
        self.count("sleeps_total", text, goals[Tier.WARM])
        text = "Times that the gateway woke an engine for a request."
        self.count("wakes_total", text, goals[Tier.AWAKE])
        text = "Time from a wake that the gateway requested until the engine is active."
        self.histogram("wake_seconds", text, self.engine.wakes)
        if self.pool.models:
            show_models(self.page, self.exchange, self.pool)


@dataclass(frozen=True)
class OfFront(_GatewayMetrics):
    """What is scraped of a front."""

    fleet: Fleet

    def refresh(self) -> None:
        super().refresh()
        fleet = self.fleet
        text = "Pods that this front knows, by state."
        pods = self.page.gauge("gateway_pods", text, {"state": [str(each) for each in PodState]})
        for state, count in Counter(map(fleet.state, fleet.pods.values())).items():
            pods.labels(state=str(state)).set(count)
        text = "Pods whose streams all broke off: gone, restarted, or silent for a minute."
        self.by(fleet.losses, "pod_losses_total", text, "cause", LOSSES)
        text = "Streams that went on at another pod, by cause."
        self.by(fleet.moves, "moves_total", text, "cause", MOVES)
        text = "Replays at another pod that were not what the client had, and were not sent."
        self.count("replays_differed_total", text, self.exchange.accounts.told["replay_differed"])
        text = "Requests by why they got their pod: first by prefix, load bound, less load."
        self.by(fleet.choices, "choices_total", text, "by", Choice)


def show_models(page: Metrics, exchange: GatewayExchange, pool: GatewayPoolLink) -> None:
    """Of a pool: what there is for each model, and what has become of its requests, by the names of
    the pool's metrics."""
    text = "Requests for each model of a pool: in its engine, waiting, parked."
    requests = page.gauge("gateway_model_requests", text, ("model", "state"))
    for model, demand in exchange.demand().items():
        for state, count in counts_of(demand).items():
            requests.labels(model=model, state=state).set(count)
    text = "Requests for each model of a pool, by outcome."
    known = {"model": tuple(pool.models), "outcome": [str(each) for each in PoolOutcome]}
    outcomes = page.counter("pool_requests_total", text, known)
    for (model, outcome), count in exchange.accounts.models.items():
        outcomes.labels(model=model, outcome=str(outcome)).set(count)
    text = "1 while the gateway is connected to the pool; without it nothing switches."
    page.gauge("gateway_pool_connected", text).labels().set(pool.outage is None)
