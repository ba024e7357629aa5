"""The status document and the probes of a gateway. It only reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway import schema as doc
from gateway.core.target import LaneTarget
from gateway.server.exchange import GatewayExchange
from gateway.server.links import GatewayEngineLink, GatewayLockLink, GatewayPoolLink
from gateway.server.settings import MANUAL, ON_REQUEST, GatewaySettings
from plumbing.service.clock import Clock, moment
from plumbing.service.events import EventLog
from plumbing.service.http import Probe
from plumbing.service.notify import restarts
from pool.core.events import ModelDemand, TicketKind


class GatewayParts:
    """One gateway, as its status sees it. `accepting_ms`: since when; `predecessor`: the pid of the
    gateway that this one replaces, while that lives; `troubles`: what its own servers cannot do."""

    settings: GatewaySettings
    clock: Clock
    log: EventLog
    exchange: GatewayExchange
    lock: GatewayLockLink
    engine: GatewayEngineLink
    pool: GatewayPoolLink
    started_ms: float
    accepting_ms = 0.0
    is_stopping = False
    predecessor: int | None = None
    troubles: Sequence[Callable[[], str | None]] = ()

    @property
    def target(self) -> LaneTarget | None:
        """What is known of the engine that requests go to; None in a pool."""
        lane = self.exchange.core.alone
        return None if lane is None else lane.target


SCHEMA = 1
UNHEARD_MS = 5_000.0  # a supervisor that is restarted listens again in less


def document(gateway: GatewayParts) -> dict[str, Any]:
    """The status document, the same for the CLI, `/status` and observers."""
    found: dict[str, Any] = msgspec.to_builtins(status(gateway))
    return found


def status(gateway: GatewayParts) -> doc.GatewayStatus:
    exchange, lock, settings = gateway.exchange, gateway.lock, gateway.settings
    upstream, target = exchange.upstream(), gateway.target
    idle = None if target is None else target.idle
    return doc.GatewayStatus(
        schema=SCHEMA,
        online=True,
        pid=os.getpid(),
        restarts=restarts(),
        dir=settings.directory,
        accepting=exchange.is_accepting,
        problems=problems(gateway),
        **gateway.log.newest(),
        **moment(gateway.started_ms, gateway.clock),
        stopping=gateway.is_stopping or exchange.is_final,
        stop=doc.GatewayStop(
            settings.drain_ms, None if upstream is None else upstream.continuation
        ),
        accepting_since=_since(gateway, gateway.accepting_ms) if exchange.is_accepting else None,
        service=doc.GatewayService(lock.lock, lock.address or None, bool(settings.tls_cert)),
        predecessor=gateway.predecessor,
        upstream=upstream,
        lock_server=doc.GatewayLockServer(
            lock.is_served, _since(gateway, lock.changed_ms), lock.outage
        ),
        idle=None
        if idle is None or target is None
        else doc.GatewayIdle(idle, **moment(target.idle_ms, gateway.clock)),
        rest=_rest(gateway),
        pool=pool_of(gateway),
        load=exchange.load(),
        memory_bytes_max=exchange.memory_bytes_max,
        totals=_totals(gateway),
    )


def _since(gateway: GatewayParts, at_ms: float) -> str:
    return str(moment(at_ms, gateway.clock)["since"])


def problems(gateway: GatewayParts) -> list[str]:
    """One sentence for each thing that does not work now."""
    lock = gateway.lock
    found: list[str | None] = []
    if lock.outage is not None:
        is_served = gateway.target is not None and gateway.target.grant is not None
        meanwhile = "requests are served, a takeover waits" if is_served else "nothing is served"
        found.append(f"{lock.outage}; {meanwhile}")
    elif not lock.address:
        found.append("the lock server has lent no socket yet; see `lockserver status`")
    found += [gateway.exchange.problem, gateway.pool.outage, _unheard(gateway)]
    found += [look() for look in gateway.troubles]
    return [each for each in found if each]


def _unheard(gateway: GatewayParts) -> str | None:
    """A takeover loses the engine for a moment; longer is a problem."""
    link, target = gateway.engine, gateway.target
    if target is None or target.idle is not None or link.unheard_ms is None:
        return None
    if gateway.clock.now_ms() - link.unheard_ms < UNHEARD_MS:
        return None
    return (
        f"{link.core.engine} does not report its state, so the gateway cannot put it to sleep or"
        f" wake it: {link.problem}"
    )


def _rest(gateway: GatewayParts) -> doc.GatewayRest:
    """What the engine that holds the lock says of itself, and what the gateway makes of it."""
    link, rules, said = gateway.engine, gateway.settings.rest, gateway.engine.said
    engine = None
    if said is not None:
        engine = doc.GatewayEngine(
            state=said.state,
            **moment(link.said_ms - said.since_ms, gateway.clock),
            goal=said.goal,
            goal_by=said.goal_by or None,
        )
    return doc.GatewayRest(
        sleep_after_ms=round(rules.keep_alive_ms),
        wake=ON_REQUEST if rules.wakes_on_request else MANUAL,
        door="shut" if link.core.door.is_shut else "open",
        engine=engine,
        problem=link.problem,
    )


def pool_of(gateway: GatewayParts) -> doc.GatewayPool | None:
    """What the pool says of its models, and what there is for them; None without a pool file."""
    link = gateway.pool
    if not link.models:
        return None
    demand = gateway.exchange.demand()
    return doc.GatewayPool(
        connected=link.is_connected,
        **moment(link.changed_ms, gateway.clock),
        problem=link.problem,
        models={model: _model(gateway, model, demand[model]) for model in link.models},
    )


def _model(gateway: GatewayParts, model: str, demand: ModelDemand) -> doc.GatewayModel:
    said, lane = gateway.exchange.endpoints.said.get(model), gateway.exchange.core.lanes[model]
    grant = lane.target.grant
    return doc.GatewayModel(
        state=None if said is None else said.state,
        reason="" if said is None else said.reason,
        door=lane.door_word,
        engine=None if grant is None else grant.engine,
        **counts_of(demand),
    )


def counts_of(demand: ModelDemand) -> dict[str, int]:
    parked = sum(each.kind is TicketKind.PARKED for each in demand.tickets)
    waiting = len(demand.tickets) - parked
    return {"in_flight": demand.in_flight, "waiting": waiting, "parked": parked}


def _totals(gateway: GatewayParts) -> doc.GatewayTotal:
    accounts = gateway.exchange.accounts
    return doc.GatewayTotal(
        requests=[doc.GatewayRequest(*key, count) for key, count in accounts.requests.items()],
        replayed_tokens=accounts.replayed_tokens,
        pauses=accounts.paused,
        pause_ms=round(accounts.pauses.sum_s * 1000, 1),
        resumes=accounts.resumed,
    )


# -------------------------------------------------------------------------------------- probes


def probes(gateway: GatewayParts) -> Mapping[str, Callable[[], Probe]]:
    return {
        "live": lambda: Probe(True, "running"),
        "startup": lambda: Probe(True, "started"),
        "ready": lambda: ready(gateway),
    }


def ready(gateway: GatewayParts) -> Probe:
    """It accepts, and a request would be answered."""
    exchange = gateway.exchange
    if gateway.is_stopping or exchange.is_final:
        return Probe(False, "stopping")
    if not exchange.is_accepting:
        return Probe(False, "not_accepting", {"problems": problems(gateway)})
    return exchange.endpoints.serves()
