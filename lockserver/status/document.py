"""The status document, of a running server and from its files while none answers.

A new field: a line in `lockserver/schema.py`, its value here, a word in `text.py`, and `make docs`.
A field of the top level has its value in `offline` and in `LockServer.document`.

Finding out which processes have a witness open walks /proc, so it is done when status is asked for
or when an event needs it, never in the path of a grant.

Without a server the document shows the state file's contents, and what can be seen. It must not
guess: only the witness proves whether a holder is alive, and the waiters are unknown until a server
is back. A server may also run and not answer: then a second one could not start in its directory,
and `silent_server` says which process it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from msgspec import to_builtins

from lockserver import schema, state_file, witness
from lockserver.core.events import Holder
from lockserver.core.lock import KINDS, Lock, LockState, kinds_of, with_filed
from lockserver.core.names import WitnessFile, WitnessState
from lockserver.core.supervisors import SupervisorRecord
from lockserver.status.reasons import (
    NAMED_MAX,
    NOBODY,
    RESUME,
    Here,
    Seen,
    evidence_of,
    named,
    since_ms,
    wait,
    waits_of,
)
from plumbing.errors import UnderstudyError, WaitTimeoutError
from plumbing.pod.paths import lockserver_guard
from plumbing.service import procfs
from plumbing.service.clock import Clock, SystemClock, moment
from plumbing.text import one_line
from plumbing.wire.connection import Connection

SCHEMA = 1
# The document must fit into one frame: more are counted, not listed. A pod has a handful.
WAITERS_NAMED_MAX = 100
PIDS_MAX = 32  # processes listed in one place; a backend with 8 ranks has a dozen


def built(**fields: Any) -> dict[str, Any]:
    """The document with these fields of `LockserverStatus`."""
    document: dict[str, Any] = to_builtins(schema.LockserverStatus(schema=SCHEMA, **fields))
    return document


def processes_of(dev: int, ino: int) -> list[schema.LockWaitingFor]:
    """The processes that have this file open, where they are visible from here."""
    return [
        schema.LockWaitingFor(pid, procfs.name(pid), procfs.halted(pid))
        for pid in procfs.holders_of(dev, ino)[:PIDS_MAX]
        if pid != os.getpid()
    ]


# ---------------------------------------------------------------------- while a server runs


def lock_status(
    lock: Lock, here: Here, others: Sequence[schema.LockWaitFields] = ()
) -> schema.LockLock:
    """`others`: waits that are shown beside this lock, and are not its own problem."""
    machine, clock = here.machine, here.clock
    now_ms = clock.now_ms()
    seen = _look(lock, here, now_ms)
    waits = waits_of(lock, here, seen)
    faults = (f"{w.message}: {'; '.join(w.evidence)}; {w.fix}" for w in waits if w.is_fault)
    window_ms = max(0.0, machine.started_ms + machine.window_ms - now_ms)
    switchover = machine.switchovers.under_way.get(lock.name)
    return schema.LockLock(
        kind="fenced" if lock.is_fenced else "plain",
        state=str(lock.state),
        **moment(since_ms(lock, machine), clock),
        cause=lock.cause,
        holder=_online_holder(lock, here, is_overdue=window_ms <= 0),
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
        waiting_for=list(seen.processes),
        waits=[*waits, *others],
        problem=next(faults, None),
        window=schema.LockWindow(ms=machine.window_ms, left_ms=round(window_ms)),
        switchover=None
        if switchover is None
        else schema.LockSwitchover(
            from_=switchover.source.engine,
            to=switchover.to,
            pid=switchover.pid,
            **moment(switchover.since_ms, clock),
            since_mono_ms=switchover.since_ms,
            deadline_mono_ms=switchover.deadline_ms,
            left_ms=max(0, round(switchover.deadline_ms - now_ms)),
            overdue=switchover.is_overdue,
        ),
    )


def _holder(holder: Holder, clock: Clock, **known: Any) -> schema.LockHolder:
    return schema.LockHolder(
        engine=holder.engine,
        incarnation=holder.incarnation,
        token=holder.token,
        **moment(holder.since_mono_ms, clock),
        since_mono_ms=holder.since_mono_ms,
        **known,
    )


def _online_holder(lock: Lock, here: Here, *, is_overdue: bool) -> schema.LockHolder | None:
    holder = lock.holder
    if holder is None:
        return None
    supervisor = here.machine.supervisors.get(holder.supervisor)
    process = supervisor.want.process if supervisor else "none"
    evidence = "witness" if process == "none" else "pidfd+witness"
    is_silent = supervisor is not None and supervisor.is_silent
    return _holder(
        holder,
        here.clock,
        connected=supervisor is not None and supervisor.conn is not None,
        unresponsive=is_silent or (lock.state is LockState.RECOVERING and is_overdue),
        pid=supervisor.want.pid if supervisor else None,
        evidence=evidence if holder.lease_ms is None else "lease",
        pidfd_source=process,
    )


def _look(lock: Lock, here: Here, now_ms: float) -> Seen:
    """What shows of a lock's holder; /proc is read only if its end is in question."""
    holder, leases = lock.holder, here.machine.leases
    if holder is None:
        if not lock.is_unknown:
            return Seen()
        left_ms = leases.strangers_until_ms - now_ms if leases.may_have_strangers else 0.0
        return Seen(strangers=_strangers(lock, here), left_ms=left_ms)
    if holder.lease_ms is not None:
        return Seen(left_ms=leases.left_ms(holder.incarnation, now_ms) or 0.0)
    supervisor = here.machine.supervisors.get(holder.supervisor)
    seen = _look_at_witness(holder.witness, here.directory)
    if lock.state is LockState.HELD and not (supervisor is not None and supervisor.is_silent):
        return seen
    proof = holder.serving if lock.is_handed_over and holder.serving else holder.witness
    pid = supervisor.want.pid if supervisor is not None else 0
    halted = procfs.halted(pid) if pid else None
    return Seen(seen.is_same_file, seen.probe, processes_of(proof.dev, proof.ino), halted)


def _look_at_witness(filed: WitnessFile, directory: str) -> Seen:
    """Whether it is the file that was filed, as far as can be seen, and whether it is held."""
    file, probe = witness.identify(os.path.join(directory, filed.name))
    return Seen(file == filed or probe is WitnessState.UNSEEN, probe)


def _strangers(lock: Lock, here: Here) -> dict[str, list[schema.LockWaitingFor]]:
    """The witnesses that keep a lock unknown, by name, each with the processes that hold it."""
    known = {
        each.witness
        for each in here.machine.supervisors.values()
        if each.conn is not None and lock.name not in each.said.tokens
    }
    strangers: dict[str, list[schema.LockWaitingFor]] = {}
    try:
        held, _ = witness.scan(here.directory)
    except OSError:  # no descriptor or memory to look with
        return strangers
    for name in sorted(held - known)[: NAMED_MAX + 1]:
        file, _ = witness.identify(os.path.join(here.directory, name))
        strangers[one_line(name)] = processes_of(file.dev, file.ino) if file else []
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
        pid=each.want.pid,
        pidfd_source=each.want.process,
        connected=conn is not None,
        silent=each.is_silent,
        heard_ms_ago=round(now_ms - each.heard_ms),
        wants=list(each.said.locks),
        peer=str(conn.peer) if conn is not None and each.is_leased else None,
        lease_left_ms=None if left_ms is None else round(left_ms),
    )


# ---------------------------------------------------------------------- while none answers

MEANWHILE = "active engines keep serving, and no other engine is granted the lock"
HANGS = "if it stays so, kill it: kill -9 {pid}; then start another, or let its container restart"
UNANSWERED = "no lock server answers; this is its state file"


def silent_server(directory: str, error: UnderstudyError) -> tuple[str, str] | None:
    """A sentence on the server that did not answer a request, which failed with `error`, and one on
    what to do; None if there is no server.

    One in another PID namespace is not visible. Then it is known by accepting the connection.
    """
    path = lockserver_guard(directory)
    try:
        guard = os.stat(path)
        found = processes_of(guard.st_dev, guard.st_ino)[:1]  # only a server opens it
    except OSError:
        found = []
    if found:
        pid, halted = found[0].pid, found[0].halted or ""
        fix = RESUME.get(halted, HANGS).format(pid=pid)
        message = f"the lock server, {named(found)}, holds {path} and does not answer"
    elif isinstance(error, WaitTimeoutError):
        fix = "see whether its container is paused, stopped or out of CPU time"
        message = (
            f"the lock server in {directory} accepts connections and does not answer; its process"
            " is not visible from here"
        )
    else:
        return None
    return message, f"{fix}; {MEANWHILE}"


def offline(directory: str, silent: tuple[str, str] | None = None) -> dict[str, Any] | None:
    """The view from the state file while no server answers; None if there is none either. `silent`:
    as `silent_server` says.

    Raises:
        OSError: it cannot be read.
    """
    found = state_file.read(directory, KINDS)
    if found is None:
        return None
    clock, record = SystemClock(), found.record
    written_s = os.stat(os.path.join(directory, state_file.NAME)).st_mtime
    written_ms = clock.now_ms() - (time.time() - written_s) * 1000
    start = f"start it: lockserver serve --dir {directory}; until then"
    what, fix = silent or (UNANSWERED, f"{start} {MEANWHILE}")
    locks = {}
    for name, is_fenced in with_filed(kinds_of(found.models), record).items():
        holder, end, seen, shown = record.holders.get(name), fix, Seen(), None
        evidence, whose, since_ms = "no holder is on file", NOBODY, written_ms
        if name in record.unknown:
            evidence = "the holder is not on file"
        if holder is not None:
            looked = _look_at_witness(holder.witness, directory)
            processes = processes_of(holder.witness.dev, holder.witness.ino)
            seen = Seen(looked.is_same_file, looked.probe, processes)
            evidence, since_ms = evidence_of(holder, seen), holder.since_mono_ms
            whose = (holder.engine, holder.incarnation, holder.token, None)
            state = str(seen.probe if seen.is_same_file else WitnessState.UNPROVEN)
            shown = _holder(holder, clock, witness=state)
            if holder.lease_ms is not None and silent is None:
                end = f"{start} the active engine stops before its lease expires"
        locks[name] = schema.LockLock(
            kind="fenced" if is_fenced else "plain",
            state="unknown",
            **moment(since_ms, clock),
            holder=shown,
            waiters=[],
            waiters_total=0,
            waiting_for=list(seen.processes),
            waits=[wait("no_server", clock, since_ms, [evidence], whose, what=what, end=end)],
            problem=what,
        )
    return built(
        as_of_event_id=0,
        last_event=None,
        server=schema.LockServerFields(pid=None, since=None, dir=directory, online=False),
        models=list(found.models),
        mode=None,
        era=record.era,
        token=record.token,
        problem=found.problem,
        locks=locks,
        tcp=None,
        supervisors=[],
        supervisors_total=0,
        service={},
        gateways=[],
        last_grants=[],
    )
