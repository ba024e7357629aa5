"""The status document and the probes of a pool, with the plan and the reservations: who is next,
and who holds what. It only reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from plumbing.service.clock import moment
from plumbing.service.http import Probe
from plumbing.service.notify import restarts
from pool.core.doors import expected_ms
from pool.core.model import KnownModel
from pool.core.states import FALLING, HOST, RISING, ModelState
from pool.core.view import ModelView
from pool.schema import (
    PoolCost,
    PoolDevice,
    PoolEngine,
    PoolFileFields,
    PoolGateway,
    PoolHolder,
    PoolLeaseFields,
    PoolLockServer,
    PoolModel,
    PoolPlan,
    PoolQueue,
    PoolStatus,
)
from pool.server import explain
from pool.server.explain import next_of, wait_of
from pool.server.parts import PoolParts
from pool.settings import digests

SCHEMA = 1
COSTS = PoolCost.__struct_fields__
PROBLEMS_MAX = 20  # a pod with a hundred engines that are all gone has one problem


def document(parts: PoolParts) -> dict[str, Any]:
    """The status document, the same for the CLI, `/status` and observers."""
    seen = explain.views(parts)
    found = PoolStatus(
        schema=SCHEMA,
        online=True,
        **parts.log.newest(),
        pid=os.getpid(),
        restarts=restarts(),
        dir=parts.settings.directory,
        **moment(parts.started_ms, parts.clock),
        era=parts.pool.situation.era,
        start=parts.pool.situation.start,
        recovering=is_recovering(parts),
        models=[_model(parts, name, seen) for name in parts.doors],
        devices=[_device(parts, name) for name in parts.pool.situation.books.devices],
        leases=[_lease(parts, each) for each in parts.leases.leases],
        plan=plan(parts),
        gateways=[PoolGateway(name) for name in parts.gateways.conns],
        lock_server=PoolLockServer(parts.locks.is_connected, parts.locks.problem),
        queue=PoolQueue(parts.file.queue.max, parts.file.queue.per_model),
        file=PoolFileFields(parts.settings.path or None, digests(parts.settings.file)),
        changed={name or "pool": found for name, found in parts.changed.items()},
        problems=problems(parts)[:PROBLEMS_MAX],
    )
    return dict(msgspec.to_builtins(found, enc_hook=_plain))


def _plain(value: object) -> object:
    """Of the pool file's own kinds: `DeviceName`, `Size`."""
    return int(value) if isinstance(value, int) else str(value)


def problems(parts: PoolParts) -> list[str]:
    """One sentence for each thing that does not work now."""
    found: list[str | None] = [parts.problem]
    found += [each.alarm for each in parts.pool.situation.models.values()]
    if parts.locks.problem is not None:
        found.append(f"the pool cannot reach the lock server: {parts.locks.problem}")
    if not parts.gateways.conns:
        found.append("no gateway is connected, so no request can wake a model")
    found += [*parts.engines.problems, *parts.memory.problems]
    found += [look() for look in parts.troubles]
    return [each for each in found if each]


def is_recovering(parts: PoolParts) -> bool:
    return any(each.is_recovering for each in parts.pool.situation.models.values())


# -------------------------------------------------------------------------------------- probes


def probes(parts: Callable[[], PoolParts]) -> Mapping[str, Callable[[], Probe]]:
    return {
        "live": lambda: Probe(True, "running"),
        "startup": lambda: Probe(True, "started"),
        "ready": lambda: ready(parts()),
    }


def ready(parts: PoolParts) -> Probe:
    """It decides: its state can be written, and a gateway is connected. A model that recovers waits
    for its own engines, and does not make the pool unready."""
    if parts.problem is not None:
        return Probe(False, "state_unwritable", {"why": parts.problem})
    if not parts.gateways.conns:
        return Probe(False, "no_gateway", {"why": "no gateway is connected"})
    return Probe(True, "recovering" if is_recovering(parts) else "deciding")


# -------------------------------------------------------------------------------------- parts


def _model(parts: PoolParts, name: str, seen: list[ModelView]) -> PoolModel:
    pool = parts.pool.situation
    known, told = pool.models[name], parts.doors[name]
    bound, measured = explain.bounds_of(parts, name, seen)
    tickets = pool.demand.tickets(name)
    now_ms = parts.clock.now_ms()
    oldest_ms = min((each.since_ms for each in tickets), default=None)
    sizes, holder = known.sizes, known.holder
    return PoolModel(
        model=name,
        state=known.state.value,
        **moment(known.since_ms, parts.clock),
        reason=known.reason or None,
        waits_for=wait_of(pool, known),
        fault=known.fault or None,
        tier=known.goal.value,
        floor=known.held.value,
        pinned=known.is_pinned,
        priority=known.rules.priority,
        recovering=known.is_recovering,
        leaving=known.leaving,
        tickets=len(tickets),
        oldest_ticket_ms=None if oldest_ms is None else round(now_ms - oldest_ms),
        parked=sum(each.kind == "parked" for each in tickets),
        in_flight=pool.demand.in_flight(name),
        door={"number": told.number, **(msgspec.to_builtins(told.door) if told.door else {})},
        holder=None if holder is None else PoolHolder(holder.engine, holder.token),
        engines=[_engine(parts, known, each.name) for each in known.engines],
        bytes=_booked(parts, known),
        estimated=sizes is None or sizes.is_estimated,
        sizes=None
        if sizes is None
        else {kind: dict(getattr(sizes, kind)) for kind in ("base", "weights", "kv")},
        expected_ms=_rounded(expected_ms(known, now_ms)),
        costs=PoolCost(*(_rounded(getattr(known.costs, name)) for name in COSTS)),
        bound_ms=explain.bound_ms(bound),
        measured_bound_ms=explain.bound_ms(measured),
        alarm=known.alarm or None,
    )


def _rounded(spent_ms: float | None) -> int | None:
    return None if spent_ms is None else round(spent_ms)


def _engine(parts: PoolParts, known: KnownModel, name: str) -> PoolEngine:
    link = parts.engines.links[name]
    said = link.said
    return PoolEngine(
        engine=link.engine,
        shadow=name != known.main().name,
        connected=said is not None,
        goal=link.goal,
        state=said.state if said is not None else None,
        tier=said.tier if said is not None else None,
        token=said.token if said is not None else None,
        in_flight=said.in_flight if said is not None else None,
        problem=link.problem,
    )


def _booked(parts: PoolParts, known: KnownModel) -> dict[str, dict[str, int]]:
    """By device and kind."""
    found: dict[str, dict[str, int]] = {}
    for key, size_bytes in parts.pool.situation.books.booked(known).items():
        kinds = found.setdefault(key.device, {})
        kinds[key.kind.value] = kinds.get(key.kind.value, 0) + size_bytes
    return found


def _device(parts: PoolParts, device: str) -> PoolDevice:
    ledger = parts.pool.situation.books.ledger
    leaving = sum(ledger.entries[key] for key in ledger.leaving if key.device == device)
    booked = sum(each for key, each in ledger.entries.items() if key.device == device)
    is_known = device in ledger.totals
    return PoolDevice(
        device=device,
        total_bytes=ledger.totals.get(device),
        free_bytes=max(0, ledger.free_bytes(device)) if is_known else None,
        booked_bytes=booked,
        leaving_bytes=leaving,
        outside_bytes=ledger.outside.get(device, 0),
        margin_bytes=0 if device == HOST else ledger.margin_bytes,
        booked=explain.booked_on(parts, device),
    )


def _lease(parts: PoolParts, lease: str) -> PoolLeaseFields:
    held = parts.leases.leases[lease]
    return PoolLeaseFields(
        lease=lease,
        device=held.device,
        bytes=held.size_bytes,
        granted=held.is_granted,
        waits_for=held.waits_for or None,
        priority=held.priority,
        command=held.program or None,
        pid=held.pid or None,
        **moment(held.since_ms, parts.clock),
    )


def plan(parts: PoolParts) -> list[PoolPlan]:
    """What happens next to each model that somebody waits for and that does not serve yet; who has
    waited longest, counted in steps of priority, is first."""
    pool, now_ms = parts.pool.situation, parts.clock.now_ms()
    rows = []
    for name, known in pool.models.items():
        tickets = pool.demand.tickets(name)
        since_ms = [each.since_ms for each in tickets]
        if known.load_ordered_ms is not None:
            since_ms.append(known.load_ordered_ms)
        if not since_ms or known.state is ModelState.AWAKE:
            continue
        priority = min((each.priority for each in tickets), default=known.rules.priority)
        waited_ms = max(0.0, now_ms - min(since_ms))
        level = priority - waited_ms // max(1.0, pool.rules.starve_after_ms)
        victims = list(known.victims) if known.has_plan else []
        why = next_of(pool, known)
        row = PoolPlan(name, _step(known), why, victims, len(tickets), round(waited_ms))
        rows.append((level, -waited_ms, row))
    return [row for _, _, row in sorted(rows, key=lambda each: each[:2])]


def _step(known: KnownModel) -> str:
    """In one word."""
    state = known.state
    if known.is_unknown or known.is_recovering:
        return "recovering"
    if state is ModelState.FAILED:
        return "failed"
    if known.never is not None:
        return "refused"
    if state in RISING:
        return "rises"
    if state in FALLING:
        return "next_turn"
    return "switches" if known.has_plan else "waits"
