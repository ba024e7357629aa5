"""The status document of a running server: one document, from the machine. Reads, never changes.

Finding out which processes have a witness open walks /proc, so it is done when status is asked for
or when an event needs it, never in the path of a grant.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

from lockserver import witness
from lockserver.core.events import Holder
from lockserver.core.lock import Lock, LockState
from lockserver.core.machine import LockMachine
from lockserver.core.names import ServingFile, WitnessFile, WitnessState
from lockserver.members.group import Group
from lockserver.members.members import Members
from lockserver.status.reasons import (
    ELSEWHERE,
    NAMED_MAX,
    Here,
    LockWait,
    Seen,
    member_sentence,
    since_ms,
    waits_of,
)
from plumbing.service import procfs
from plumbing.service.clock import Clock, moment

SCHEMA = 1
# The document must fit into one frame: more are counted, not listed. A pod has a handful.
WAITERS_NAMED_MAX = 100
SUPERVISORS_NAMED_MAX = 100
PIDS_MAX = 32  # processes listed in one place; a backend with 8 ranks has a dozen


def processes_of(file: WitnessFile | ServingFile) -> list[dict[str, Any]]:
    """The processes that have this file open, where they are visible from here."""
    pids = procfs.holders_of(file.dev, file.ino)[:PIDS_MAX]
    return [
        {"pid": pid, "name": procfs.name(pid), "halted": procfs.halted(pid)}
        for pid in pids
        if pid != os.getpid()
    ]


def lock_documents(here: Here) -> dict[str, Any]:
    """The `locks` part of the status document."""
    return {name: _lock_document(lock, here) for name, lock in here.machine.locks.items()}


def _lock_document(lock: Lock, here: Here) -> dict[str, Any]:
    machine, clock = here.machine, here.clock
    now_ms = clock.now_ms()
    seen = _look(lock, here, now_ms)
    found = waits_of(lock, here, seen, now_ms)
    faults = (each for each in found if each.is_fault and each.reason not in ELSEWHERE)
    window_ms = max(0.0, machine.started_ms + machine.window_ms - now_ms)
    return {
        "kind": "fenced" if lock.is_fenced else "plain",
        "state": str(lock.state),
        **moment(since_ms(lock, machine), clock),
        "cause": lock.cause,
        "holder": _holder_document(lock, machine, clock, window_ms),
        "waiters": [
            {
                "engine": waiter.engine,
                "incarnation": waiter.incarnation,
                "silent": machine.supervisors[waiter.supervisor].is_silent,
                **moment(waiter.since_ms, clock),
                "since_mono_ms": waiter.since_ms,
            }
            for waiter in lock.waiters[:WAITERS_NAMED_MAX]
        ],
        "waiters_total": len(lock.waiters),
        "waiting_for": list(seen.processes),
        "waits": [wait_document(each, clock) for each in found],
        "problem": next((each.sentence for each in faults), None),
        "window": {"ms": machine.window_ms, "left_ms": round(window_ms)},
        "switchover": _switchover_document(lock, machine, clock),
    }


def _switchover_document(lock: Lock, machine: LockMachine, clock: Clock) -> dict[str, Any] | None:
    """The switchover under way, if there is one."""
    found = machine.switchovers.under_way.get(lock.name)
    if found is None:
        return None
    return {
        "from": found.source.engine,
        "to": found.to,
        "pid": found.pid,
        **moment(found.since_ms, clock),
        "since_mono_ms": found.since_ms,
        "deadline_mono_ms": found.deadline_ms,
        "left_ms": max(0, round(found.deadline_ms - clock.now_ms())),
        "overdue": found.is_overdue,
    }


def _holder_document(
    lock: Lock, machine: LockMachine, clock: Clock, window_ms: float
) -> dict[str, Any] | None:
    holder = lock.holder
    if holder is None:
        return None
    supervisor = machine.supervisors.get(holder.supervisor)
    process = supervisor.process if supervisor else "none"
    is_silent = supervisor is not None and supervisor.is_silent
    is_overdue = lock.state is LockState.RECOVERING and window_ms <= 0
    return {
        "engine": holder.engine,
        "incarnation": holder.incarnation,
        "token": holder.token,
        **moment(holder.since_mono_ms, clock),
        "since_mono_ms": holder.since_mono_ms,
        "connected": supervisor is not None and supervisor.conn is not None,
        "unresponsive": is_silent or is_overdue,
        "pid": supervisor.pid if supervisor else None,
        "evidence": _evidence(holder, process),
        "pidfd_source": process,
    }


def _evidence(holder: Holder, process: str) -> str:
    if holder.lease is not None:
        return "lease"
    return "witness" if process == "none" else "pidfd+witness"


def wait_document(wait: LockWait, clock: Clock) -> dict[str, Any]:
    return {
        "reason": wait.reason,
        "message": wait.message,
        "engine": wait.engine,
        "incarnation": wait.incarnation,
        "token": wait.token,
        "pid": wait.pid,
        **moment(wait.since_ms, clock),
        "evidence": list(wait.evidence),
        "fix": wait.fix,
        "is_fault": wait.is_fault,
    }


def _look(lock: Lock, here: Here, now_ms: float) -> Seen:
    """What shows of a lock's holder; /proc is read only if its end is in question."""
    holder, machine, leases = lock.holder, here.machine, here.members.leases
    if holder is None:
        if not lock.is_unknown:
            return Seen()
        left_ms = leases.strangers_until_ms - now_ms if leases.may_have_strangers else 0.0
        return Seen(strangers=_strangers(lock, machine, here.directory), strangers_ms=left_ms)
    if holder.lease is not None:
        terms = holder.lease
        said = [
            member_sentence(holder.engine, index, here.members, now_ms, terms)
            for index in range(len(terms.members))
        ]
        return Seen(members=said, left_ms=leases.remaining_ms(terms, now_ms))
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


def _strangers(lock: Lock, machine: LockMachine, directory: str) -> dict[str, list[dict[str, Any]]]:
    """The witnesses that keep a lock unknown, by name, each with the processes that hold it."""
    known = {
        each.witness_name
        for each in machine.supervisors.values()
        if each.conn is not None and lock.name not in each.tokens
    }
    strangers = {}
    for name in sorted(witness.scan(directory) - known)[: NAMED_MAX + 1]:
        file, _ = witness.identify(os.path.join(directory, name))
        strangers[witness.shown(name)] = processes_of(file) if file is not None else []
    return strangers


def supervisor_documents(machine: LockMachine, clock: Clock) -> list[dict[str, Any]]:
    """The `supervisors` part: those known here, connected or not, up to a limit."""
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
        for each in islice(machine.supervisors.values(), SUPERVISORS_NAMED_MAX)
    ]


WHOLE, WAITING, ENDING = "whole", "waiting", "ending"


def member_documents(members: Members, now_ms: float) -> dict[str, Any]:
    """The `members` part of the status document, by engine; empty without members over TCP."""
    engines = sorted({*members.groups, *members.roll.engines()})
    return {engine: _engine_document(engine, members, now_ms) for engine in engines}


def _engine_document(engine: str, members: Members, now_ms: float) -> dict[str, Any]:
    count = count_of(engine, members)
    return {
        "count": count,
        "state": state_of(members.groups.get(engine)),
        "missing": missing(engine, members),
        "members": [_member_document(engine, index, members, now_ms) for index in range(count)],
    }


def _member_document(engine: str, index: int, members: Members, now_ms: float) -> dict[str, Any]:
    member = members.roll.known.get((engine, index))
    lease = next(iter(members.leases.of(engine, index)), None)
    incarnation = member.incarnation if member is not None else None
    if incarnation is None and lease is not None:
        incarnation = lease.id.incarnation
    spent = members.leases.spent(incarnation)
    return {
        "member": index,
        "name": member.name if member is not None else None,
        "supervisor": member.supervisor if member is not None else None,
        "incarnation": incarnation,
        "connected": member is not None and member.conn is not None,
        "heard_ms_ago": round(now_ms - member.heard_ms) if member is not None else None,
        "lease_left_ms": round(lease.left_ms(now_ms)) if lease is not None else None,
        "wants": list(member.locks) if member is not None else [],
        "over": spent.reason if spent is not None else None,
    }


def state_of(group: Group | None) -> str:
    if group is None:
        return WAITING
    if group.is_over:
        return ENDING
    return WHOLE if group.conn is not None else WAITING


def count_of(engine: str, members: Members) -> int:
    """How many members the engine has, by their own wants or by the file."""
    said = [m.count for (name, _), m in members.roll.known.items() if name == engine]
    group = members.groups.get(engine)
    return max([*said, len(group.terms.members) if group is not None else 0])


def missing(engine: str, members: Members) -> list[int]:
    """The members that are not connected."""
    count = count_of(engine, members)
    here = {m.index for m in members.roll.at(engine, count) if m.conn is not None}
    return [index for index in range(count) if index not in here]


def missing_of(holder: Holder | None, members: Members) -> int:
    if holder is None or holder.lease is None:
        return 0
    return len(missing(holder.engine, members))


def longest_left_ms(holder: Holder | None, members: Members, now_ms: float) -> float:
    """How long a holder may live at most without another message; 0 without a lease."""
    if holder is None or holder.lease is None:
        return 0.0
    return max(members.leases.remaining_ms(holder.lease, now_ms).values(), default=0.0)
