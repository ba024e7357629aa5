"""The plan and the books, as the status document has them: who is next, and who holds what."""

from __future__ import annotations

from typing import Any

from pool.core.known import KnownModel
from pool.core.states import HOST, EntryKey, EntryKind, ModelState
from pool.server.parts import PoolParts
from pool.server.waits import next_of

RISING = frozenset({ModelState.LOADING, ModelState.WAKING})
LEAVING = frozenset({ModelState.DRAINING, ModelState.RELEASING, ModelState.UNLOADING})


def plan(parts: PoolParts) -> list[dict[str, Any]]:
    """What happens next to each model that somebody waits for and that does not serve yet; who has
    waited longest, counted in steps of priority, is first."""
    pool, now_ms = parts.pool.situation, parts.clock.now_ms()
    rows = []
    for name, known in pool.models.items():
        tickets = pool.demand.tickets(name)
        since_ms = [each.since_ms for each in tickets]
        if known.load_ordered_ms is not None:
            since_ms.append(known.load_ordered_ms)
        if not since_ms or known.model.state is ModelState.AWAKE:
            continue
        priority = min((each.priority for each in tickets), default=known.rules.priority)
        waited_ms = max(0.0, now_ms - min(since_ms))
        level = priority - waited_ms // max(1.0, pool.rules.starve_after_ms)
        row = {
            "model": name,
            "step": _step(known),
            "why": next_of(parts.pool.situation, known),
            "victims": list(known.victims) if known.has_plan else [],
            "tickets": len(tickets),
            "waited_ms": round(waited_ms),
        }
        rows.append((level, -waited_ms, row))
    return [row for _, _, row in sorted(rows, key=lambda each: each[:2])]


def _step(known: KnownModel) -> str:
    """In one word."""
    state = known.model.state
    if known.is_unknown or known.model.is_recovering:
        return "recovering"
    if state is ModelState.FAILED:
        return "failed"
    if known.never is not None:
        return "refused"
    if state in RISING:
        return "rises"
    if state in LEAVING:
        return "next_turn"
    return "switches" if known.has_plan else "waits"


def booked_on(parts: PoolParts, device: str) -> list[dict[str, Any]]:
    """Who holds what of a device, the largest first."""
    ledger = parts.pool.situation.books.ledger
    rows = [
        {
            "owner": owner_of(parts, key),
            "kind": key.kind.value,
            "bytes": size_bytes,
            "leaving": key in ledger.leaving,
        }
        for key, size_bytes in ledger.entries.items()
        if key.device == device and size_bytes
    ]
    return sorted(rows, key=lambda row: (row["owner"], -row["bytes"]))


def owner_of(parts: PoolParts, key: EntryKey) -> str:
    """A model, or `lease ID`."""
    if key.kind is EntryKind.LEASE:
        return f"lease {key.owner}"
    engine = parts.pool.situation.engines.get(key.owner)
    return engine.model if engine is not None and key.kind is EntryKind.BASE else key.owner


def margin_of(parts: PoolParts, device: str) -> int:
    return 0 if device == HOST else parts.pool.situation.rules.margin_bytes
