"""A device's state as one JSON-like object, for status, metrics and the CLI.

Pure: instants are milliseconds of the caller's clock, which its function `at` turns into times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gms.core.device import Device
from gms.core.events import EpochPhase, SessionState
from gms.core.state import QUEUED, Epoch, Session


def snapshot(device: Device, at: Callable[[float], str]) -> dict[str, Any]:
    """The device's state; `at` turns one of the machine's instants into RFC 3339."""
    committed, staging = device.committed, device.staging
    shown = committed or staging
    return {
        "state": device.state,
        "epoch": shown.id if shown else None,
        "offloaded": _offloaded(device),
        "identity": dict(shown.identity) if shown and shown.identity else None,
        "layout_hash": committed.layout_hash if committed else None,
        "digest": (committed.digest or "pending") if committed else None,
        "committed_bytes": committed.size_bytes if committed else 0,
        "staging_bytes": staging.size_bytes if staging else 0,
        "superseded_bytes": _bytes(device, EpochPhase.SUPERSEDED),
        "releasing_bytes": _bytes(device, EpochPhase.RELEASING, EpochPhase.ORPHANED),
        "capacity_bytes": device.capacity_bytes,
        "tensors": committed.tensors if committed else 0,
        "slabs": len(committed.slab_sizes) if committed else 0,
        "sessions": [_session(s, at) for s in device.sessions.values() if s.state not in QUEUED],
        "waiting": [_waiter(s, at) for s in device.sessions.values() if s.state in QUEUED],
        "unowned": [
            _unowned(e)
            for e in device.epochs.values()
            if e.phase in (EpochPhase.RELEASING, EpochPhase.ORPHANED)
        ],
        "problem": device.problem,
        "commits_total": device.commits_total,
        "offloads_total": device.offloads_total,
        "restages_total": device.restages_total,
        "recoveries_total": device.recoveries_total,
        "condemnations_total": device.condemnations_total,
        "exports_total": device.exports_total,
        "reclaims_total": device.reclaims_total,
        "oom_waits_total": device.oom_waits_total,
    }


def epochs_in_full(device: Device) -> list[dict[str, Any]]:
    """Every epoch with its slabs, readers and manifest (as bytes): what `gms inspect` shows."""
    return [
        {
            "epoch": epoch.id,
            "phase": str(epoch.phase),
            "slab_sizes": list(epoch.slab_sizes),
            "layout_hash": epoch.layout_hash or None,
            "identity": dict(epoch.identity) if epoch.identity else None,
            "readers": [device.sessions[s].label for s in sorted(epoch.readers)],
            "holders": list(epoch.holders),
            "manifest": epoch.manifest,
        }
        for epoch in device.epochs.values()
    ]


def _session(session: Session, at: Callable[[float], str]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "engine": session.request.engine,
        "incarnation": session.request.incarnation,
        "rank": session.request.rank,
        "pid": session.pid,
        "mode": "ro" if session.state is SessionState.READING else "rw",
        "state": str(session.state),
        "epoch": session.epoch,
        "since": at(session.since_ms),
    }
    if session.total_bytes and session.state is not SessionState.READING:
        shown["done_bytes"], shown["total_bytes"] = session.done_bytes, session.total_bytes
    return shown


def _waiter(session: Session, at: Callable[[float], str]) -> dict[str, Any]:
    return {
        "engine": session.request.engine,
        "incarnation": session.request.incarnation,
        "rank": session.request.rank,
        "pid": session.pid,
        "mode": str(session.request.mode),
        "reason": session.reason,
        "message": session.reason_message,
        "since": at(session.since_ms),
        "deadline": at(session.deadline_ms) if session.deadline_ms is not None else None,
    }


def _unowned(epoch: Epoch) -> dict[str, Any]:
    return {
        "epoch": epoch.id,
        "phase": str(epoch.phase),
        "size_bytes": epoch.size_bytes,
        "holders": list(epoch.holders),
    }


def _offloaded(device: Device) -> dict[str, Any] | None:
    """The host copy that stands for what was committed."""
    copy = device.offloaded
    if copy is None:
        return None
    return {"copy": copy.epoch, "size_bytes": copy.size_bytes, "digest": copy.digest}


def _bytes(device: Device, *phases: EpochPhase) -> int:
    return sum(e.size_bytes for e in device.epochs.values() if e.phase in phases)
