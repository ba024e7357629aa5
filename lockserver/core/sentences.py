"""The lock server's words: every event and refusal as people read it. Nothing is decided here."""

from __future__ import annotations

from typing import Any

from lockserver.core.events import Happened, Holder, RefuseConnection, SwitchOverAsked, Wanted
from lockserver.core.lock import Lock, LockState, Signal
from lockserver.core.queue import Waiter
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
    has_it = "nobody holds it"
    if lock.holder is not None:
        has_it = f"{lock.holder.engine} holds it with token {lock.holder.token}"
    elif lock.is_unknown:
        has_it = "nothing proves that it lives, because no process holds its witness"
    return RefuseConnection(
        want.conn,
        "lock.stale_claim",
        f"{want.incarnation} no longer holds {lock.name} with token {claimed}: {has_it}",
        {"lock": lock.name, "token": claimed, "incarnation": want.incarnation},
    )


def unproven(lock: Lock, want: Wanted) -> RefuseConnection:
    return RefuseConnection(
        want.conn,
        "lock.witness_unproven",
        f"{want.incarnation} asks for {lock.name} while no process holds its witness"
        f" {want.witness} ({want.witness_state})",
        {"lock": lock.name, "witness": want.witness, "state": str(want.witness_state)},
    )


def incarnation_ended(lock: Lock, want: Wanted) -> RefuseConnection:
    return RefuseConnection(
        want.conn,
        "lock.incarnation_ended",
        f"{want.incarnation} gave {lock.name} up; only a new incarnation may ask for it again",
        {"lock": lock.name, "incarnation": want.incarnation},
    )


# ---------------------------------------------------------------------- events


def recovering(lock: Lock) -> Happened:
    if lock.holder is None:
        message = (
            f"who holds {lock.name} is not on file; a claim with a token is accepted, else it is"
            " free once no witness is held by a stranger"
        )
        return Happened("lock.recovering", message, "warning", {"lock": lock.name})
    holder = lock.holder
    message = f"{holder.engine} held {lock.name}, token {holder.token}; waiting to hear from it"
    return Happened("lock.recovering", message, data=facts(lock, holder))


def queued(lock: Lock, waiter: Waiter) -> Happened:
    data = {"lock": lock.name, "engine": waiter.engine, "incarnation": waiter.incarnation}
    return Happened("lock.queue", f"{waiter.engine} waits for {lock.name}", data=data)


def confirmed(lock: Lock, holder: Holder) -> Happened:
    message = f"{holder.engine} is back and keeps {lock.name}, token {holder.token}"
    return Happened("lock.confirmed", message, data=facts(lock, holder))


def claimed(lock: Lock, holder: Holder) -> Happened:
    message = f"{holder.engine} says that it holds {lock.name}, token {holder.token}: believed"
    return Happened("lock.claimed", message, "warning", facts(lock, holder))


def releasing(lock: Lock, holder: Holder) -> Happened:
    data = {**facts(lock, holder), "cause": lock.cause, "lost_mono_ms": lock.lost_ms}
    message = f"{holder.engine} loses {lock.name}: {str(lock.cause).replace('_', ' ')}"
    if lock.cause == Signal.NOT_WANTED:
        message = f"{holder.engine} gives {lock.name} back"
    return Happened("lock.releasing", message, data=data)


def dead_in_silence(lock: Lock, holder: Holder, now_ms: float) -> Happened:
    data = {**facts(lock, holder), "cause": "silent", "lost_mono_ms": now_ms}
    message = f"{holder.engine} is silent and none of its processes lives"
    return Happened("lock.releasing", message, "warning", data)


def freed(lock: Lock, holder: Holder | None) -> Happened:
    end = "is gone" if lock.is_fenced else "no longer wants it or is gone"
    why = f"{holder.incarnation} {end}" if holder else "nobody can hold it"
    data = {
        "lock": lock.name,
        "incarnation": holder.incarnation if holder else None,
        "lost_mono_ms": lock.lost_ms,
        "fenced_mono_ms": lock.fenced_ms,
    }
    return Happened("lock.free", f"{lock.name} is free: {why}", data=data)


def granted(lock: Lock, holder: Holder, waiter: Waiter, now_ms: float) -> Happened:
    """To be made before the lock changes: it says what was lost and when it was fenced."""
    previous = lock.previous
    data = {
        **facts(lock, holder),
        "lost_mono_ms": lock.lost_ms,
        "fenced_mono_ms": lock.fenced_ms,
        "contended": previous is not None and previous.engine != holder.engine,
        "previous": previous.incarnation if previous else None,
        "waited_ms": round(now_ms - waiter.since_ms, 3),
    }
    message = f"{lock.name} granted to {holder.engine}, token {holder.token}"
    return Happened("lock.granted", message, data=data)


def heard(supervisor: SupervisorRecord) -> Happened:
    data = {"engine": supervisor.engine, "incarnation": supervisor.incarnation}
    return Happened("lock.heard", f"{supervisor.engine} is heard again", data=data)


def silent(supervisor: SupervisorRecord) -> Happened:
    data = {"engine": supervisor.engine, "incarnation": supervisor.incarnation}
    message = f"{supervisor.engine} is silent and is passed over until it is heard"
    return Happened("lock.silent", message, "warning", data)


def unresponsive(lock: Lock, holder: Holder, supervisor: SupervisorRecord) -> Happened:
    if holder.lease is not None:
        message = (
            f"{holder.engine} holds {lock.name} and not all of its members are heard; nobody else"
            " is granted before their leases have run out"
        )
        return Happened("lock.unresponsive", message, "warning", facts(lock, holder))
    message = (
        f"{holder.engine} holds {lock.name} and is silent; nobody else is granted while its"
        f" processes live: if it hangs, kill its supervisor (pid {supervisor.pid}) and them"
    )
    data = {**facts(lock, holder), "pid": supervisor.pid}
    return Happened("lock.unresponsive", message, "warning", data, holder.witness)


def overdue(lock: Lock) -> Happened:
    """What a lock that is nobody's has been waiting for, too long for it to be a death alone."""
    if lock.holder is None:
        message = (
            f"who holds {lock.name} is not on file, and engines that are not connected hold"
            " witnesses in the directory; kill their processes"
        )
        return Happened("lock.waiting_evidence", message, "warning", {"lock": lock.name})
    holder = lock.holder
    kind = "lock.waiting_evidence"
    if holder.lease is not None:
        message = (
            f"{lock.name} waits for the members of {holder.engine}: they say that they have ended,"
            " or their leases run out"
        )
        return Happened(kind, message, "warning", facts(lock, holder))
    message = f"{lock.name} waits: processes of {holder.incarnation} are still alive"
    if lock.state is LockState.RECOVERING:
        kind = "lock.unresponsive"
        message = (
            f"{holder.engine} held {lock.name} (token {holder.token}) before this server started"
            " and has not been heard since, but its processes live: if it hangs, kill them"
        )
    return Happened(kind, message, "warning", facts(lock, holder), holder.witness)


# ---------------------------------------------------------------------- switchovers


def asker(pid: int) -> str:
    return f"pid {pid}" if pid else "a process that is not visible from here"


def switchover_begun(lock: Lock, source: Holder, to: str, pid: int, timeout_ms: float) -> Happened:
    data = {
        **facts(lock, source),
        "from": source.engine,
        "to": to,
        "pid": pid,
        "timeout_ms": round(timeout_ms),
    }
    message = f"{source.engine} is asked by {asker(pid)} to hand {lock.name} over to {to}"
    return Happened("lock.switchover", message, data=data)


def switchover_refused(asked: SwitchOverAsked, why: str) -> Happened:
    data = {"lock": asked.lock, "to": asked.to, "pid": asked.pid}
    message = f"the switchover that {asker(asked.pid)} asked for is refused: {why}"
    return Happened("lock.switchover_refused", message, "warning", data)


def switchover_overdue(lock: Lock, source: Holder, to: str, pid: int, waited_s: float) -> Happened:
    message = (
        f"{source.engine} has not handed {lock.name} over to {to} within {waited_s:.1f} s; what was"
        f" asked for goes on: it finishes its requests within its drain budget, and {to} is next if"
        " it still waits then"
    )
    data = {"lock": lock.name, "from": source.engine, "to": to, "pid": pid}
    return Happened("lock.switchover_overdue", message, "warning", data)


def switchover_forgotten(lock: Lock, source: Holder, to: str) -> Happened:
    message = f"{source.engine} has never handed {lock.name} over to {to}, which is forgotten now"
    data = {**facts(lock, source), "from": source.engine, "to": to}
    return Happened("lock.switchover_failed", message, "warning", data)


def switchover_ended(
    lock: Lock, source: Holder, holder: Holder, took_ms: float, failure: str | None
) -> Happened:
    """`failure`: why this is not what was asked for."""
    data = {
        **facts(lock, holder),
        "from": source.engine,
        "to": holder.engine,
        "took_ms": round(took_ms, 3),
    }
    if failure is not None:
        return Happened("lock.switchover_failed", failure, "warning", data)
    message = f"{source.engine} has handed {lock.name} over to {holder.engine}"
    return Happened("lock.switched_over", f"{message} in {took_ms:.0f} ms", data=data)
