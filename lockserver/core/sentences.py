"""Every event and refusal of the lock machine as operators read it. Decides nothing.

`EVENTS` is the table: the severity of an event and its sentence, whose words in braces are those of
its data, or given beside it. Where one event has several sentences, a word behind a slash tells
them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockserver.core.events import Happened, Holder, RefuseConnection, Wanted
from lockserver.core.leases import Lease
from lockserver.core.lock import Lock, LockState, Signal, Waiter
from lockserver.core.supervisors import SupervisorRecord

EVENTS: Mapping[str, tuple[str, str]] = {
    "lock.recovering/unknown": (
        "warning",
        "the holder of the {lock} lock is not on file; waiting for a claim with a token, or until"
        " no unknown process holds a witness",
    ),
    "lock.recovering": (
        "info",
        "{engine} held the {lock} lock, token {token}; waiting for it to reconnect",
    ),
    "lock.queue": ("info", "{engine} is waiting for the {lock} lock"),
    "lock.confirmed": ("info", "{engine} reconnected and keeps the {lock} lock, token {token}"),
    "lock.told_to_end": ("info", "{engine}, which holds the {lock} lock, was told to end"),
    "lock.claimed": ("warning", "{engine} claims the {lock} lock with token {token}: accepted"),
    "lock.releasing": ("info", "{engine} is losing the {lock} lock: {why}"),
    "lock.releasing/not_wanted": ("info", "{engine} is releasing the {lock} lock"),
    "lock.releasing/handed_over": (
        "info",
        "{engine} has handed the {lock} lock over and stays as a standby",
    ),
    "lock.releasing/silent": ("warning", "{engine} is silent and none of its processes is alive"),
    "lock.free": ("info", "{lock} lock is free: {why}"),
    "lock.granted": ("info", "{lock} lock granted to {engine}, token {token}"),
    "lock.heard": ("info", "{engine} sends heartbeats again"),
    "lock.silent": (
        "warning",
        "{engine} is silent and is skipped until it sends heartbeats again",
    ),
    "lock.unresponsive/leased": (
        "warning",
        "{engine} holds the {lock} lock and is silent; no other engine is granted it before its"
        " lease expires",
    ),
    "lock.unresponsive": (
        "warning",
        "{engine} holds the {lock} lock and is silent; no other engine is granted it while its"
        " processes are alive: if it hangs, kill its supervisor (pid {pid}) and them",
    ),
    "lock.unresponsive/before": (
        "warning",
        "{engine} held the {lock} lock (token {token}) before this server started and has not"
        " reconnected, but its processes are alive: if it hangs, kill them",
    ),
    "lock.waiting_evidence/unknown": (
        "warning",
        "the holder of the {lock} lock is not on file, and engines that are not connected hold"
        " witnesses in the directory; kill their processes",
    ),
    "lock.waiting_evidence/leased": (
        "warning",
        "{lock} lock is waiting for {engine} to report that its processes have ended, or for its"
        " lease to expire",
    ),
    "lock.lease_expired": ("warning", "the lease of {engine} has expired"),
    "lock.waiting_evidence": (
        "warning",
        "{lock} lock is waiting: processes of {incarnation} are still alive",
    ),
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


def event(
    kind: str,
    data: Mapping[str, Any],
    *,
    evidence: Holder | None = None,
    **words: Any,
) -> Happened:
    """An event of this kind; `evidence`: the holder whose processes the shell names."""
    severity, text = EVENTS[kind]
    witness = evidence.witness if evidence is not None else None
    message = text.format(**data, **words)
    return Happened(kind.partition("/")[0], message, severity, data, witness)


def facts(lock: Lock, holder: Holder, **more: Any) -> dict[str, Any]:
    return {
        "lock": lock.name,
        "engine": holder.engine,
        "incarnation": holder.incarnation,
        "token": holder.token,
        **more,
    }


def of_holder(kind: str, lock: Lock, holder: Holder) -> Happened:
    return event(kind, facts(lock, holder))


def of_supervisor(kind: str, supervisor: SupervisorRecord) -> Happened:
    return event(kind, {"engine": supervisor.engine, "incarnation": supervisor.incarnation})


def recovering(lock: Lock) -> Happened:
    if lock.holder is None:
        return event("lock.recovering/unknown", {"lock": lock.name})
    return of_holder("lock.recovering", lock, lock.holder)


def queued(lock: Lock, waiter: Waiter) -> Happened:
    data = {"lock": lock.name, "engine": waiter.engine, "incarnation": waiter.incarnation}
    return event("lock.queue", data)


def releasing(lock: Lock, holder: Holder) -> Happened:
    data = facts(lock, holder, cause=lock.cause, lost_mono_ms=lock.lost_ms)
    is_told = lock.cause in (Signal.NOT_WANTED, Signal.HANDED_OVER)
    kind = f"lock.releasing/{lock.cause}" if is_told else "lock.releasing"
    return event(kind, data, why=str(lock.cause).replace("_", " "))


def dead_in_silence(lock: Lock, holder: Holder, now_ms: float) -> Happened:
    data = facts(lock, holder, cause="silent", lost_mono_ms=now_ms)
    return event("lock.releasing/silent", data)


def freed(lock: Lock, holder: Holder | None, *, is_handed_over: bool) -> Happened:
    end = "is gone" if lock.is_fenced else "no longer wants it or is gone"
    end = "has handed it over" if is_handed_over else end
    incarnation = holder.incarnation if holder else None
    data = {
        "lock": lock.name,
        "incarnation": incarnation,
        "lost_mono_ms": lock.lost_ms,
        "fenced_mono_ms": lock.fenced_ms,
    }
    why = f"{incarnation} {end}" if holder else "no engine can hold it"
    return event("lock.free", data, why=why)


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


def unresponsive(lock: Lock, holder: Holder, supervisor: SupervisorRecord) -> Happened:
    if holder.lease_ms is not None:
        return of_holder("lock.unresponsive/leased", lock, holder)
    data = facts(lock, holder, pid=supervisor.pid)
    return event("lock.unresponsive", data, evidence=holder)


def overdue(lock: Lock) -> Happened:
    """What a lock that cannot be granted has been waiting for, for longer than an exit takes."""
    holder = lock.holder
    if holder is None:
        return event("lock.waiting_evidence/unknown", {"lock": lock.name})
    if holder.lease_ms is not None:
        return of_holder("lock.waiting_evidence/leased", lock, holder)
    is_late = lock.state is LockState.RECOVERING
    kind = "lock.unresponsive/before" if is_late else "lock.waiting_evidence"
    return event(kind, facts(lock, holder), evidence=holder)


def lease_expired(lease: Lease) -> Happened:
    data = {
        "engine": lease.engine,
        "incarnation": lease.incarnation,
        "lease_ms": lease.lease_ms,
    }
    return event("lock.lease_expired", data)


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
    state, name = want.witness_state, want.msg.witness
    why = f"requested the {lock.name} lock, but no process holds its witness {name} ({state})"
    return _refusal("lock.witness_unproven", lock, want, why, witness=name, state=str(state))


def unseen(lock: Lock, want: Wanted) -> RefuseConnection:
    why = (
        f"must ask for the {lock.name} lock again: its witness cannot be looked at now, because"
        " descriptors or memory are short on the lock server's machine"
    )
    return _refusal("lock.witness_unseen", lock, want, why)


def incarnation_ended(lock: Lock, want: Wanted) -> RefuseConnection:
    why = f"has released the {lock.name} lock; only a new incarnation may request it again"
    return _refusal("lock.incarnation_ended", lock, want, why)


def _refusal(code: str, lock: Lock, want: Wanted, why: str, **details: Any) -> RefuseConnection:
    details = {"lock": lock.name, "incarnation": want.msg.incarnation, **details}
    return RefuseConnection(want.conn, code, f"{want.msg.incarnation} {why}", details)
