"""The parts of a running server's status document: locks with their waits, and supervisors.

Finding out which processes have a witness open walks /proc, so it is done when status is asked for
or when an event needs it, never in the path of a grant.
"""

from __future__ import annotations

import os
from typing import Any

from lockserver import schema, witness
from lockserver.core.lock import Lock, LockState
from lockserver.core.names import ServingFile, WitnessFile, WitnessState
from lockserver.core.supervisors import SupervisorRecord
from lockserver.status.reasons import (
    ELSEWHERE,
    NAMED_MAX,
    Here,
    LockWait,
    Seen,
    since_ms,
    waits_of,
)
from plumbing.service import procfs
from plumbing.service.clock import Clock, moment
from plumbing.wire.connection import Connection

SCHEMA = 1
# The document must fit into one frame: more are counted, not listed. A pod has a handful.
WAITERS_NAMED_MAX = 100
PIDS_MAX = 32  # processes listed in one place; a backend with 8 ranks has a dozen


def processes_of(file: WitnessFile | ServingFile) -> list[dict[str, Any]]:
    """The processes that have this file open, where they are visible from here."""
    pids = procfs.holders_of(file.dev, file.ino)[:PIDS_MAX]
    return [
        {"pid": pid, "name": procfs.name(pid), "halted": procfs.halted(pid)}
        for pid in pids
        if pid != os.getpid()
    ]


def lock_status(lock: Lock, here: Here) -> schema.LockLock:
    machine, clock = here.machine, here.clock
    now_ms = clock.now_ms()
    seen = _look(lock, here, now_ms)
    found = waits_of(lock, here, seen, now_ms)
    faults = (each for each in found if each.is_fault and each.reason not in ELSEWHERE)
    window_ms = max(0.0, machine.started_ms + machine.window_ms - now_ms)
    return schema.LockLock(
        kind="fenced" if lock.is_fenced else "plain",
        state=str(lock.state),
        **moment(since_ms(lock, machine), clock),
        cause=lock.cause,
        holder=_holder(lock, here, is_overdue=window_ms <= 0),
        waiters=[
            schema.LockWaiter(
                engine=waiter.engine,
                incarnation=waiter.incarnation,
                silent=machine.supervisors[waiter.supervisor].is_silent,
                **moment(waiter.since_ms, clock),
                since_mono_ms=waiter.since_ms,
            )
            for waiter in lock.waiters[:WAITERS_NAMED_MAX]
        ],
        waiters_total=len(lock.waiters),
        waiting_for=[schema.LockWaitingFor(**each) for each in seen.processes],
        waits=[shown_wait(each, clock) for each in found],
        problem=next((each.sentence for each in faults), None),
        window=schema.LockWindow(ms=machine.window_ms, left_ms=round(window_ms)),
        switchover=_switchover(lock, here),
    )


def _switchover(lock: Lock, here: Here) -> schema.LockSwitchover | None:
    """The switchover under way, if there is one."""
    found = here.machine.switchovers.under_way.get(lock.name)
    if found is None:
        return None
    return schema.LockSwitchover(
        from_=found.source.engine,
        to=found.to,
        pid=found.pid,
        **moment(found.since_ms, here.clock),
        since_mono_ms=found.since_ms,
        deadline_mono_ms=found.deadline_ms,
        left_ms=max(0, round(found.deadline_ms - here.clock.now_ms())),
        overdue=found.is_overdue,
    )


def _holder(lock: Lock, here: Here, *, is_overdue: bool) -> schema.LockHolder | None:
    holder = lock.holder
    if holder is None:
        return None
    supervisor = here.machine.supervisors.get(holder.supervisor)
    process = supervisor.process if supervisor else "none"
    evidence = "witness" if process == "none" else "pidfd+witness"
    is_silent = supervisor is not None and supervisor.is_silent
    return schema.LockHolder(
        engine=holder.engine,
        incarnation=holder.incarnation,
        token=holder.token,
        **moment(holder.since_mono_ms, here.clock),
        since_mono_ms=holder.since_mono_ms,
        connected=supervisor is not None and supervisor.conn is not None,
        unresponsive=is_silent or (lock.state is LockState.RECOVERING and is_overdue),
        pid=supervisor.pid if supervisor else None,
        evidence=evidence if holder.lease_ms is None else "lease",
        pidfd_source=process,
    )


def shown_wait(wait: LockWait, clock: Clock) -> schema.LockWaitFields:
    return schema.LockWaitFields(
        reason=wait.reason,
        message=wait.message,
        engine=wait.engine,
        incarnation=wait.incarnation,
        token=wait.token,
        pid=wait.pid,
        **moment(wait.since_ms, clock),
        evidence=list(wait.evidence),
        fix=wait.fix,
        is_fault=wait.is_fault,
    )


def _look(lock: Lock, here: Here, now_ms: float) -> Seen:
    """What shows of a lock's holder; /proc is read only if its end is in question."""
    holder, machine = lock.holder, here.machine
    leases = machine.leases
    if holder is None:
        if not lock.is_unknown:
            return Seen()
        left_ms = leases.strangers_until_ms - now_ms if leases.may_have_strangers else 0.0
        return Seen(strangers=_strangers(lock, here), strangers_ms=left_ms)
    if holder.lease_ms is not None:
        return Seen(left_ms=leases.left_ms(holder.incarnation, now_ms) or 0.0)
    supervisor = machine.supervisors.get(holder.supervisor)
    is_silent = supervisor is not None and supervisor.is_silent
    is_suspect = lock.state is not LockState.HELD or is_silent
    file, probe = witness.identify(os.path.join(here.directory, holder.witness.name))
    is_handed_over = lock.is_handed_over and holder.serving is not None
    proof = holder.serving if is_handed_over and holder.serving else holder.witness
    processes = processes_of(proof) if is_suspect else []
    is_same = file == holder.witness or probe is WitnessState.UNSEEN
    pid = supervisor.pid if is_suspect and supervisor is not None else 0
    return Seen(is_same, probe, processes, halted=procfs.halted(pid) if pid else None)


def _strangers(lock: Lock, here: Here) -> dict[str, list[dict[str, Any]]]:
    """The witnesses that keep a lock unknown, by name, each with the processes that hold it."""
    known = {
        each.witness_name
        for each in here.machine.supervisors.values()
        if each.conn is not None and lock.name not in each.tokens
    }
    strangers: dict[str, list[dict[str, Any]]] = {}
    try:
        held = witness.scan(here.directory)
    except OSError:  # no descriptor or memory to look with
        return strangers
    for name in sorted(held - known)[: NAMED_MAX + 1]:
        file, _ = witness.identify(os.path.join(here.directory, name))
        strangers[witness.shown(name)] = processes_of(file) if file is not None else []
    return strangers


def supervisor_status(
    each: SupervisorRecord, conn: Connection | None, here: Here
) -> schema.LockSupervisor:
    now_ms = here.clock.now_ms()
    left_ms = here.machine.leases.left_ms(each.incarnation, now_ms)
    return schema.LockSupervisor(
        engine=each.engine,
        supervisor=each.id,
        incarnation=each.incarnation,
        pid=each.pid,
        pidfd_source=each.process,
        connected=conn is not None,
        silent=each.is_silent,
        heard_ms_ago=round(now_ms - each.heard_ms),
        wants=list(each.locks),
        peer=str(conn.peer) if conn is not None and each.is_leased else None,
        lease_left_ms=None if left_ms is None else round(left_ms),
    )
