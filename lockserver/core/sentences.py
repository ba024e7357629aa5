"""Every event and refusal of the lock machine as operators read it. Decides nothing.

`EVENTS` is the table: the severity of an event and its sentence, whose words in braces are those of
its data, or given beside it. What a wait needs to end is in the status document, not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockserver.core.events import Happened, Holder, RefuseConnection, Wanted
from lockserver.core.leases import Lease
from lockserver.core.lock import Lock, LockState, Waiter
from lockserver.core.supervisors import SupervisorRecord

EVENTS: Mapping[str, tuple[str, str]] = {
    "lock.recovering": ("info", "{lock} lock: waiting for its holder, {who}, to reconnect"),
    "lock.queue": ("info", "{engine} is waiting for the {lock} lock"),
    "lock.confirmed": ("info", "{engine} reconnected and keeps the {lock} lock, token {token}"),
    "lock.told_to_end": ("info", "{engine}, which holds the {lock} lock, was told to end"),
    "lock.claimed": ("warning", "{engine} claims the {lock} lock with token {token}: accepted"),
    "lock.releasing": ("info", "{engine} is losing the {lock} lock: {why}"),
    "lock.free": ("info", "{lock} lock is free: {why}"),
    "lock.granted": ("info", "{lock} lock granted to {engine}, token {token}"),
    "lock.heard": ("info", "{engine} sends heartbeats again"),
    "lock.silent": ("warning", "{engine} is silent, and skipped until it sends heartbeats again"),
    "lock.unresponsive": (
        "warning",
        "{engine} holds the {lock} lock and is silent; no other engine is granted it while its"
        " processes are alive or its lease is valid: see `lockserver status`",
    ),
    "lock.waiting_evidence": (
        "warning",
        "{lock} lock is waiting for the end of its last holder, {who}: see `lockserver status`",
    ),
    "lock.lease_expired": ("warning", "the lease of {engine} has expired"),
    "lock.switchover": (
        "info",
        "{by} asked {engine} to hand the {lock} lock over to {to}{streams}",
    ),
    "lock.switchover_refused": ("warning", "the switchover requested by {by} is refused: {why}"),
    "lock.switchover_overdue": (
        "warning",
        "{from} has not handed the {lock} lock over to {to} within {waited_s:.1f} s; the handover"
        " continues: {from} finishes its requests within its drain budget, and {to} is next if it"
        " is still waiting then",
    ),
    "lock.switchover_failed": ("warning", "{why}"),
    "lock.switched_over": (
        "info",
        "{from} handed the {lock} lock over to {engine} in {took_ms:.0f} ms",
    ),
}


def event(kind: str, data: Mapping[str, Any], **words: Any) -> Happened:
    severity, text = EVENTS[kind]
    return Happened(kind, text.format(**data, **words), severity, data)


def facts(lock: Lock, holder: Holder | Waiter, **more: Any) -> dict[str, Any]:
    token = {"token": holder.token} if isinstance(holder, Holder) else {}
    who = {"lock": lock.name, "engine": holder.engine, "incarnation": holder.incarnation}
    return who | token | more


def of_holder(kind: str, lock: Lock, holder: Holder | Waiter) -> Happened:
    return event(kind, facts(lock, holder))


def of_supervisor(kind: str, supervisor: SupervisorRecord | Lease) -> Happened:
    return event(kind, {"engine": supervisor.engine, "incarnation": supervisor.incarnation})


def of_wait(kind: str, lock: Lock) -> Happened:
    """What a lock waits for whose last holder may be alive, on file or not."""
    holder = lock.holder
    if holder is None:
        return event(kind, {"lock": lock.name}, who="which is not on file")
    return event(kind, facts(lock, holder), who=holder.incarnation)


def overdue(lock: Lock) -> Happened:
    """What a lock that cannot be granted has been waiting for, for longer than an exit takes."""
    is_late = lock.state is LockState.RECOVERING and lock.holder is not None
    return of_wait("lock.unresponsive" if is_late else "lock.waiting_evidence", lock)


def releasing(lock: Lock, holder: Holder, cause: str | None, lost_ms: float | None) -> Happened:
    data = facts(lock, holder, cause=cause, lost_mono_ms=lost_ms)
    return event("lock.releasing", data, why=str(cause).replace("_", " "))


def freed(lock: Lock, holder: Holder | None, *, is_handed_over: bool) -> Happened:
    end = "has handed it over" if is_handed_over else "is gone"
    incarnation = holder.incarnation if holder else None
    data = {
        "lock": lock.name,
        "incarnation": incarnation,
        "lost_mono_ms": lock.lost_ms,
        "fenced_mono_ms": lock.fenced_ms,
    }
    return event("lock.free", data, why=f"{incarnation} {end}" if holder else "nobody holds it")


def granted(lock: Lock, holder: Holder, waiter: Waiter, now_ms: float) -> Happened:
    """Must be called before the lock changes: it reports what was lost and when it was fenced."""
    previous = lock.previous
    data = facts(
        lock,
        holder,
        lost_mono_ms=lock.lost_ms,
        fenced_mono_ms=lock.fenced_ms,
        contended=previous is not None and previous.engine != holder.engine,
        previous=previous.incarnation if previous else None,
        waited_ms=round(now_ms - waiter.since_ms, 3),
    )
    return event("lock.granted", data)


def requester(pid: int) -> str:
    return f"pid {pid}" if pid else "a process that is not visible from here"


# ---------------------------------------------------------------------- refusals


def stale_claim(lock: Lock, want: Wanted, claimed: int) -> RefuseConnection:
    holder = "no engine holds it"
    if lock.holder is not None:
        holder = f"{lock.holder.engine} holds it with token {lock.holder.token}"
    elif lock.is_unknown:
        holder = "no process holds its witness, so nothing proves that it is alive"
    why = f"no longer holds the {lock.name} lock with token {claimed}: {holder}"
    return _refusal("lock.stale_claim", lock, want, why, token=claimed)


def unproven(lock: Lock, want: Wanted) -> RefuseConnection:
    state = want.witness_state
    why = f"requested the {lock.name} lock, but no process holds its witness ({state})"
    return _refusal("lock.witness_unproven", lock, want, why, state=str(state))


def incarnation_ended(lock: Lock, want: Wanted) -> RefuseConnection:
    why = f"has released the {lock.name} lock; only a new incarnation may request it again"
    return _refusal("lock.incarnation_ended", lock, want, why)


def _refusal(code: str, lock: Lock, want: Wanted, why: str, **details: Any) -> RefuseConnection:
    details = {"lock": lock.name, "incarnation": want.msg.incarnation, **details}
    return RefuseConnection(want.conn, code, f"{want.msg.incarnation} {why}", details)
