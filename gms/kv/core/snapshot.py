"""The KV memory of one device as one JSON-like object, for status, metrics and the CLI.

Pure: instants are milliseconds of the caller's clock, which its function `at` turns into times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gms.kv.core.events import PoolPhase
from gms.kv.core.machine import KvMachine
from gms.kv.core.state import KvBorrower, Pool

# What operators see of the pools, the first that applies.
STATES = ("lent", "recovering", "discarded", "releasing", "making", "idle", "empty")


def state_of(machine: KvMachine) -> str:
    """One of STATES."""
    pools = machine.pools
    if pools.current is not None and machine.borrowers.holders:
        return "lent" if pools.current.phase is PoolPhase.KEPT else "making"
    names = {
        PoolPhase.ORPHANED: "recovering",
        PoolPhase.DISCARDED: "discarded",
        PoolPhase.RELEASING: "releasing",
        PoolPhase.MAKING: "making",
        PoolPhase.KEPT: "idle",
    }
    shown = {names[pool.phase] for pool in pools.by_id.values() if pool.phase in names}
    return next((state for state in STATES if state in shown), "empty")


def kv_snapshot(machine: KvMachine, at: Callable[[float], str]) -> dict[str, Any]:
    """The state; `at` turns one of the machine's instants into RFC 3339."""
    pool = machine.pools.current or next(iter(machine.pools.unowned), None)
    return {
        "state": state_of(machine),
        **_pool(pool),
        "sessions": [
            _session(each, at) for each in machine.borrowers.holders + machine.borrowers.leaving
        ],
        "waiting": [_waiter(each, at) for each in machine.borrowers.waiting],
        "pools_made_total": machine.made_total,
        "pools_lent_total": machine.lent_total,
        "pools_discarded_total": machine.pools.discards_total,
        "pools_given_up_total": machine.pools.given_up_total,
        "recoveries_total": machine.pools.recoveries_total,
        "stale_refusals_total": machine.borrowers.stale_refusals_total,
        "full_waits_total": machine.full_waits_total,
    }


def pools_in_full(machine: KvMachine) -> list[dict[str, Any]]:
    """Every pool with its slabs: what `gms inspect` shows."""
    return [
        {**_pool(pool), "phase": str(pool.phase), "slab_sizes": list(pool.slab_sizes)}
        for pool in machine.pools.by_id.values()
    ]


def _pool(pool: Pool | None) -> dict[str, Any]:
    holder = pool.holder if pool is not None else None
    return {
        "pool": pool.id if pool else None,
        "pool_bytes": sum(pool.slab_sizes) if pool else 0,
        "index_bytes": pool.index_bytes if pool and pool.slab_sizes else 0,
        "slabs": len(pool.slab_sizes) if pool else 0,
        "is_written": bool(pool and pool.has_begun),
        "discarded": (pool.discarded or None) if pool else None,
        "failed_adoptions": pool.failed_adoptions if pool else 0,
        "holder": {
            "engine": holder.engine,
            "incarnation": holder.incarnation,
            "token": holder.token,
            "era": holder.era,
        }
        if holder is not None
        else None,
        "mapped_by": list(pool.pids) if pool else [],
    }


def _session(session: KvBorrower, at: Callable[[float], str]) -> dict[str, Any]:
    claimant = session.claimant
    return {
        "engine": claimant.engine,
        "incarnation": claimant.incarnation,
        "token": claimant.token,
        "pid": session.pid,
        "state": str(session.state),
        "since": at(session.since_ms),
    }


def _waiter(session: KvBorrower, at: Callable[[float], str]) -> dict[str, Any]:
    return {
        **_session(session, at),
        "reason": session.reason,
        "message": session.reason_message,
        "deadline": at(session.deadline_ms) if session.deadline_ms is not None else None,
    }
