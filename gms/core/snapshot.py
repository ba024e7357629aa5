"""What operators see of a machine: one JSON-like object, for status, metrics and the CLI. Its
instants are milliseconds of the caller's clock, which the caller's function `at` turns into times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import asdict

from gms.core.kv import KvMachine, Pool
from gms.core.region import RegionPhase, S, Session
from gms.core.weights import WeightsMachine

At = Callable[[float], str]

TOTALS = (
    *("commits_total", "offloads_total", "restages_total", "recoveries_total"),
    *("condemnations_total", "exports_total", "reclaims_total", "oom_waits_total"),
)


def weights_snapshot(machine: WeightsMachine, at: At) -> dict[str, Any]:
    """The state of a place's weights."""
    committed, staging, copy = machine.committed, machine.staging, machine.offloaded
    shown = committed or staging
    phases = [(machine.phase_shown(epoch), epoch) for epoch in machine.regions.values()]

    def size_of(*names: str) -> int:
        return sum(epoch.size_bytes for phase, epoch in phases if phase in names)

    sessions = machine.sessions.values()
    queued = (S.WAITING, S.RETURNING)
    return {
        "state": machine.state,
        "epoch": shown.id if shown else None,
        "offloaded": {"copy": copy.epoch, "size_bytes": copy.size_bytes, "digest": copy.digest}
        if copy is not None
        else None,
        "identity": dict(shown.identity) if shown and shown.identity else None,
        "layout_hash": committed.layout_hash if committed else None,
        "digest": (committed.digest or "pending") if committed else None,
        "committed_bytes": size_of("committed"),
        "staging_bytes": size_of("staging"),
        "superseded_bytes": size_of("superseded"),
        "releasing_bytes": size_of("releasing", "orphaned"),
        "capacity_bytes": machine.capacity_bytes,
        "tensors": committed.tensors if committed else 0,
        "slabs": len(committed.slab_sizes) if committed else 0,
        "sessions": [_session(s, at) for s in sessions if s.state not in queued],
        "waiting": [_waiter(s, at) for s in sessions if s.state in queued],
        "unowned": [
            {
                "epoch": epoch.id,
                "phase": phase,
                "size_bytes": epoch.size_bytes,
                "holders": list(epoch.pids),
            }
            for phase, epoch in phases
            if phase in ("releasing", "orphaned")
        ],
        "problem": machine.problem,
        **{name: getattr(machine, name) for name in TOTALS},
    }


def _client(session: Session, at: At) -> dict[str, Any]:
    request = session.request
    shown = {"engine": request.engine, "incarnation": request.incarnation}
    return {**shown, "pid": session.pid, "since": at(session.since_ms)}


def _wait(session: Session, at: At) -> dict[str, Any]:
    return {
        "reason": session.reason,
        "message": session.reason_message,
        "deadline": at(session.deadline_ms) if session.deadline_ms is not None else None,
    }


def _session(session: Session, at: At) -> dict[str, Any]:
    shown: dict[str, Any] = {
        **_client(session, at),
        "rank": getattr(session.request, "rank", 0),
        "mode": "ro" if session.state is S.READING else "rw",
        "state": str(session.state),
        "epoch": session.region,
    }
    if session.total_bytes and session.state is not S.READING:
        shown["done_bytes"], shown["total_bytes"] = session.done_bytes, session.total_bytes
    return shown


def _waiter(session: Session, at: At) -> dict[str, Any]:
    request = session.request
    asked = {"rank": getattr(request, "rank", 0), "mode": str(getattr(request, "mode", "ro"))}
    return {**_client(session, at), **asked, **_wait(session, at)}


POOL_PHASES = {
    RegionPhase.MAKING: "making",
    RegionPhase.SERVED: "idle",
    RegionPhase.RETIRED: "discarded",
    RegionPhase.FREEING: "releasing",
    RegionPhase.ORPHANED: "recovering",
}
# What operators see of the pools, the first that applies.
STATES = ("lent", "recovering", "discarded", "releasing", "making", "idle", "empty")


def state_of(machine: KvMachine) -> str:
    """One of STATES."""
    current = machine.current
    if current is not None and machine.all_holders:
        return "lent" if current.phase is RegionPhase.SERVED else "making"
    shown = {POOL_PHASES[pool.phase] for pool in machine.regions.values()}
    return next((state for state in STATES if state in shown), "empty")


def kv_snapshot(machine: KvMachine, at: At) -> dict[str, Any]:
    """The state; `at` turns one of the machine's instants into RFC 3339."""
    pool = machine.current or next(iter(machine.unowned), None)
    holders = machine.all_holders + machine.leaving
    return {
        "state": state_of(machine),
        **_pool(pool),
        "sessions": [_borrower(each, at) for each in holders],
        "waiting": [{**_borrower(each, at), **_wait(each, at)} for each in machine.waiting],
        "pools_made_total": machine.made_total,
        "pools_lent_total": machine.lent_total,
        "pools_discarded_total": machine.discards_total,
        "pools_given_up_total": machine.given_up_total,
        "recoveries_total": machine.recoveries_total,
        "stale_refusals_total": machine.stale_refusals_total,
        "full_waits_total": machine.full_waits_total,
    }


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
        "holder": asdict(holder) if holder is not None else None,
        "mapped_by": list(pool.pids) if pool else [],
    }


def _borrower(session: Session, at: At) -> dict[str, Any]:
    known = {"token": session.claimant.token, "state": str(session.state)}
    return {**_client(session, at), **known}
