"""Every event and refusal of the lock machine as operators read it. Decides nothing."""

from __future__ import annotations

from typing import Any

from lockserver.core.events import Happened, Holder, RefuseConnection, SwitchOverAsked, Wanted
from lockserver.core.lock import Lock, LockState, Signal, Waiter
from lockserver.core.supervisors import SupervisorRecord


def facts(lock: Lock, holder: Holder) -> dict[str, Any]:
    return {
        "lock": lock.name,
        "engine": holder.engine,
        "incarnation": holder.incarnation,
        "token": holder.token,
    }


# ---------------------------------------------------------------------- refusals


def stale_claim(lock: Lock, want: Wanted, claimed: int) -> RefuseConnection:
    holder = "no engine holds it"
    if lock.holder is not None:
        holder = f"{lock.holder.engine} holds it with token {lock.holder.token}"
    elif lock.is_unknown:
        holder = "no process holds its witness, so nothing proves that it is alive"
    return RefuseConnection(
        want.conn,
        "lock.stale_claim",
        f"{want.msg.incarnation} no longer holds the {lock.name} lock with token {claimed}:"
        f" {holder}",
        {"lock": lock.name, "token": claimed, "incarnation": want.msg.incarnation},
    )


def unproven(lock: Lock, want: Wanted) -> RefuseConnection:
    return RefuseConnection(
        want.conn,
        "lock.witness_unproven",
        f"{want.msg.incarnation} requested the {lock.name} lock, but no process holds its"
        f" witness {want.msg.witness} ({want.witness_state})",
        {"lock": lock.name, "witness": want.msg.witness, "state": str(want.witness_state)},
    )


def incarnation_ended(lock: Lock, want: Wanted) -> RefuseConnection:
    return RefuseConnection(
        want.conn,
        "lock.incarnation_ended",
        f"{want.msg.incarnation} has released the {lock.name} lock; only a new incarnation"
        " may request it again",
        {"lock": lock.name, "incarnation": want.msg.incarnation},
    )


# ---------------------------------------------------------------------- events


def recovering(lock: Lock) -> Happened:
    if lock.holder is None:
        message = (
            f"the holder of the {lock.name} lock is not on file; waiting for a claim with a"
            " token, or until no unknown process holds a witness"
        )
        return Happened("lock.recovering", message, "warning", {"lock": lock.name})
    holder = lock.holder
    message = (
        f"{holder.engine} held the {lock.name} lock, token {holder.token}; waiting for it to"
        " reconnect"
    )
    return Happened("lock.recovering", message, data=facts(lock, holder))


def queued(lock: Lock, waiter: Waiter) -> Happened:
    data = {"lock": lock.name, "engine": waiter.engine, "incarnation": waiter.incarnation}
    return Happened("lock.queue", f"{waiter.engine} is waiting for the {lock.name} lock", data=data)


def confirmed(lock: Lock, holder: Holder) -> Happened:
    message = f"{holder.engine} reconnected and keeps the {lock.name} lock, token {holder.token}"
    return Happened("lock.confirmed", message, data=facts(lock, holder))


def told_to_end(lock: Lock, holder: Holder) -> Happened:
    message = f"{holder.engine}, which holds the {lock.name} lock, was told to end"
    return Happened("lock.told_to_end", message, data=facts(lock, holder))


def claimed(lock: Lock, holder: Holder) -> Happened:
    message = f"{holder.engine} claims the {lock.name} lock with token {holder.token}: accepted"
    return Happened("lock.claimed", message, "warning", facts(lock, holder))


def releasing(lock: Lock, holder: Holder) -> Happened:
    data = {**facts(lock, holder), "cause": lock.cause, "lost_mono_ms": lock.lost_ms}
    message = f"{holder.engine} is losing the {lock.name} lock: {str(lock.cause).replace('_', ' ')}"
    if lock.cause == Signal.NOT_WANTED:
        message = f"{holder.engine} is releasing the {lock.name} lock"
    elif lock.cause == Signal.HANDED_OVER:
        message = f"{holder.engine} has handed the {lock.name} lock over and stays as a standby"
    return Happened("lock.releasing", message, data=data)


def dead_in_silence(lock: Lock, holder: Holder, now_ms: float) -> Happened:
    data = {**facts(lock, holder), "cause": "silent", "lost_mono_ms": now_ms}
    message = f"{holder.engine} is silent and none of its processes is alive"
    return Happened("lock.releasing", message, "warning", data)


def freed(lock: Lock, holder: Holder | None, *, is_handed_over: bool) -> Happened:
    end = "is gone" if lock.is_fenced else "no longer wants it or is gone"
    if is_handed_over:
        end = "has handed it over"
    why = f"{holder.incarnation} {end}" if holder else "no engine can hold it"
    data = {
        "lock": lock.name,
        "incarnation": holder.incarnation if holder else None,
        "lost_mono_ms": lock.lost_ms,
        "fenced_mono_ms": lock.fenced_ms,
    }
    return Happened("lock.free", f"{lock.name} lock is free: {why}", data=data)


def granted(lock: Lock, holder: Holder, waiter: Waiter, now_ms: float) -> Happened:
    """Must be called before the lock changes: it reports what was lost and when it was fenced."""
    previous = lock.previous
    data = {
        **facts(lock, holder),
        "lost_mono_ms": lock.lost_ms,
        "fenced_mono_ms": lock.fenced_ms,
        "contended": previous is not None and previous.engine != holder.engine,
        "previous": previous.incarnation if previous else None,
        "waited_ms": round(now_ms - waiter.since_ms, 3),
    }
    message = f"{lock.name} lock granted to {holder.engine}, token {holder.token}"
    return Happened("lock.granted", message, data=data)


def heard(supervisor: SupervisorRecord) -> Happened:
    data = {"engine": supervisor.engine, "incarnation": supervisor.incarnation}
    return Happened("lock.heard", f"{supervisor.engine} sends heartbeats again", data=data)


def silent(supervisor: SupervisorRecord) -> Happened:
    data = {"engine": supervisor.engine, "incarnation": supervisor.incarnation}
    message = f"{supervisor.engine} is silent and is skipped until it sends heartbeats again"
    return Happened("lock.silent", message, "warning", data)


def unresponsive(lock: Lock, holder: Holder, supervisor: SupervisorRecord) -> Happened:
    if holder.lease is not None:
        message = (
            f"{holder.engine} holds the {lock.name} lock and some of its members are silent; no"
            " other engine is granted it before their leases expire"
        )
        return Happened("lock.unresponsive", message, "warning", facts(lock, holder))
    message = (
        f"{holder.engine} holds the {lock.name} lock and is silent; no other engine is granted it"
        f" while its processes are alive: if it hangs, kill its supervisor (pid"
        f" {supervisor.pid}) and them"
    )
    data = {**facts(lock, holder), "pid": supervisor.pid}
    return Happened("lock.unresponsive", message, "warning", data, holder.witness)


def overdue(lock: Lock) -> Happened:
    """What a lock that cannot be granted has been waiting for, for longer than an exit takes."""
    if lock.holder is None:
        message = (
            f"the holder of the {lock.name} lock is not on file, and engines that are not"
            " connected hold witnesses in the directory; kill their processes"
        )
        return Happened("lock.waiting_evidence", message, "warning", {"lock": lock.name})
    holder = lock.holder
    kind = "lock.waiting_evidence"
    if holder.lease is not None:
        message = (
            f"{lock.name} lock is waiting for the members of {holder.engine} to report that they"
            " have ended, or for their leases to expire"
        )
        return Happened(kind, message, "warning", facts(lock, holder))
    message = f"{lock.name} lock is waiting: processes of {holder.incarnation} are still alive"
    if lock.state is LockState.RECOVERING:
        kind = "lock.unresponsive"
        message = (
            f"{holder.engine} held the {lock.name} lock (token {holder.token}) before this server"
            " started and has not reconnected, but its processes are alive: if it hangs, kill them"
        )
    return Happened(kind, message, "warning", facts(lock, holder), holder.witness)


# ---------------------------------------------------------------------- switchovers


def requester(pid: int) -> str:
    return f"pid {pid}" if pid else "a process that is not visible from here"


def switchover_begun(
    lock: Lock, source: Holder, to: str, pid: int, timeout_ms: float, *, resume: bool
) -> Happened:
    data = {
        **facts(lock, source),
        "from": source.engine,
        "to": to,
        "pid": pid,
        "timeout_ms": round(timeout_ms),
        "resume": resume,
    }
    message = f"{requester(pid)} asked {source.engine} to hand the {lock.name} lock over to {to}"
    if resume:
        message += ", which continues its streams"
    return Happened("lock.switchover", message, data=data)


def switchover_refused(asked: SwitchOverAsked, why: str) -> Happened:
    data = {"lock": asked.lock, "to": asked.to, "pid": asked.pid}
    message = f"the switchover requested by {requester(asked.pid)} is refused: {why}"
    return Happened("lock.switchover_refused", message, "warning", data)


def switchover_overdue(lock: Lock, source: Holder, to: str, pid: int, waited_s: float) -> Happened:
    message = (
        f"{source.engine} has not handed the {lock.name} lock over to {to} within {waited_s:.1f} s;"
        f" the handover continues: {source.engine} finishes its requests within its drain"
        f" budget, and {to} is next if it is still waiting then"
    )
    data = {"lock": lock.name, "from": source.engine, "to": to, "pid": pid}
    return Happened("lock.switchover_overdue", message, "warning", data)


def switchover_forgotten(lock: Lock, source: Holder, to: str) -> Happened:
    message = (
        f"{source.engine} never handed the {lock.name} lock over to {to}; the switchover is"
        " cancelled"
    )
    data = {**facts(lock, source), "from": source.engine, "to": to}
    return Happened("lock.switchover_failed", message, "warning", data)


def switchover_ended(
    lock: Lock, source: Holder, holder: Holder, took_ms: float, failure: str | None
) -> Happened:
    """`failure`: why the outcome is not the requested one."""
    data = {
        **facts(lock, holder),
        "from": source.engine,
        "to": holder.engine,
        "took_ms": round(took_ms, 3),
    }
    if failure is not None:
        return Happened("lock.switchover_failed", failure, "warning", data)
    message = (
        f"{source.engine} handed the {lock.name} lock over to {holder.engine} in {took_ms:.0f} ms"
    )
    return Happened("lock.switched_over", message, data=data)
