"""What people and programs see: one document, online from the machine, offline from the file.

Reads, never changes. Looking for who has a witness open walks /proc, so it is done when somebody
asks or when it is worth an event, never in the path of a grant.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lockserver import state_file, witness
from lockserver.core import evidence
from lockserver.core.events import Holder
from lockserver.core.lock import Lock, LockState
from lockserver.core.machine import KINDS, Machine
from lockserver.witness import WitnessFile
from understudy.service import procfs
from understudy.service.clock import Clock, rfc3339

SCHEMA = 1
PIDS_MAX = 32  # processes named in one place; a backend with 8 ranks has a dozen


def processes_of(file: WitnessFile) -> list[dict[str, Any]]:
    """The processes that have this witness open, where they are visible from here."""
    pids = procfs.holders_of(file.dev, file.ino)[:PIDS_MAX]
    return [{"pid": pid, "name": procfs.name(pid)} for pid in pids if pid != os.getpid()]


def named(processes: list[dict[str, Any]]) -> str:
    """`pid 12 (vllm), pid 13 (vllm)`, or why there is nothing to name."""
    if not processes:
        return "processes that are not visible from this container"
    return ", ".join(f"pid {each['pid']} ({each['name']})" for each in processes)


def lock_documents(machine: Machine, clock: Clock, directory: str) -> dict[str, Any]:
    """The `locks` part of the status document."""
    return {
        name: _lock_document(lock, machine, clock, directory)
        for name, lock in machine.locks.items()
    }


def _lock_document(lock: Lock, machine: Machine, clock: Clock, directory: str) -> dict[str, Any]:
    now_ms = clock.now_ms()
    holder = lock.holder
    supervisor = machine.supervisors.get(holder.supervisor) if holder else None
    is_silent = supervisor is not None and supervisor.is_silent
    is_suspect = lock.state in (LockState.RELEASING, LockState.RECOVERING) or is_silent
    waiting_for = processes_of(holder.witness) if holder and is_suspect else []
    window_ms = max(0.0, machine.started_ms + machine.window_ms - now_ms)
    document: dict[str, Any] = {
        "kind": "fenced" if lock.is_fenced else "plain",
        "state": str(lock.state),
        "cause": lock.cause,
        "holder": None,
        "waiters": [
            {
                "engine": waiter.engine,
                "incarnation": waiter.incarnation,
                "silent": machine.supervisors[waiter.supervisor].is_silent,
                "since_mono_ms": waiter.since_ms,
            }
            for waiter in lock.waiters
        ],
        "waiting_for": waiting_for,
        "problem": _unprovable(lock, machine, directory)
        or _problem(lock, machine, waiting_for, window_ms),
        "window": {"ms": machine.window_ms, "left_ms": round(window_ms)},
        "switchover": _switchover_document(lock, machine, clock),
    }
    if holder is not None:
        process = supervisor.process if supervisor else "none"
        document["holder"] = {
            "engine": holder.engine,
            "incarnation": holder.incarnation,
            "token": holder.token,
            "since": _wall(holder.since_mono_ms, clock),
            "since_mono_ms": holder.since_mono_ms,
            "connected": supervisor is not None and supervisor.conn is not None,
            "unresponsive": is_silent or _is_overdue(lock, window_ms),
            "pid": supervisor.pid if supervisor else None,
            "evidence": "witness" if process == "none" else "pidfd+witness",
            "pidfd_source": process,
        }
    return document


def _switchover_document(lock: Lock, machine: Machine, clock: Clock) -> dict[str, Any] | None:
    """The switchover under way, if there is one."""
    found = machine.switchovers.under_way.get(lock.name)
    if found is None:
        return None
    return {
        "from": found.source.engine,
        "to": found.to,
        "pid": found.pid,
        "since": _wall(found.since_ms, clock),
        "since_mono_ms": found.since_ms,
        "deadline_mono_ms": found.deadline_ms,
        "left_ms": max(0, round(found.deadline_ms - clock.now_ms())),
        "overdue": found.is_overdue,
    }


def _is_overdue(lock: Lock, window_ms: float) -> bool:
    return lock.state is LockState.RECOVERING and window_ms <= 0


def _unprovable(lock: Lock, machine: Machine, directory: str) -> str | None:
    """Without its witness, or a seal on it, a holder's end cannot be proven: people must act."""
    holder = lock.holder
    if holder is None or not lock.is_fenced:
        return None
    found, state = witness.identify(os.path.join(directory, holder.witness.name))
    if found == holder.witness:
        if state is not witness.Probe.FREE or not evidence.is_decisive(lock, machine.supervisors):
            return None
        return (
            f"no process holds the witness {holder.witness.name}, but it cannot be sealed against"
            f" late ones: make {directory} and the files in it writable; tried again all the time"
        )
    return (
        f"the witness {holder.witness.name} was removed or replaced, so the end of {holder.engine}"
        " cannot be proven and nobody can be granted after it: once none of its processes lives,"
        " stop the lock server, move lockserver.json away and start it again"
    )


def _problem(
    lock: Lock, machine: Machine, waiting_for: list[dict[str, Any]], window_ms: float
) -> str | None:
    """What this lock waits for, for how long, and what to do; None if all is well."""
    holder = lock.holder
    supervisor = machine.supervisors.get(holder.supervisor) if holder else None
    if lock.is_unknown:
        return (
            "who holds it is not on file: waiting for a claim, or until no process outside the"
            " connected engines holds a witness in the directory; kill what should not run"
        )
    if holder is not None and lock.state is LockState.RECOVERING:
        if window_ms > 0:
            return f"waiting up to {window_ms / 1000:.0f} s to hear from {holder.engine}"
        return (
            f"{holder.engine} is unresponsive since this server started and is not replaced while"
            f" its processes live: if it hangs, kill {named(waiting_for)}"
        )
    if holder is not None and lock.state is LockState.RELEASING:
        if waiting_for:
            return f"waiting for the end of {named(waiting_for)}; kill them if they hang"
        if supervisor is not None and not lock.is_ended:
            return (
                f"waiting for {holder.engine}'s supervisor, pid {supervisor.pid}, to speak or end"
            )
        return f"waiting for the witness {holder.witness.name}, held by {named(waiting_for)}"
    if holder is not None and supervisor is not None and supervisor.is_silent:
        return (
            f"{holder.engine} is unresponsive and is not replaced while its processes live: if it"
            f" hangs, kill its supervisor, pid {supervisor.pid}, and {named(waiting_for)}"
        )
    if lock.state is LockState.FREE and machine.ledger.problem is not None:
        return machine.ledger.problem
    return None


def supervisor_documents(machine: Machine, clock: Clock) -> list[dict[str, Any]]:
    """The `supervisors` part: who is known here, connected or not."""
    now_ms = clock.now_ms()
    return [
        {
            "engine": each.engine,
            "supervisor": each.id,
            "incarnation": each.incarnation,
            "pid": each.pid,
            "pidfd_source": each.process,
            "connected": each.conn is not None,
            "silent": each.is_silent,
            "heard_ms_ago": round(now_ms - each.heard_ms),
            "wants": list(each.locks),
        }
        for each in machine.supervisors.values()
    ]


def offline(directory: str) -> dict[str, Any] | None:
    """The view from the state file while no server answers; None if there is none either.

    Raises:
        OSError: it cannot be read.
    """
    found = state_file.read(directory, KINDS)
    if found is None:
        return None
    record = found.record
    return {
        "schema": SCHEMA,
        "as_of_event_id": 0,
        "server": {"pid": None, "since": None, "dir": directory, "online": False},
        "token": record.token,
        "locks": {name: _offline_lock(directory, name, record.holders) for name in KINDS},
        "supervisors": [],
        "service": {},
        "last_grants": [],
        "problem": found.problem,
    }


def _offline_lock(directory: str, name: str, holders: Mapping[str, Holder]) -> dict[str, Any]:
    holder = holders.get(name)
    document: dict[str, Any] = {
        "kind": "fenced" if KINDS[name] else "plain",
        "state": "unknown",
        "holder": None,
        "waiters": [],
        "waiting_for": [],
        "problem": "no lock server answers; this is what its state file says",
    }
    if holder is not None:
        path = os.path.join(directory, holder.witness.name)
        file, probe = witness.identify(path)
        is_same = file == holder.witness
        document["holder"] = {
            "engine": holder.engine,
            "incarnation": holder.incarnation,
            "token": holder.token,
            "since_mono_ms": holder.since_mono_ms,
            "witness": str(probe) if is_same else "unproven",
        }
        document["waiting_for"] = processes_of(holder.witness)
    return document


def _wall(mono_ms: float, clock: Clock) -> str:
    return rfc3339(clock.wall() - timedelta(milliseconds=clock.now_ms() - mono_ms))
