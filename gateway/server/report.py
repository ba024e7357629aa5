"""The status document, the probes, the gauges and the metrics of a gateway. It only reads.

Metrics are made at each scrape from what `Accounts` has counted, so the hot path pays for no label.
Every known label is exported as zero from the first scrape.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from gateway import schema as doc
from gateway.core.events import Ending
from gateway.server.accounts import (
    ADDED_BUCKETS_S,
    LIMITS,
    PAUSE_BUCKETS_S,
    POOL_LIMITS,
    Distribution,
    GatewayTotals,
    PoolOutcome,
)
from gateway.server.client_listener import ClientListener
from gateway.server.links import WAKE_BUCKETS_S, GatewayEngineLink, GatewayLockLink, GatewayPoolLink
from gateway.server.settings import MANUAL, ON_REQUEST, GatewaySettings
from plumbing.gateway_protocol import Continuation
from plumbing.pod.messages import Tier
from plumbing.service.clock import Clock, moment
from plumbing.service.events import EventLog
from plumbing.service.http import Probe
from plumbing.service.metrics import PREFIX, Metrics
from plumbing.service.notify import restarts
from plumbing.text import duration
from pool.core.events import ModelDemand, ShutDoor, TicketKind


@dataclass
class GatewayParts:
    """One gateway, as its status sees it. `accepting_ms`: since when; `predecessor`: the pid of the
    gateway that this one replaces, while that lives; `troubles`: what its own servers cannot do."""

    settings: GatewaySettings
    clock: Clock
    log: EventLog
    listener: ClientListener
    lock: GatewayLockLink
    engine: GatewayEngineLink
    pool: GatewayPoolLink
    is_stopping: bool = False
    accepting_ms: float = 0.0
    predecessor: int | None = None
    troubles: list[Callable[[], str | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started_ms = self.clock.now_ms()


SCHEMA = 1
UNHEARD_MS = 5_000.0  # a supervisor that is restarted listens again in less


def document(gateway: GatewayParts) -> dict[str, Any]:
    """The status document, the same for the CLI, `/status` and observers."""
    found: dict[str, Any] = msgspec.to_builtins(status(gateway))
    return found


def status(gateway: GatewayParts) -> doc.GatewayStatus:
    listener, lock, settings = gateway.listener, gateway.lock, gateway.settings
    upstream = listener.upstream()
    return doc.GatewayStatus(
        schema=SCHEMA,
        online=True,
        pid=os.getpid(),
        restarts=restarts(),
        dir=settings.directory,
        accepting=listener.is_accepting,
        problems=problems(gateway),
        **gateway.log.newest(),
        **moment(gateway.started_ms, gateway.clock),
        stopping=gateway.is_stopping or lock.is_final,
        stop=doc.GatewayStop(
            settings.drain_ms, None if upstream is None else upstream.continuation
        ),
        accepting_since=_since(gateway, gateway.accepting_ms) if listener.is_accepting else None,
        service=doc.GatewayService(lock.lock, lock.address or None, bool(settings.tls_cert)),
        predecessor=gateway.predecessor,
        upstream=upstream,
        lock_server=doc.GatewayLockServer(
            lock.is_served, _since(gateway, lock.changed_ms), lock.problem
        ),
        grant=_grant(gateway),
        idle=None
        if lock.idle is None
        else doc.GatewayIdle(lock.idle, **moment(lock.idle_ms, gateway.clock)),
        rest=_rest(gateway),
        pool=_pool(gateway),
        load=listener.load(),
        memory_bytes_max=listener.memory_bytes_max,
        totals=_totals(gateway),
    )


def _since(gateway: GatewayParts, at_ms: float) -> str:
    return str(moment(at_ms, gateway.clock)["since"])


def problems(gateway: GatewayParts) -> list[str]:
    """One sentence for each thing that does not work now."""
    lock = gateway.lock
    found: list[str | None] = []
    if lock.problem is not None:
        meanwhile = "requests are served, a takeover waits" if lock.grant else "nothing is served"
        found.append(f"{lock.problem}; {meanwhile}")
    elif not lock.address:
        found.append("the lock server has lent no socket yet; see `lockserver status`")
    found.append(gateway.listener.problem)
    found.append(gateway.pool.problem)
    found += [_unheard(gateway), *(look() for look in gateway.troubles)]
    return [each for each in found if each]


def gauges(gateway: GatewayParts) -> dict[str, float]:
    """By the names of `GAUGES`."""
    found = gateway.listener.load()
    return {
        "in_flight_requests": found.in_flight,
        "waiting_requests": found.waiting,
        "parked_requests": found.parked,
        "parked_oldest_seconds": found.parked_oldest_ms / 1000,
        "replaying_requests": found.replaying,
        "suspect_requests": found.suspects,
        "connections": found.connections,
        "held_bytes": found.memory_bytes,
        "held_bytes_max": gateway.listener.memory_bytes_max,
        "accepting": gateway.listener.is_accepting,
        "ready": ready(gateway).ok,
        "lock_server_connected": gateway.lock.is_served,
        "engine_resting": gateway.engine.core.door.is_shut,
    }


def by_model(gateway: GatewayParts) -> dict[str, dict[str, int]]:
    """How many requests there are for each model of a pool, and how far they are."""
    demand = gateway.listener.demand()
    return {model: _counts(each) for model, each in demand.items()}


def _counts(demand: ModelDemand) -> dict[str, int]:
    parked = sum(each.kind is TicketKind.PARKED for each in demand.tickets)
    waiting = len(demand.tickets) - parked
    return {"in_flight": demand.in_flight, "waiting": waiting, "parked": parked}


# -------------------------------------------------------------------------------------- probes


def probes(gateway: GatewayParts) -> Mapping[str, Callable[[], Probe]]:
    return {
        "live": lambda: Probe(True, "running"),
        "startup": lambda: Probe(True, "started"),
        "ready": lambda: ready(gateway),
    }


def ready(gateway: GatewayParts) -> Probe:
    """It accepts, and a request would be answered: an engine serves, one soon will, or one rests
    that a request wakes."""
    lock = gateway.lock
    if gateway.is_stopping or lock.is_final:
        return Probe(False, "stopping")
    if not gateway.listener.is_accepting:
        return Probe(False, "not_accepting", {"problems": problems(gateway)})
    if gateway.pool.models:
        return _pool_ready(gateway)
    if lock.grant is None:
        return Probe(False, "no_engine", {"why": lock.idle or "no engine was active yet"})
    details = {"engine": lock.grant.engine, "token": lock.grant.token}
    door = gateway.engine.core.door
    if lock.idle is None and door.is_shut:
        return Probe(door.does_open, "resting", {**details, "why": door.reason})
    if lock.idle is None:
        return Probe(True, "engine_active", details)
    idle_ms = gateway.clock.now_ms() - lock.idle_ms
    if idle_ms < gateway.settings.hold_ms:
        return Probe(True, "takeover", {"why": lock.idle})
    return Probe(False, "no_engine", {"why": lock.idle, "for": duration(idle_ms)})


def _pool_ready(gateway: GatewayParts) -> Probe:
    """A request for any model would be answered, or raises its model; a model alone that has failed
    takes no others out of service."""
    pool = gateway.pool
    if pool.said:
        return Probe(True, "pool", {"problem": pool.problem})
    if gateway.lock.model_grants:
        return Probe(True, "engine_active", {"problem": pool.problem})
    return Probe(False, "no_engine", {"why": pool.problem})


# -------------------------------------------------------------------------------------- parts


def _grant(gateway: GatewayParts) -> doc.GatewayGrant | None:
    grant = gateway.lock.grant
    if grant is None:
        return None
    since = moment(grant.since_ms, gateway.clock)
    return doc.GatewayGrant(grant.engine, grant.token, grant.era, **since)


def _rest(gateway: GatewayParts) -> doc.GatewayRest:
    """What the engine that holds the lock says of itself, and what the gateway makes of it."""
    side, rules = gateway.engine, gateway.settings.rest
    return doc.GatewayRest(
        sleep_after_ms=round(rules.keep_alive_ms),
        wake=ON_REQUEST if rules.wakes_on_request else MANUAL,
        door="shut" if side.core.door.is_shut else "open",
        quiet_ms=round(side.quiet_ms),
        sleeps_total=side.goals[Tier.WARM],
        wakes_total=side.goals[Tier.AWAKE],
        engine=_said(gateway),
        problem=side.problem,
    )


def _said(gateway: GatewayParts) -> doc.GatewayEngine | None:
    said = gateway.engine.said
    if said is None:
        return None
    return doc.GatewayEngine(
        state=said.state,
        **moment(gateway.engine.said_ms - said.since_ms, gateway.clock),
        tier=said.tier,
        goal=said.goal,
        goal_by=said.goal_by or None,
        can_rest=said.can_rest,
        fault=said.fault or None,
    )


def _pool(gateway: GatewayParts) -> doc.GatewayPool | None:
    """What the pool says of its models, and what there is for them; None without a pool file."""
    side = gateway.pool
    if not side.models:
        return None
    demand = gateway.listener.demand()
    return doc.GatewayPool(
        connected=side.is_connected,
        **moment(side.changed_ms, gateway.clock),
        problem=side.problem,
        models={model: _model(gateway, model, demand[model]) for model in side.models},
    )


def _model(gateway: GatewayParts, model: str, demand: ModelDemand) -> doc.GatewayModel:
    said, grant = gateway.pool.said.get(model), gateway.lock.model_grants.get(model)
    models = gateway.listener.models
    door = None if models is None else models.lanes.by_model[model].door
    return doc.GatewayModel(
        state=None if said is None else said.state,
        reason="" if said is None else said.reason,
        door=None if door is None else str(type(door).__struct_config__.tag),
        running=door.running if isinstance(door, ShutDoor) else None,
        obeyed=door is not None and demand.door != 0,
        engine=None if grant is None else grant.engine,
        token=None if grant is None else grant.token,
        cannot_park=demand.cannot_park,
        **_counts(demand),
    )


def _unheard(gateway: GatewayParts) -> str | None:
    """A takeover loses the engine for a moment; longer is a problem."""
    side = gateway.engine
    if gateway.lock.idle is not None or side.unheard_ms is None:
        return None
    if gateway.clock.now_ms() - side.unheard_ms < UNHEARD_MS:
        return None
    engine = side.core.engine
    return (
        f"{engine} does not report its state, so the gateway cannot put it to sleep or wake it: "
        f"{side.problem}"
    )


def _totals(gateway: GatewayParts) -> doc.GatewayTotal:
    totals = gateway.listener.accounts.totals()
    return doc.GatewayTotal(
        requests=list(totals.requests),
        tokens=totals.tokens,
        replayed_tokens=totals.replayed_tokens,
        pauses=totals.pauses,
        pause_ms=round(totals.pause_s.sum_s * 1000, 1),
        resumes=totals.resumes,
        continuations_lost=totals.continuations_lost,
        limits=dict(totals.limits),
    )


COUNTERS = {
    "delivered_tokens": "Tokens sent to clients, each counted once.",
    "replayed_tokens": "Tokens sent to engines to resume requests; clients already had them.",
    "pauses": "Streams that were interrupted and waited for an engine.",
    "resumes": "Streams that were resumed after an interruption.",
    "continuations_lost": "Streams that can no longer be continued, for lack of memory.",
    "sleeps": "Times that the gateway put an engine to sleep because no request came.",
    "wakes": "Times that the gateway woke an engine for a request.",
}
GAUGES = {
    "in_flight_requests": "Requests in the gateway.",
    "waiting_requests": "Requests that wait for an engine and have no answer yet.",
    "parked_requests": "Streams that wait to be resumed.",
    "parked_oldest_seconds": "How long the oldest parked stream has waited.",
    "replaying_requests": "Streams that an engine is replaying, up to where their clients are.",
    "suspect_requests": "Requests in flight at two engine deaths without progress between.",
    "connections": "Connections of clients.",
    "held_bytes": "Memory of journals, bodies and held answers.",
    "held_bytes_max": "Limit of that memory; requests above it cannot be continued.",
    "accepting": "1 while connections are accepted.",
    "ready": "1 while /ready is 200.",
    "lock_server_connected": "1 while the lock server is connected.",
    "engine_resting": "1 while requests wait because the engine that holds the lock sleeps.",
}


def metrics_of(gateway: GatewayParts) -> Metrics:
    """What is scraped."""
    metrics = Metrics()
    metrics.registry.register(_Collected(gateway))
    return metrics


class _Collected(Collector):
    def __init__(self, gateway: GatewayParts) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        totals = self._gateway.listener.accounts.totals()
        counts = {
            "delivered_tokens": totals.tokens,
            "replayed_tokens": totals.replayed_tokens,
            "pauses": totals.pauses,
            "resumes": totals.resumes,
            "continuations_lost": totals.continuations_lost,
            "sleeps": self._gateway.engine.goals[Tier.WARM],
            "wakes": self._gateway.engine.goals[Tier.AWAKE],
        }
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(_name(name), text, value=counts[name])
        values = gauges(self._gateway)
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(_name(name), text, value=values[name])
        yield _requests(totals)
        if self._gateway.pool.models:
            yield _model_metrics(by_model(self._gateway))
            yield from _pool_metrics(self._gateway, totals)
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
        text = "Time from a wake that the gateway requested until the engine is active."
        wakes = self._gateway.engine.wakes.so_far()
        yield _histogram("wake_seconds", text, WAKE_BUCKETS_S, wakes)


def _model_metrics(found: Mapping[str, Mapping[str, int]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        _name("model_requests"),
        "Requests for each model of a pool: in its engine, waiting, parked.",
        labels=["model", "state"],
    )
    for model, counts in found.items():
        for state, count in counts.items():
            family.add_metric([model, state], count)
    return family


def _pool_metrics(gateway: GatewayParts, totals: GatewayTotals) -> Iterator[Metric]:
    """What has become of each model's requests, by the names of the pool's metrics."""
    side = gateway.pool
    zeros = itertools.product(side.models, PoolOutcome)
    counts = dict.fromkeys(zeros, 0)
    counts |= {(each.model, each.outcome): each.count for each in totals.models}
    family = CounterMetricFamily(
        f"{PREFIX}_pool_requests",
        "Requests for each model of a pool, by outcome.",
        labels=["model", "outcome"],
    )
    for (model, outcome), count in counts.items():
        family.add_metric([model, outcome.value], count)
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
