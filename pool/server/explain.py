"""Why a model is where it is, what it waits for, and how long that can last: for people.

`explain` reads the core, and makes the same views of it that the policy gets. `wait_of` names what
a model waits for now: which component, and which report or proof of it. Why a model waits for room
is the policy's own sentence (`pool.core.reasons`).
"""

from __future__ import annotations

import math
from typing import Any

from plumbing.pod.messages import Tier
from plumbing.text import duration, size
from pool.core import reasons
from pool.core.doors import (
    TurnBound,
    WaitBound,
    bound,
    expected_ms,
    measured_bound,
    reason_of,
    unmeasured,
)
from pool.core.events import OpenDoor, Order, RefusedDoor
from pool.core.model import KnownModel
from pool.core.planning import is_blind, ticket_of, view_of
from pool.core.reasons import held_for_ever
from pool.core.states import EntryKind, ModelState
from pool.core.view import ModelView
from pool.core.world import PoolSituation
from pool.schema import PoolBooked
from pool.server.leases import HeldLease
from pool.server.parts import PoolParts

NAMED_MAX = 4  # of the models that were not loaded yet

# States in which there is nothing left to do for an order.
DONE = {
    Order.LOAD: (ModelState.AWAKE,),
    Order.SLEEP: (ModelState.WARM, ModelState.OFFLOADED, ModelState.COLD),
    Order.UNLOAD: (ModelState.COLD,),
}


def document(parts: PoolParts, model: str | None) -> dict[str, Any]:
    """What `pool explain` shows."""
    names = [model] if model is not None else list(parts.doors)
    leases = [] if model is not None else list(parts.leases.leases.values())
    return {
        "schema": 1,
        "models": [_model(parts, name) for name in names],
        "leases": [_lease(parts, lease) for lease in leases],
    }


def views(parts: PoolParts) -> list[ModelView]:
    """As the policy sees the models."""
    pool = parts.pool.situation
    now_ms = parts.clock.now_ms()
    return [
        view_of(
            known,
            ticket_of(known, pool.demand, now_ms, pool.rules),
            pool.demand,
            pool.books,
            is_blind=is_blind(pool, known),
        )
        for known in pool.models.values()
        if not known.is_unknown
    ]


def bounds_of(
    parts: PoolParts, name: str, seen: list[ModelView]
) -> tuple[WaitBound | None, WaitBound | None]:
    """How long a ticket of this model can wait, and how long if nothing takes longer than it did;
    None while that is not known."""
    pool = parts.pool.situation
    if all(view.name != name for view in seen):
        return None, None
    priority = pool.models[name].rules.priority
    return (
        bound(name, priority, seen, pool.rules),
        measured_bound(name, priority, seen, pool.rules),
    )


def bounds_ms(parts: PoolParts) -> dict[str, float]:
    """How long the tickets that each model has now, or a usual one, can wait; those that are not
    known are left out."""
    pool = parts.pool.situation
    seen = views(parts)
    found = {}
    for view in seen:
        priorities = [each.priority for each in pool.demand.tickets(view.name)]
        last = max([view.rules.priority, *priorities])
        found[view.name] = bound(view.name, last, seen, pool.rules).total_ms
    return found


def sentence(parts: PoolParts, name: str) -> str:
    """One sentence: the state, why, and what it waits for."""
    known = parts.pool.situation.models[name]
    since = duration(parts.clock.now_ms() - known.since_ms)
    text = f"{name} has been {known.state} for {since}"
    if known.reason:
        text += f" ({known.reason})"
    why = wait_of(parts.pool.situation, known)
    if why:
        text += f"; {why}"
    return f"{text}; {known.alarm}" if known.alarm else text


def _model(parts: PoolParts, name: str) -> dict[str, Any]:
    pool = parts.pool.situation
    known, door, now_ms = pool.models[name], parts.doors[name].door, parts.clock.now_ms()
    tickets = pool.demand.tickets(name)
    seen = views(parts)
    found, measured = bounds_of(parts, name, seen)
    in_flight = pool.demand.in_flight(name)
    lines = [sentence(parts, name), _door(known, door)]
    if known.is_pinned:
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
    soon_ms = expected_ms(known, now_ms)
    if soon_ms:  # 0: it takes longer than ever before
        lines.append(
            f"it should be awake in {duration(soon_ms)} if each phase takes as long as before"
        )
    lines += [_device(parts, device) for device in known.rules.devices]
    too_large = _no_room(parts, name, seen)
    if too_large:
        lines.append(too_large)
    elif found is not None:
        lines += _bounds(found, measured, unmeasured(name, seen))
    return {
        "model": name,
        "state": known.state.value,
        "lines": lines,
        "expected_ms": None if soon_ms is None else round(soon_ms),
        "bound_ms": bound_ms(found),
        "measured_bound_ms": bound_ms(measured),
    }


def _lease(parts: PoolParts, lease: HeldLease) -> dict[str, Any]:
    """Only those that wait need more than one line."""
    since = duration(parts.clock.now_ms() - lease.since_ms)
    what = f"{size(lease.size_bytes)} of {lease.device}"
    text = "holds" if lease.is_granted else "is waiting for"
    program = f" ({lease.program}, pid {lease.pid})" if lease.program else ""
    lines = [f"lease {lease.lease}{program} {text} {what}, requested {since} ago"]
    if not lease.is_granted:
        lines.append(lease.waits_for or "it was requested just now")
        lines.append(_device(parts, lease.device))
    return {"lease": lease.lease, "granted": lease.is_granted, "lines": lines}


def bound_ms(found: WaitBound | None) -> int | None:
    """None: there is no bound, or none is known."""
    return None if found is None or math.isinf(found.total_ms) else round(found.total_ms)


def _door(known: KnownModel, door: object) -> str:
    """An open door stays open over a failover, and then names an engine that is dead."""
    match door:
        case OpenDoor() if _is_active(known, door.engine):
            return f"requests for it are sent to {door.engine}, token {door.token}"
        case RefusedDoor():
            return f"requests for it are refused: {door.sentence} [{door.code}]"
        case None:
            return "the gateway still follows the previous pool's instructions"
        case _:
            return "requests for it wait until it is awake"


def _is_active(known: KnownModel, engine: str) -> bool:
    said = (each.said for each in known.engines if each.name == engine)
    return any(each is not None and each.state == "active" for each in said)


def _device(parts: PoolParts, device: str) -> str:
    """`HOST-0: 1.2 GiB free of 8.0 GiB; chat 3.0 GiB (pinned), coder 2.0 GiB (leaving), …`"""
    pool = parts.pool.situation
    ledger = pool.books.ledger
    if device not in ledger.totals:
        return f"{device}: the memory service has not reported its size yet"
    held: dict[str, int] = {}
    rows = booked_on(parts, device)
    leaving = {row.owner for row in rows if row.leaving}
    for row in rows:
        held[row.owner] = held.get(row.owner, 0) + row.bytes
    if ledger.outside.get(device):
        held["programs outside the pool"] = ledger.outside[device]
    words = []
    for owner, size_bytes in sorted(held.items(), key=lambda each: -each[1]):
        notes = ["leaving"] if owner in leaving else []
        known = pool.models.get(owner)
        if known is not None and known.is_pinned:
            notes.append("pinned")
        words.append(f"{owner} {size(size_bytes)}" + (f" ({', '.join(notes)})" if notes else ""))
    free = size(max(0, ledger.free_bytes(device)))
    who = "; ".join(words) or "nothing is booked"
    return f"{device}: {free} free of {size(ledger.totals[device])}; {who}"


def booked_on(parts: PoolParts, device: str) -> list[PoolBooked]:
    """Who holds what of a device, by owner: a model, or `lease ID`; the largest first."""
    pool, ledger = parts.pool.situation, parts.pool.situation.books.ledger
    rows = []
    for key, size_bytes in ledger.entries.items():
        if key.device != device or not size_bytes:
            continue
        owner = pool.engines[key.owner].model if key.kind is EntryKind.BASE else key.owner
        rows.append(
            PoolBooked(
                f"lease {key.owner}" if key.kind is EntryKind.LEASE else owner,
                key.kind.value,
                size_bytes,
                key in ledger.leaving,
            )
        )
    return sorted(rows, key=lambda row: (row.owner, -row.bytes))


def _no_room(parts: PoolParts, name: str, seen: list[ModelView]) -> str:
    """Why no wait would raise it; "" while it fits beside what never yields."""
    view = next((each for each in seen if each.name == name), None)
    if view is None:
        return ""
    ledger = parts.pool.situation.books.ledger
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


def _bounds(found: WaitBound, measured: WaitBound | None, unknown: list[str]) -> list[str]:
    """The useful one first, and the guarantee behind it. The guarantee alone would say hours where
    a load takes a second, so it is left to --json until everything was measured."""
    if math.isinf(found.total_ms):
        return [
            "the longest wait has no limit: a model on its devices never cuts off requests"
            " (`cut: never`)"
        ]
    if measured is None:
        more = f" and {len(unknown) - NAMED_MAX} more" if len(unknown) > NAMED_MAX else ""
        named = ", ".join(unknown[:NAMED_MAX]) + more
        return [
            "the longest wait cannot be estimated yet: these models have never been loaded:"
            f" {named}"
        ]
    total = duration(measured.total_ms)
    lines = [f"a request waits at most {total} if each phase takes as long as before:"]
    lines += _parts(measured)
    total = duration(found.total_ms)
    return [
        *lines,
        f"and at most {total} in any case: each load or wake may take a minute or more",
    ]


def _parts(found: WaitBound) -> list[str]:
    own_ms = found.own_drain_ms + found.own_release_ms
    lines = [f"  {duration(found.max_wait_ms)}  max_wait, or less if an awake model becomes idle"]
    lines.append(f"  {duration(own_ms)}  until its previous turn has ended")
    lines += [_turn(each) for each in found.turns]
    lines.append(f"  {duration(found.raise_ms)}  until it is loaded and awake")
    if found.behind_ms:
        lines.append(f"  {duration(found.behind_ms)}  behind requests with a better priority")
    return lines


def _turn(turn: TurnBound) -> str:
    parts = {"raise": turn.raise_ms, "protected": turn.protection_ms, "drain": turn.drain_ms}
    parts |= {"release": turn.release_ms}
    words = ", ".join(f"{name} {duration(ms)}" for name, ms in parts.items() if ms)
    return f"  {duration(turn.total_ms)}  a turn of {turn.model} ({words})"


# What an engine in each state does next, on its way up.
_STEPS = {"dead": "start", "init": "start", "standby": "wake", "waking": "wake", "resting": "wake"}


def wait_of(pool: PoolSituation, known: KnownModel) -> str | None:
    """None: nothing is awaited."""
    if known.is_unknown or known.is_recovering:
        missing = [each.name for each in known.engines if each.said is None and not each.is_gone]
        if missing:
            have = "has" if len(missing) == 1 else "have"
            return f"{', '.join(missing)} {have} not reported since the pool started"
        return "an engine is changing its state and has not reported the new one yet"
    match known.state:
        case ModelState.PENDING:
            if is_blind(pool, known):
                return reasons.unheard(known.rules.devices[0])
            return known.never or known.wait or None
        case ModelState.LOADING | ModelState.WAKING:
            return _raised(known)
        case ModelState.DRAINING:
            return _also(known, _drained(pool, known))
        case ModelState.RELEASING | ModelState.UNLOADING:
            return _also(known, pool.books.why_not_free(known))
    return known.never


def next_of(pool: PoolSituation, known: KnownModel) -> str:
    """Why a model that somebody waits for does not serve yet."""
    if known.state is ModelState.FAILED:
        return known.fault
    return wait_of(pool, known) or reason_of(known)


def _also(known: KnownModel, why: str | None) -> str | None:
    """A model that makes room, and is wanted again already."""
    after = known.never or (known.wait if known.is_wanted else "")
    return "; ".join(each for each in (why, after) if each) or None


def _raised(known: KnownModel) -> str:
    if known.is_unload_ordered:
        return "waiting for all gateways to confirm that they stopped sending; then it is unloaded"
    engine = known.main()
    said = engine.said
    if said is None or not engine.is_connected:
        return f"{engine.name} is not connected to the pool"
    if not engine.has_obeyed:
        return f"{engine.name} has not answered its newest goal, {engine.goal}"
    fault = f" after a fault: {said.fault}" if said.fault else ""
    return f"waiting for {engine.name} to {_STEPS.get(said.state, 'be active')}{fault}"


def _drained(pool: PoolSituation, known: KnownModel) -> str:
    in_flight = pool.demand.in_flight(known.name)
    if in_flight:
        are = "request is" if in_flight == 1 else "requests are"
        return f"{in_flight} {are} still running"
    if not pool.demand.is_quiet(known.name, known.door_number):
        return "waiting for all gateways to confirm that they stopped sending"
    engine = known.stander()
    if engine is None:
        return "no engine holds its lock, so idleness cannot be confirmed"
    busy = engine.said.in_flight if engine.said is not None else 0
    return f"{engine.name} has {busy} requests" if busy else f"{engine.name} is not connected"
