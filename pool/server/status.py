"""The documents and probes of a pool, made of the structs of `pool.schema`.

Its status has the plan and the reservations: who is next, and who holds what. `explain` says of a
model why it is where it is, what it waits for, and how long that can last.

It only reads. What a model waits for is a row of `pool.core.reasons`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from plumbing.pod.messages import Tier
from plumbing.service.clock import Clock, moment
from plumbing.service.events import EventLog
from plumbing.service.http import Probe
from plumbing.service.notify import restarts
from plumbing.text import duration, size
from pool.core.admission import expected_ms
from pool.core.bound import bound_ms
from pool.core.events import OpenDoor, Order, RefusedDoor, SetModelDoor
from pool.core.facts import Facts
from pool.core.model import Model
from pool.core.reasons import held_for_ever, next_of, wait_of
from pool.core.states import FALLING, HOST, RISING, EntryKind, ModelState
from pool.schema import (
    ExplainDocument,
    ExplainedLease,
    ExplainedModel,
    PoolBooked,
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
from pool.server.engines import EngineSide
from pool.server.gateways import PoolGateways
from pool.server.leases import HeldLease, LeaseDesk
from pool.server.locks import PoolLockSide
from pool.server.memory import MemorySide
from pool.server.settings import PoolSettings
from pool.settings import PoolFile, digests

SCHEMA = 1


class PoolParts:
    """What one running pool consists of."""

    settings: PoolSettings
    clock: Clock
    log: EventLog
    facts: Facts
    file: PoolFile  # with what was set at runtime
    changed: dict[str, dict[str, str]]  # at runtime, by model ("": the pool) and setting
    doors: dict[str, SetModelDoor]  # that gateways were told, by model
    gateways: PoolGateways
    engines: EngineSide
    locks: PoolLockSide
    memory: MemorySide
    leases: LeaseDesk
    started_ms: float
    problem: str | None = None  # why nothing is decided now
    troubles: list[Callable[[], str | None]]  # what the servers cannot do now


COSTS = PoolCost.__struct_fields__
PROBLEMS_MAX = 20  # a pod with a hundred engines that are all gone has one problem


def document(server: PoolParts) -> dict[str, Any]:
    """The status document, the same for the CLI, `/status` and observers."""
    seen = seen_models(server)
    found = PoolStatus(
        schema=SCHEMA,
        online=True,
        **server.log.newest(),
        pid=os.getpid(),
        restarts=restarts(),
        dir=server.settings.directory,
        **moment(server.started_ms, server.clock),
        era=server.facts.era,
        start=server.facts.start,
        recovering=is_recovering(server),
        models=[_model(server, name, seen) for name in server.doors],
        devices=[_device(server, name) for name in server.facts.ledger.devices],
        leases=[_lease(server, each) for each in server.leases.leases],
        plan=plan(server),
        gateways=[PoolGateway(name) for name in server.gateways.conns],
        lock_server=PoolLockServer(server.locks.is_connected, server.locks.problem),
        queue=PoolQueue(server.file.queue.max, server.file.queue.per_model),
        file=PoolFileFields(server.settings.path or None, digests(server.settings.file)),
        changed={name or "pool": found for name, found in server.changed.items()},
        problems=problems(server)[:PROBLEMS_MAX],
    )
    return dict(msgspec.to_builtins(found, enc_hook=_plain))


def _plain(value: object) -> object:
    """Of the pool file's own kinds: `DeviceName`, `Size`."""
    return int(value) if isinstance(value, int) else str(value)


def problems(server: PoolParts) -> list[str]:
    """One sentence for each thing that does not work now."""
    found: list[str | None] = [server.problem]
    found += [each.alarm for each in server.facts.models.values()]
    if server.locks.problem is not None:
        found.append(f"the pool cannot reach the lock server: {server.locks.problem}")
    if not server.gateways.conns:
        found.append("no gateway is connected, so no request can wake a model")
    found += [*server.engines.problems, *server.memory.problems]
    found += [look() for look in server.troubles]
    return [each for each in found if each]


def is_recovering(server: PoolParts) -> bool:
    return any(each.is_recovering for each in server.facts.models.values())


# -------------------------------------------------------------------------------------- probes


def probes(server: PoolParts) -> Mapping[str, Callable[[], Probe]]:
    return {
        "live": lambda: Probe(True, "running"),
        "startup": lambda: Probe(True, "started"),
        "ready": lambda: ready(server),
    }


def ready(server: PoolParts) -> Probe:
    """It decides: its state can be written, and a gateway is connected. A model that recovers waits
    for its own engines, and does not make the pool unready."""
    if server.problem is not None:
        return Probe(False, "state_unwritable", {"why": server.problem})
    if not server.gateways.conns:
        return Probe(False, "no_gateway", {"why": "no gateway is connected"})
    return Probe(True, "recovering" if is_recovering(server) else "deciding")


# -------------------------------------------------------------------------------------- status


def _model(server: PoolParts, name: str, seen: list[Model]) -> PoolModel:
    facts = server.facts
    model, told = facts.models[name], server.doors[name]
    bound, measured = bounds_of(server, name, seen)
    tickets = facts.demand.tickets(name)
    now_ms = server.clock.now_ms()
    oldest_ms = min((each.since_ms for each in tickets), default=None)
    sizes, holder = model.sizes, model.holder
    return PoolModel(
        model=name,
        state=model.state.value,
        **moment(model.since_ms, server.clock),
        reason=model.reason or None,
        waits_for=wait_of(facts, model),
        fault=model.fault or None,
        tier=model.goal.value,
        floor=model.held.value,
        pinned=model.is_pinned,
        priority=model.rules.priority,
        recovering=model.is_recovering,
        leaving=model.leaving,
        tickets=len(tickets),
        oldest_ticket_ms=None if oldest_ms is None else round(now_ms - oldest_ms),
        parked=sum(each.kind == "parked" for each in tickets),
        in_flight=facts.demand.in_flight(name),
        door={"number": told.number, **(msgspec.to_builtins(told.door) if told.door else {})},
        holder=None if holder is None else PoolHolder(holder.engine, holder.token),
        engines=[_engine(server, model, each.name) for each in model.engines],
        bytes=_booked(server, model),
        estimated=sizes is None or sizes.is_estimated,
        sizes=None
        if sizes is None
        else {kind: dict(getattr(sizes, kind)) for kind in ("base", "weights", "kv")},
        expected_ms=_rounded(expected_ms(model, now_ms)),
        costs=PoolCost(*(_rounded(getattr(model.costs, name)) for name in COSTS)),
        bound_ms=_rounded(bound),
        measured_bound_ms=_rounded(measured),
        alarm=model.alarm or None,
    )


def _rounded(spent_ms: float | None) -> int | None:
    return None if spent_ms is None or math.isinf(spent_ms) else round(spent_ms)


def _engine(server: PoolParts, model: Model, name: str) -> PoolEngine:
    link = server.engines.links[name]
    said = link.said
    return PoolEngine(
        engine=link.engine,
        shadow=name != model.main().name,
        connected=said is not None,
        goal=link.goal,
        state=said.state if said is not None else None,
        tier=said.tier if said is not None else None,
        token=said.token if said is not None else None,
        in_flight=said.in_flight if said is not None else None,
        problem=link.problem,
    )


def _booked(server: PoolParts, model: Model) -> dict[str, dict[str, int]]:
    """By device and kind."""
    found: dict[str, dict[str, int]] = {}
    for key, size_bytes in server.facts.ledger.booked(model).items():
        kinds = found.setdefault(key.device, {})
        kinds[key.kind.value] = kinds.get(key.kind.value, 0) + size_bytes
    return found


def _device(server: PoolParts, device: str) -> PoolDevice:
    ledger = server.facts.ledger
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
        booked=booked_on(server, device),
    )


def _lease(server: PoolParts, lease: str) -> PoolLeaseFields:
    held = server.leases.leases[lease]
    return PoolLeaseFields(
        lease=lease,
        device=held.device,
        bytes=held.size_bytes,
        granted=held.is_granted,
        waits_for=held.waits_for or None,
        priority=held.priority,
        command=held.program or None,
        pid=held.pid or None,
        **moment(held.since_ms, server.clock),
    )


def plan(server: PoolParts) -> list[PoolPlan]:
    """What happens next to each model that somebody waits for and that does not serve yet; who has
    waited longest, counted in steps of priority, is first."""
    facts, now_ms = server.facts, server.clock.now_ms()
    rows = []
    for name, model in facts.models.items():
        tickets = facts.demand.tickets(name)
        since_ms = [each.since_ms for each in tickets]
        if model.load_ordered_ms is not None:
            since_ms.append(model.load_ordered_ms)
        if not since_ms or model.state is ModelState.AWAKE:
            continue
        priority = min((each.priority for each in tickets), default=model.rules.priority)
        waited_ms = max(0.0, now_ms - min(since_ms))
        level = priority - waited_ms // max(1.0, facts.rules.starve_after_ms)
        victims = list(model.victims) if model.has_plan else []
        why = next_of(facts, model)
        row = PoolPlan(name, _step(model), why, victims, len(tickets), round(waited_ms))
        rows.append((level, -waited_ms, row))
    return [row for _, _, row in sorted(rows, key=lambda each: each[:2])]


def _step(model: Model) -> str:
    """In one word."""
    state = model.state
    if model.is_unknown or model.is_recovering:
        return "recovering"
    if state is ModelState.FAILED:
        return "failed"
    if model.never is not None:
        return "refused"
    if state in RISING:
        return "rises"
    if state in FALLING:
        return "next_turn"
    return "switches" if model.has_plan else "waits"


# -------------------------------------------------------------------------------------- explain

# States in which there is nothing left to do for an order.
DONE = {
    Order.LOAD: (ModelState.AWAKE,),
    Order.SLEEP: (ModelState.WARM, ModelState.OFFLOADED, ModelState.COLD),
    Order.UNLOAD: (ModelState.COLD,),
}


def explained(server: PoolParts, model: str | None) -> dict[str, Any]:
    """What `pool explain` shows."""
    names = [model] if model is not None else list(server.doors)
    leases = [] if model is not None else list(server.leases.leases.values())
    found = ExplainDocument(
        schema=SCHEMA,
        models=[_explained(server, name) for name in names],
        leases=[_explained_lease(server, each) for each in leases],
    )
    return dict(msgspec.to_builtins(found))


def seen_models(server: PoolParts) -> list[Model]:
    """As the plan sees them."""
    return [model for model in server.facts.models.values() if not model.is_unknown]


def bounds_of(server: PoolParts, name: str, seen: list[Model]) -> tuple[float | None, float | None]:
    """How long a ticket of this model can wait, and how long if nothing takes longer than it did;
    None while that is not known."""
    facts = server.facts
    model = facts.models[name]
    if model not in seen:
        return None, None
    of = (name, model.rules.priority, seen, facts.rules)
    return bound_ms(*of), bound_ms(*of, is_measured=True)


def bounds_ms(server: PoolParts) -> dict[str, float]:
    """How long the tickets that each known model has now, or a usual one, can wait."""
    facts = server.facts
    seen = seen_models(server)
    found = {}
    for model in seen:
        priorities = [each.priority for each in facts.demand.tickets(model.name)]
        last = max([model.rules.priority, *priorities])
        found[model.name] = bound_ms(model.name, last, seen, facts.rules) or 0.0
    return found


def sentence(server: PoolParts, name: str) -> str:
    """One sentence: the state, why, and what it waits for."""
    model = server.facts.models[name]
    since = duration(server.clock.now_ms() - model.since_ms)
    text = f"{name} has been {model.state} for {since}"
    if model.reason:
        text += f" ({model.reason})"
    why = wait_of(server.facts, model)
    if why:
        text += f"; {why}"
    return f"{text}; {model.alarm}" if model.alarm else text


def _explained(server: PoolParts, name: str) -> ExplainedModel:
    facts = server.facts
    model, door, now_ms = facts.models[name], server.doors[name].door, server.clock.now_ms()
    tickets = facts.demand.tickets(name)
    seen = seen_models(server)
    found, measured = bounds_of(server, name, seen)
    in_flight = facts.demand.in_flight(name)
    lines = [sentence(server, name), _door(model, door)]
    if model.is_pinned:
        lines.append(
            "it is pinned: it is never evicted or put to sleep, and is unloaded only with --force"
        )
    if in_flight:
        is_full = tickets and isinstance(door, OpenDoor)
        full = ", as many as it may have (`max_in_flight`)" if is_full else ""
        lines.append(f"its engine has {in_flight} request{'s' * (in_flight > 1)}{full}")
    if tickets:
        oldest = duration(now_ms - min(each.since_ms for each in tickets))
        who = "1 request waits" if len(tickets) == 1 else f"{len(tickets)} requests wait"
        lines.append(f"{who} for it, the oldest for {oldest}")
    soon_ms = expected_ms(model, now_ms)
    if soon_ms:  # 0: it takes longer than ever before
        lines.append(
            f"it should be awake in {duration(soon_ms)} if each phase takes as long as before"
        )
    lines += [_device_line(server, device) for device in model.rules.devices]
    too_large = _no_room(server, name, seen)
    if too_large:
        lines.append(too_large)
    elif found is not None:
        lines += _bounds(found, measured)
    return ExplainedModel(
        model=name,
        state=model.state.value,
        lines=lines,
        expected_ms=_rounded(soon_ms),
        bound_ms=_rounded(found),
        measured_bound_ms=_rounded(measured),
    )


def _explained_lease(server: PoolParts, lease: HeldLease) -> ExplainedLease:
    """Only those that wait need more than one line."""
    since = duration(server.clock.now_ms() - lease.since_ms)
    what = f"{size(lease.size_bytes)} of {lease.device}"
    text = "holds" if lease.is_granted else "is waiting for"
    program = f" ({lease.program}, pid {lease.pid})" if lease.program else ""
    lines = [f"lease {lease.lease}{program} {text} {what}, requested {since} ago"]
    if not lease.is_granted:
        lines.append(lease.waits_for or "it was requested just now")
        lines.append(_device_line(server, lease.device))
    return ExplainedLease(lease.lease, lease.is_granted, lines)


def _door(model: Model, door: object) -> str:
    """An open door stays open over a failover, and then names an engine that is dead."""
    match door:
        case OpenDoor() if _is_active(model, door.engine):
            return f"requests for it are sent to {door.engine}, token {door.token}"
        case RefusedDoor():
            return f"requests for it are refused: {door.sentence} [{door.code}]"
        case None:
            return "the gateway still follows the previous pool's instructions"
        case _:
            return "requests for it wait until it is awake"


def _is_active(model: Model, engine: str) -> bool:
    said = (each.said for each in model.engines if each.name == engine)
    return any(each is not None and each.state == "active" for each in said)


def _device_line(server: PoolParts, device: str) -> str:
    """`HOST-0: 1.2 GiB free of 8.0 GiB; chat 3.0 GiB (pinned), coder 2.0 GiB (leaving), …`"""
    facts = server.facts
    ledger = facts.ledger
    if device not in ledger.totals:
        return f"{device}: the memory service has not reported its size yet"
    held: dict[str, int] = {}
    rows = booked_on(server, device)
    leaving = {row.owner for row in rows if row.leaving}
    for row in rows:
        held[row.owner] = held.get(row.owner, 0) + row.bytes
    if ledger.outside.get(device):
        held["programs outside the pool"] = ledger.outside[device]
    words = []
    for owner, size_bytes in sorted(held.items(), key=lambda each: -each[1]):
        notes = ["leaving"] if owner in leaving else []
        model = facts.models.get(owner)
        if model is not None and model.is_pinned:
            notes.append("pinned")
        words.append(f"{owner} {size(size_bytes)}" + (f" ({', '.join(notes)})" if notes else ""))
    free = size(max(0, ledger.free_bytes(device)))
    who = "; ".join(words) or "nothing is booked"
    return f"{device}: {free} free of {size(ledger.totals[device])}; {who}"


def booked_on(server: PoolParts, device: str) -> list[PoolBooked]:
    """Who holds what of a device, by owner: a model, or `lease ID`; the largest first."""
    facts, ledger = server.facts, server.facts.ledger
    rows = []
    for key, size_bytes in ledger.entries.items():
        if key.device != device or not size_bytes:
            continue
        owner = facts.engines[key.owner].model if key.kind is EntryKind.BASE else key.owner
        rows.append(
            PoolBooked(
                f"lease {key.owner}" if key.kind is EntryKind.LEASE else owner,
                key.kind.value,
                size_bytes,
                key in ledger.leaving,
            )
        )
    return sorted(rows, key=lambda row: (row.owner, -row.bytes))


def _no_room(server: PoolParts, name: str, seen: list[Model]) -> str:
    """Why no wait would raise it; "" while it fits beside what never yields."""
    view = server.facts.models[name]
    if view.is_unknown:
        return ""
    ledger = server.facts.ledger
    for device in view.rules.devices:
        needed = view.needs.get(Tier.AWAKE, {}).get(device)
        if needed is None or device not in ledger.totals:
            continue
        kept = [held_for_ever(each).get(device, 0) for each in seen if each is not view]
        kept += [
            size_bytes
            for key, size_bytes in ledger.entries.items()
            if key.device == device and key.kind is EntryKind.LEASE
        ]
        room = ledger.usable_bytes(device) - sum(kept)
        if needed > room:
            return (
                f"requests for it are refused while it is not awake: it needs {size(needed)} on"
                f" {device}, and only {size(max(0, room))} can be freed"
            )
    return ""


def _bounds(bound: float, measured: float | None) -> list[str]:
    """The useful one first, and the guarantee behind it. The guarantee alone would say hours where
    a load takes a second, so it is left to --json until everything was measured."""
    if math.isinf(bound):
        why = "a model on its devices never cuts off requests (`cut: never`)"
        return [f"the longest wait has no limit: {why}"]
    if measured is None:
        why = "not every model on its devices has been loaded once"
        return [f"the longest wait cannot be estimated yet: {why}"]
    return [
        f"a request waits at most {duration(measured)} if each phase takes as long as before,",
        f"and at most {duration(bound)} in any case: each load or wake may take a minute or more",
    ]
