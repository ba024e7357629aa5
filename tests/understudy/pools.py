"""Status documents of a pool, as `pool.server.server` makes them: two models on one device."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30
SINCE = "2030-01-01T11:59:00.000Z"


def model(name: str, state: str, **changes: Any) -> dict[str, Any]:
    engine = {"active": "active", "awake": "active", "warm": "resting"}.get(state, "dead")
    return {
        "model": name,
        "state": state,
        "since": SINCE,
        "for_ms": 60_000,
        "reason": "because",
        "waits_for": None,
        "fault": None,
        "tier": "awake" if state == "awake" else "warm",
        "pinned": False,
        "recovering": False,
        "estimated": False,
        "sizes": None,
        "tickets": 0,
        "oldest_ticket_ms": None,
        "parked": 0,
        "in_flight": 2 if state == "awake" else 0,
        "holder": {"engine": f"{name}-0", "token": 7} if state == "awake" else None,
        "engines": [{"engine": f"{name}-0", "shadow": False, "state": engine, "goal": state}],
        "bytes": {"HOST-0": {"weights": 2 * GIB}},
        "door": {"number": 1, "type": "open", "engine": f"{name}-0", "token": 7},
        "refused": None,
        "expected_ms": None,
        "measured_bound_ms": 900,
        "bound_ms": 45_000,
        "alarm": None,
        **changes,
    }


def device(**changes: Any) -> dict[str, Any]:
    return {
        "device": "HOST-0",
        "total_bytes": 16 * GIB,
        "free_bytes": 10 * GIB,
        "booked_bytes": 4 * GIB,
        "outside_bytes": 0,
        "margin_bytes": 2 * GIB,
        "booked": [
            {"owner": "chat", "kind": "weights", "bytes": 2 * GIB, "leaving": False},
            {"owner": "coder", "kind": "kv", "bytes": 2 * GIB, "leaving": True},
        ],
        **changes,
    }


def pool(*models: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "online": True,
        "pid": 5,
        "recovering": False,
        "models": list(models) or [model("chat", "awake"), model("coder", "warm")],
        "devices": [device()],
        "leases": [],
        "problems": [],
        "changed": {},
        **changes,
    }
