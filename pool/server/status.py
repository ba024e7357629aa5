"""The documents and probes of a pool, made of the structs of `pool.schema`.

Its status has the reservations, who holds what; of each model why it is where it is, what it waits
for, and how long that can last. `pool.status_text` prints it.

It only reads. What a model waits for is said by `pool.core.admission`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from plumbing.pod.messages import Tier
from plumbing.service.clock import SystemClock, moment
from plumbing.service.events import EventLog
from plumbing.service.http import Probe
from plumbing.service.notify import restarts
from pool import status_text
from pool.core.admission import expected_ms, wait_of
from pool.core.events import SetModelDoor
from pool.core.facts import Facts
from pool.core.model import Model
from pool.core.states import HOST, EntryKind
from pool.core.who_wakes import unheard
from pool.core.who_yields import bound_ms
from pool.pool_file import digests
from pool.schema import (
    PoolBooked,
    PoolDevice,
    PoolEngine,
    PoolFileFields,
    PoolGateway,
    PoolHolder,
    PoolLeaseFields,
    PoolModel,
    PoolStatus,
)
from pool.server.engines import EngineLink, EngineSide
from pool.server.gateways import PoolGateways
from pool.server.leases import LeaseDesk
from pool.server.memory import MemorySide
from pool.server.settings import PoolSettings

PROBLEMS_MAX = 20  # a pod with a hundred engines that are all gone has one problem


class ShownPool(Protocol):
    """What is read of the server (`pool.server.server.PoolServer`)."""

    settings: PoolSettings
    clock: SystemClock
    log: EventLog
    facts: Facts
    started_ms: float
    problem: str | None
    troubles: list[Callable[[], str | None]]
    changed: dict[str, dict[str, str]]
    doors: dict[str, SetModelDoor]
    engines: EngineSide
    gateways: PoolGateways
    leases: LeaseDesk
    memory: MemorySide


def document(server: ShownPool) -> dict[str, Any]:
    """The status document, the same for the CLI, `/status` and observers."""
    found = PoolStatus(
        schema=1,
        online=True,
        **server.log.newest(),
        pid=os.getpid(),
        restarts=restarts(),
        dir=server.settings.directory,
        **moment(server.started_ms, server.clock),
        era=server.facts.era,
        recovering=is_recovering(server),
        models=[_model(server, model) for model in server.facts.models.values()],
        devices=[_device(server.facts, name) for name in server.facts.ledger.devices],
        leases=[_lease(server, lease) for lease in server.facts.leases.values()],
        gateways=[PoolGateway(name) for name in server.gateways.conns],
        file=PoolFileFields(server.settings.path or None, digests(server.settings.file)),
        changed={name or "pool": found for name, found in server.changed.items()},
        problems=problems(server)[:PROBLEMS_MAX],
    )
    return dict(msgspec.to_builtins(found))


def sentence(server: ShownPool, name: str) -> str:
    """One sentence on a model: the state, why, and what it waits for."""
    model = _model(server, server.facts.models[name])
    return status_text.sentence(msgspec.to_builtins(model))


def problems(server: ShownPool) -> list[str]:
    """One sentence for each thing that does not work now."""
    found: list[str | None] = [server.problem]
    found += [each.alarm for each in server.facts.models.values()]
    if not server.gateways.conns:
        found.append("no gateway is connected, so no request can wake a model")
    found += [*server.engines.problems, *server.memory.problems]
    found += [look() for look in server.troubles]
    return [each for each in found if each]


def is_recovering(server: ShownPool) -> bool:
    return any(each.is_recovering for each in server.facts.models.values())


def probes(server: ShownPool) -> Mapping[str, Callable[[], Probe]]:
    return {
        "live": lambda: Probe(True, "running"),
        "startup": lambda: Probe(True, "started"),
        "ready": lambda: ready(server),
    }


def ready(server: ShownPool) -> Probe:
    """It decides: its state can be written, and a gateway is connected. A model that recovers waits
    for its own engines, and does not make the pool unready."""
    if server.problem is not None:
        return Probe(False, "state_unwritable", {"why": server.problem})
    if not server.gateways.conns:
        return Probe(False, "no_gateway", {"why": "no gateway is connected"})
    return Probe(True, "recovering" if is_recovering(server) else "deciding")


# -------------------------------------------------------------------------------------- models


def _model(server: ShownPool, model: Model) -> PoolModel:
    facts, now_ms, sizes, holder = server.facts, server.clock.now_ms(), model.sizes, model.holder
    told = server.doors[model.name]
    bound, measured = None, None
    if not model.is_unknown:
        of = (model.name, model.rules.priority, seen_models(facts), facts.rules)
        bound, measured = bound_ms(*of), bound_ms(*of, is_measured=True)
    tickets = facts.demand.tickets(model.name)
    booked: dict[str, dict[str, int]] = {}
    for key, size_bytes in facts.ledger.booked(model).items():
        kinds = booked.setdefault(key.device, {})
        kinds[key.kind.value] = kinds.get(key.kind.value, 0) + size_bytes
    return PoolModel(
        model=model.name,
        state=model.state.value,
        **moment(model.since_ms, server.clock),
        reason=model.reason or None,
        waits_for=wait_of(facts, model),
        fault=model.fault or None,
        tier=model.goal.value,
        pinned=model.is_pinned,
        priority=model.rules.priority,
        recovering=model.is_recovering,
        tickets=len(tickets),
        oldest_ticket_ms=max((round(now_ms - each.since_ms) for each in tickets), default=None),
        parked=sum(each.kind == "parked" for each in tickets),
        in_flight=facts.demand.in_flight(model.name),
        door={"number": told.number, **(msgspec.to_builtins(told.door) if told.door else {})},
        holder=None if holder is None else PoolHolder(holder.engine, holder.token),
        engines=[_engine(server.engines.links[each.name], model) for each in model.engines],
        bytes=booked,
        estimated=sizes is None or sizes.is_estimated,
        sizes=None
        if sizes is None
        else {kind: dict(getattr(sizes, kind)) for kind in ("base", "weights", "kv")},
        refused=model.never,
        expected_ms=_rounded(expected_ms(facts, model)),
        bound_ms=_rounded(bound),
        measured_bound_ms=_rounded(measured),
        alarm=model.alarm or None,
    )


def seen_models(facts: Facts) -> list[Model]:
    """As the plan sees them."""
    return [model for model in facts.models.values() if not model.is_unknown]


def bounds_ms(facts: Facts) -> dict[str, float]:
    """How long the tickets that each known model has now, or a usual one, can wait."""
    seen, found = seen_models(facts), {}
    for model in seen:
        priorities = [each.priority for each in facts.demand.tickets(model.name)]
        last = max([model.rules.priority, *priorities])
        found[model.name] = bound_ms(model.name, last, seen, facts.rules) or 0.0
    return found


def _rounded(spent_ms: float | None) -> int | None:
    return None if spent_ms is None or math.isinf(spent_ms) else round(spent_ms)


def _engine(link: EngineLink, model: Model) -> PoolEngine:
    state = link.said.state if link.said is not None else None
    is_shadow = link.engine != model.main().name
    return PoolEngine(link.engine, is_shadow, link.goal, state, link.problem)


# -------------------------------------------------------------------------------------- memory


def _device(facts: Facts, device: str) -> PoolDevice:
    """Who holds what of it is by owner: a model, or `lease ID`; the largest first."""
    ledger, booked = facts.ledger, []
    for key, size_bytes in ledger.entries.items():
        if key.device == device and size_bytes:
            owner = facts.engines[key.owner].model if key.kind is EntryKind.BASE else key.owner
            owner = f"lease {owner}" if key.kind is EntryKind.LEASE else owner
            booked.append(PoolBooked(owner, key.kind.value, size_bytes, key in ledger.leaving))
    is_known = device in ledger.totals
    return PoolDevice(
        device=device,
        total_bytes=ledger.totals.get(device),
        free_bytes=max(0, ledger.free_bytes(device)) if is_known else None,
        booked_bytes=sum(row.bytes for row in booked),
        outside_bytes=ledger.outside.get(device, 0),
        margin_bytes=0 if device == HOST else ledger.margin_bytes,
        booked=sorted(booked, key=lambda row: (row.owner, -row.bytes)),
    )


def _lease(server: ShownPool, lease: Model) -> PoolLeaseFields:
    asked = lease.lease
    assert asked is not None
    held, is_granted = server.leases.leases.get(asked.lease), lease.goal is Tier.AWAKE
    return PoolLeaseFields(
        lease=asked.lease,
        device=asked.device,
        bytes=asked.bytes,
        granted=is_granted,
        waits_for=None if is_granted else unheard(asked.device) if lease.is_blind else lease.wait,
        priority=asked.priority,
        command=(held.program if held is not None else "") or None,
        pid=(held.pid if held is not None else 0) or None,
        **moment(asked.since_ms, server.clock),
    )
