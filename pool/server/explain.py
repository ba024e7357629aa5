"""Why a model is where it is, what it waits for, and how long that can last: for people.

It reads the core, and makes the same views of it that the policy gets.
"""

from __future__ import annotations

import math
from typing import Any

from plumbing.part.format import duration, size
from pool.core.bound import TurnBound, WaitBound, bound
from pool.core.doors import reason_of
from pool.core.events import OpenDoor, Order, RefusedDoor
from pool.core.known import KnownModel
from pool.core.planning import is_blind
from pool.core.states import EntryKind, ModelState
from pool.core.view import ModelView
from pool.core.views import ticket_of, view_of
from pool.server.parts import PoolParts

# States in which there is nothing left to do for an order.
DONE = {
    Order.LOAD: (ModelState.AWAKE,),
    Order.SLEEP: (ModelState.WARM, ModelState.OFFLOADED, ModelState.COLD),
    Order.UNLOAD: (ModelState.COLD,),
}


def document(parts: PoolParts, model: str | None) -> dict[str, Any]:
    """What `pool explain` shows."""
    names = [model] if model is not None else list(parts.told.models)
    return {"schema": 1, "models": [_model(parts, name) for name in names]}


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


def bound_of(parts: PoolParts, name: str, seen: list[ModelView]) -> WaitBound | None:
    """How long a ticket of this model can wait; None while that is not known."""
    pool = parts.pool.situation
    if all(view.name != name for view in seen):
        return None
    return bound(name, pool.models[name].rules.priority, seen, pool.rules)


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
    told = parts.told.models[name]
    since = duration(parts.clock.now_ms() - told.since_ms)
    text = f"{name} has been {known.model.state} for {since}"
    if told.reason:
        text += f" ({told.reason})"
    why = wait_of(known)
    if why:
        text += f"; it waits: {why}"
    if told.alarm is not None:
        text += f"; {told.alarm}"
    return text


def next_of(known: KnownModel) -> str:
    """Why a model that somebody waits for does not serve yet."""
    if known.model.state is ModelState.FAILED:
        return known.model.fault
    return wait_of(known) or reason_of(known)


def wait_of(known: KnownModel) -> str | None:
    """What it waits for, if it does."""
    if known.is_unknown or known.model.is_recovering:
        missing = [each.name for each in known.engines if each.said is None and not each.is_gone]
        if missing:
            have = "has" if len(missing) == 1 else "have"
            return f"{', '.join(missing)} {have} not been heard since the pool started"
        return "an engine is changing its state, and has not said yet what it will be"
    if known.never is not None:
        return known.never
    if known.model.state in (ModelState.DRAINING, ModelState.RELEASING) and known.model.is_wanted:
        return known.wait or None
    return known.wait or None if known.model.state is ModelState.PENDING else None


def _model(parts: PoolParts, name: str) -> dict[str, Any]:
    pool = parts.pool.situation
    known, told, now_ms = pool.models[name], parts.told.models[name], parts.clock.now_ms()
    tickets = pool.demand.tickets(name)
    found = bound_of(parts, name, views(parts))
    in_flight = pool.demand.in_flight(name)
    lines = [sentence(parts, name), _door(told.door), _pins(known)]
    if in_flight:
        is_full = tickets and isinstance(told.door, OpenDoor)
        full = ", as many as it may have (`max_in_flight`)" if is_full else ""
        lines.append(f"its engine has {in_flight} request{'s' * (in_flight > 1)}{full}")
    if tickets:
        oldest = duration(now_ms - min(each.since_ms for each in tickets))
        who = "1 request waits" if len(tickets) == 1 else f"{len(tickets)} requests wait"
        lines.append(f"{who} for it, the oldest for {oldest}")
    lines += [_device(parts, device) for device in known.rules.devices]
    if found is not None:
        lines += _bound(found)
    return {
        "model": name,
        "state": known.model.state.value,
        "lines": [line for line in lines if line],
        "bound_ms": bound_ms(found),
    }


def bound_ms(found: WaitBound | None) -> int | None:
    """None: there is no bound, or none is known."""
    return None if found is None or math.isinf(found.total_ms) else round(found.total_ms)


def _door(door: object) -> str:
    match door:
        case OpenDoor():
            return f"its requests go to {door.engine}, token {door.token}"
        case RefusedDoor():
            return f"its requests are refused: {door.sentence} [{door.code}]"
        case None:
            return "the gateway still obeys what the previous pool told it"
        case _:
            return "its requests wait"


def _pins(known: KnownModel) -> str:
    if known.is_pinned:
        return "it is pinned: it never yields or rests, and is unloaded only with --force"
    return ""


def _device(parts: PoolParts, device: str) -> str:
    """`HOST-0: 1.2 GiB free of 8.0 GiB; chat 3.0 GiB (pinned), coder 2.0 GiB (leaving), …`"""
    pool = parts.pool.situation
    ledger = pool.books.ledger
    if device not in ledger.totals:
        return f"{device}: the memory service has not said yet how large it is"
    held: dict[str, int] = {}
    leaving: set[str] = set()
    for key, size_bytes in ledger.entries.items():
        if key.device == device and size_bytes:
            engine = pool.engines.get(key.owner)
            owner = engine.model if engine is not None else key.owner
            owner = f"lease {owner}" if key.kind is EntryKind.LEASE else owner
            held[owner] = held.get(owner, 0) + size_bytes
            if key in ledger.leaving:
                leaving.add(owner)
    if ledger.outside.get(device):
        held["programs outside the pool"] = ledger.outside[device]
    words = []
    for owner, size_bytes in sorted(held.items(), key=lambda each: -each[1]):
        notes = [name for name, found in (("leaving", owner in leaving),) if found]
        known = pool.models.get(owner)
        if known is not None and known.is_pinned:
            notes.append("pinned")
        words.append(f"{owner} {size(size_bytes)}" + (f" ({', '.join(notes)})" if notes else ""))
    free = size(max(0, ledger.free_bytes(device)))
    who = "; ".join(words) or "nothing is booked"
    return f"{device}: {free} free of {size(ledger.totals[device])}; {who}"


def _bound(found: WaitBound) -> list[str]:
    if math.isinf(found.total_ms):
        return [
            "a wait has no bound: a model on its devices never cuts its requests (`cut: never`)"
        ]
    lines = [f"a request waits for {duration(found.total_ms)} at most:"]
    own_ms = found.own_drain_ms + found.own_release_ms
    lines.append(f"  {duration(found.max_wait_ms)}  max_wait")
    lines.append(f"  {duration(own_ms)}  until it has left its own last turn")
    lines += [_turn(each) for each in found.turns]
    lines.append(f"  {duration(found.raise_ms)}  until it is loaded and awake")
    if found.behind_ms:
        lines.append(f"  {duration(found.behind_ms)}  behind requests of a better priority")
    return lines


def _turn(turn: TurnBound) -> str:
    parts = {"raise": turn.raise_ms, "protected": turn.protection_ms, "drain": turn.drain_ms}
    parts |= {"release": turn.release_ms}
    words = ", ".join(f"{name} {duration(ms)}" for name, ms in parts.items() if ms)
    return f"  {duration(turn.total_ms)}  a turn of {turn.model} ({words})"
