"""The status document, of a running server and from its files while none answers: what each lock
waits for, with its sentence and its fix.

A new field: a line in `lockserver/schema.py`, its value here, a word in `status_text.py`, and `make
docs`. A field of the top level has its value in `offline` and in `LockServer.document`.

`TEXTS` is the table of the waits that can last; `waits_of` finds those that a lock is in. Waits
that are no fault are listed too: a queue behind a live holder and a lock that no engine asks for
are the two questions that operators ask about a healthy pod. Finding out which processes have a
witness open walks /proc, so it is done when status is asked for or when an event needs it, never in
the path of a grant.

Without a server the document shows the state file's contents, and what can be seen. It must not
guess: only the witness proves whether a holder is alive, and the waiters are unknown until a server
is back. A server may also run and not answer: then a second one could not start in its directory,
and `silent_server` says which process it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import to_builtins

from lockserver import schema, state_file, witness
from lockserver.core.events import Holder
from lockserver.core.lock import Lock, LockState, Signal, locks_of
from lockserver.core.machine import LockMachine
from lockserver.core.names import WitnessFile, WitnessState
from lockserver.core.recovery import is_decisive
from lockserver.core.sentences import requester
from lockserver.core.supervisors import SupervisorRecord, next_of
from lockserver.schema import LockWaitFields, LockWaitingFor
from plumbing.errors import UnderstudyError, WaitTimeoutError
from plumbing.pod.models import model_of
from plumbing.pod.paths import lockserver_guard
from plumbing.service import procfs
from plumbing.service.clock import Clock, SystemClock, moment
from plumbing.text import duration, one_line
from plumbing.wire.connection import Connection

SCHEMA = 1
KIND = "fenced"  # every lock is; scripts read it
# The document must fit into one frame: more are counted, not listed. A pod has a handful.
WAITERS_NAMED_MAX = 100
PIDS_MAX = 32  # processes listed in one place; a backend with 8 ranks has a dozen
NAMED_MAX = 8  # engines or witnesses named in one message
SILENT_NAMED_MAX = 16  # silent waiters listed one by one; `waiters` has all of them

# The sentence and the fix, by code; the words in braces are those of the case.
TEXTS: Mapping[str, tuple[str, str]] = {
    "witness_lost": (
        "the witness {witness} was removed or replaced, so it cannot be proven that {engine} is"
        " gone, and no other engine can be granted the lock",
        "make sure that no process of {engine} is alive, then stop the lock server, move"
        " lockserver.json away and start the server again",
    ),
    "witness_unsealed": (
        "no process holds the witness {witness}, but it cannot be sealed against processes that"
        " would open it later",
        "make {directory} and the files in it writable; the server keeps retrying",
    ),
    "recovering": (
        "waiting up to {left} for {engine} to reconnect, which held the lock before this server"
        " started",
        "nothing yet: engines reconnect on their own; if this one does not, its pids are shown"
        " here",
    ),
    "unresponsive": ("{engine} is unresponsive and is not replaced while {lives}", "{end}"),
    "releasing": ("{engine} {lost}, and no other engine is granted it while {lives}", "{end}"),
    "unknown_holder": (
        "the state file names no holder: waiting for an engine to claim the lock, or until no"
        " process outside the connected engines holds a witness and no lease can be valid",
        "{end}nothing else: running engines connect and claim the lock on their own",
    ),
    "write_failed": (
        "no engine can be granted the lock, because the grant cannot be written",
        "fix the disk under {directory} (df -h {directory}); the server retries every second",
    ),
    "switchover": ("{engine} is handing the lock over to {to}, as requested by {by}", "{end}"),
    "waiter_silent": (
        "{engine} is silent and skipped until it sends heartbeats; it keeps its place",
        "{end}",
    ),
    "nobody_asks": ("no engine has requested the lock: none is ready", "{end}"),
    "queue": ("{engine} is waiting, first of {count}", "{end}"),
    "address_away": (
        "waiting for {address}: the gateway that has it hands it back when it connects",
        "nothing if it is part of this pod; otherwise stop that process, or change --service",
    ),
    "no_gateway": ("no gateway accepts connections on {address}", "{end} --dir {directory}"),
    "no_server": ("{what}", "{end}"),
}

# By `procfs.halted`: how a process runs again.
RESUME = {
    "stopped": "resume it: kill -CONT {pid}",
    "frozen": "thaw its container or cgroup (docker unpause; echo THAWED to its freezer.state)",
}

Processes = Sequence[LockWaitingFor]
Who = tuple[str | None, str | None, int | None, int | None]  # engine, incarnation, token, pid
NOBODY: Who = (None, None, None, None)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look at the evidence showed.

    `left_ms`: of a holder over TCP, how long its lease is still valid. Where the holder is not on
    file, `strangers` are the held witnesses that belong to no connected engine, each with its
    processes, and `left_ms` is how long engines over TCP that have not connected may still be
    alive."""

    is_same_file: bool = True
    probe: WitnessState = WitnessState.UNPROVEN
    processes: Processes = ()
    halted: str | None = None  # what keeps the holder's supervisor from running
    left_ms: float = 0.0
    strangers: Mapping[str, Processes] = field(default_factory=dict)


def wait(
    reason: str,
    clock: Clock,
    since_ms: float,
    evidence: Iterable[str],
    who: Who = NOBODY,
    *,
    is_fault: bool = True,
    **words: Any,
) -> LockWaitFields:
    """The wait for `reason`, with the words of its text. `is_fault`: an operator should look."""
    message, fix = (text.format(**{"engine": who[0], **words}) for text in TEXTS[reason])
    return LockWaitFields(
        *(reason, message, *who),
        **moment(since_ms, clock),
        evidence=list(evidence),
        fix=fix,
        is_fault=is_fault,
    )


@dataclass(frozen=True, slots=True)
class Here:
    """Where the facts are: the machine and what is around it."""

    machine: LockMachine
    clock: Clock
    directory: str


def waits_of(lock: Lock, here: Here, seen: Seen) -> list[LockWaitFields]:
    """Everything that this lock and its waiters wait for, the gravest first."""
    found: list[LockWaitFields] = []
    if lock.holder is not None:
        found += _holder_waits(lock, lock.holder, here, seen)
    elif lock.is_unknown:
        found.append(_unknown_wait(here, seen))
    return found + list(_queue_waits(lock, here))


def since_ms(lock: Lock, machine: LockMachine) -> float:
    """When the lock entered its present state."""
    if lock.state is LockState.HELD and lock.holder is not None:
        return lock.holder.since_mono_ms
    entered = lock.lost_ms if lock.state is LockState.RELEASING else lock.fenced_ms
    return machine.started_ms if entered is None else entered


# ---------------------------------------------------------------------- the holder's end


def _holder_waits(lock: Lock, holder: Holder, here: Here, seen: Seen) -> Iterator[LockWaitFields]:
    machine, engine, now_ms = here.machine, holder.engine, here.clock.now_ms()
    supervisor = machine.supervisors.get(holder.supervisor)
    left_ms = machine.started_ms + machine.window_ms - now_ms
    evidence = [evidence_of(holder, seen), _process(lock, supervisor, seen.halted)]
    lives, lost = "its processes are alive", "has lost the lock server"
    end = kill_command(engine, seen.processes, None if lock.is_ended else supervisor, seen.halted)
    if lock.cause == Signal.PROCESS_GONE:
        lost = "has lost its supervisor"
    elif lock.is_ended:
        lost = "has released the lock"
    if holder.lease_ms is not None:
        evidence, lives = [_lease(supervisor, seen, now_ms)], "its lease is valid"
        end = (
            f"nothing: its lease expires in {duration(seen.left_ms)} unless it is renewed; if"
            f" {engine} hangs and keeps renewing it, kill its container or host"
        )
    elif lock.is_handed_over:
        name = holder.serving.name if holder.serving else f"witness {holder.witness.name}"
        evidence = [f"{name} is held by {named(seen.processes)}, or was removed or replaced"]
        lost, lives = (
            "has handed the lock over",
            "it is not proven that none of its processes serves",
        )
        end = f"nothing: if it does not stop serving in time, its supervisor kills them; {end}"
    pid = (supervisor.want.pid or None) if supervisor is not None else None
    entered_ms = since_ms(lock, machine)

    def found(reason: str, since_ms: float = entered_ms) -> LockWaitFields:
        who = engine, holder.incarnation, holder.token, pid
        words: dict[str, Any] = {
            "lives": lives,
            "lost": lost,
            "end": end,
            "left": duration(left_ms),
        }
        words |= {"witness": holder.witness.name, "directory": here.directory}
        return wait(reason, here.clock, since_ms, evidence, who, **words)

    if holder.lease_ms is None and not lock.is_handed_over:
        if not seen.is_same_file:
            yield found("witness_lost")
        elif seen.probe is WitnessState.FREE and is_decisive(lock, machine.supervisors):
            yield found("witness_unsealed")
            return
    if lock.state is LockState.RECOVERING:
        yield found("recovering" if left_ms > 0 else "unresponsive", machine.started_ms)
    elif lock.state is LockState.RELEASING:
        yield found("releasing")
    elif supervisor is not None and supervisor.is_silent:
        yield found("unresponsive", supervisor.heard_ms)


def evidence_of(holder: Holder, seen: Seen) -> str:
    """What its witness shows; without a server an engine over TCP has no other evidence."""
    if holder.lease_ms is not None:
        return f"it cannot renew its lease of {duration(holder.lease_ms)}"
    shows = {
        WitnessState.HELD: f"is held by {named(seen.processes)}",
        WitnessState.UNSEEN: "cannot be checked: the lock server has no descriptor for it",
        WitnessState.FREE: "is free",
        WitnessState.UNPROVEN: "is sealed, or cannot be opened",
    }[seen.probe]
    if not seen.is_same_file:
        alive = f"; {named(seen.processes)} had it open" if seen.processes else ""
        shows = f"was removed or replaced{alive}"
    return f"witness {holder.witness.name} {shows}"


def _process(lock: Lock, supervisor: SupervisorRecord | None, halted: str | None) -> str:
    if lock.is_ended:
        return "its supervisor has ended this launch"
    if supervisor is not None:
        return _pidfd(supervisor, halted)
    if lock.state is LockState.RECOVERING:
        return "its supervisor has not connected to this server"
    return "its supervisor has exited" if lock.cause == Signal.PROCESS_GONE else "no pidfd"


def _pidfd(supervisor: SupervisorRecord, halted: str | None = None) -> str:
    """What the kernel shows of a known supervisor; `halted`: what keeps it from running."""
    if supervisor.is_leased:
        return "over TCP: its lease counts instead of its processes"
    if not supervisor.has_process:
        return "no pidfd: the supervisor counts as alive while it is connected"
    alive = f"its supervisor ({requester(supervisor.want.pid)}) is alive"
    return f"{alive}, {halted}" if halted else alive


def _lease(supervisor: SupervisorRecord | None, seen: Seen, now_ms: float) -> str:
    lease = f"its lease expires in {duration(seen.left_ms)}" if seen.left_ms else "no lease"
    if supervisor is None:
        return f"{lease}; it has not connected to this server"
    here = "" if supervisor.conn is not None else "; not connected"
    return f"{lease}{here}; last message {duration(now_ms - supervisor.heard_ms)} ago"


def _unknown_wait(here: Here, seen: Seen) -> LockWaitFields:
    shown = list(seen.strangers.items())[:NAMED_MAX]
    evidence = [f"witness {name} is held by {named(processes)}" for name, processes in shown]
    if len(seen.strangers) > len(shown):
        evidence.append(f"and {len(seen.strangers) - len(shown)} more")
    if seen.left_ms > 0:
        left = duration(seen.left_ms)
        evidence.append(f"leases granted before this server started may be valid for {left} more")
    pids = " ".join(str(each.pid) for _, processes in shown for each in processes)
    kill = f"kill -9 {pids}" if pids else "kill their containers"
    end = f"if these should not be running: {kill}; " if seen.strangers else ""
    evidence = evidence or ["no unknown process holds a witness"]
    return wait("unknown_holder", here.clock, here.machine.started_ms, evidence, end=end)


# ---------------------------------------------------------------------- the next grant


def _queue_waits(lock: Lock, here: Here) -> Iterator[LockWaitFields]:
    """What keeps the next grant from being made."""
    machine, clock = here.machine, here.clock
    supervisors, ledger = machine.supervisors, machine.ledger
    waiter = next_of(lock, supervisors)
    if ledger.problem is not None:
        who: Who = (waiter.engine, waiter.incarnation, None, None) if waiter else NOBODY
        why = [ledger.problem]
        directory = here.directory
        yield wait("write_failed", clock, ledger.problem_ms, why, who, directory=directory)
    if lock.name in machine.switchovers.under_way:
        yield _switchover_wait(lock, here)
    silent = [each for each in lock.waiters if supervisors[each.supervisor].is_silent]
    for each in silent[:SILENT_NAMED_MAX]:
        its = supervisors[each.supervisor]
        yield wait(
            *("waiter_silent", clock, its.heard_ms),
            ("connected, but no heartbeat since", _pidfd(its)),
            (each.engine, each.incarnation, None, its.want.pid),
            is_fault=lock.state is LockState.FREE,  # otherwise nothing is delayed by it
            end=kill_command(each.engine, (), its),
        )
    if lock.state is LockState.FREE and not lock.waiters:
        yield _nobody_asks_wait(lock, here)
    if lock.state is LockState.FREE or waiter is None:
        return
    holder, evidence = lock.holder, f"the lock is {lock.state}: see above"
    end = f"nothing more: {waiter.engine} is granted the lock once it is free"
    supervisor = supervisors.get(holder.supervisor) if holder is not None else None
    if holder is not None and supervisor is not None and lock.state is LockState.HELD:
        heard = duration(clock.now_ms() - supervisor.heard_ms)
        evidence = f"{holder.engine} holds it, token {holder.token}, last heartbeat {heard} ago"
        end = f"nothing: {waiter.engine} is granted when {holder.engine} releases it or is gone"
        if not supervisor.is_silent:
            flag = f" --lock {lock.name}" if model_of(lock.name) else ""
            end += f"; to switch now: lockserver switchover{flag} --to {waiter.engine}"
    first = waiter.engine, waiter.incarnation, None, supervisors[waiter.supervisor].want.pid
    words: dict[str, Any] = {"count": len(lock.waiters), "end": end}
    yield wait("queue", clock, waiter.since_ms, [evidence], first, is_fault=False, **words)


def _switchover_wait(lock: Lock, here: Here) -> LockWaitFields:
    found = here.machine.switchovers.under_way[lock.name]
    source, left_ms = found.source, max(0.0, found.deadline_ms - here.clock.now_ms())
    supervisor = here.machine.supervisors.get(source.supervisor)
    pid = supervisor.want.pid if supervisor is not None else None
    does = "it is finishing its requests: its processes are alive"
    deadline = f"{duration(left_ms)} until its deadline"
    end = f"nothing: {found.to} is granted the lock once {source.engine} has finished its requests"
    if found.is_overdue:
        deadline = "its deadline has passed"
        end = (
            "nothing: the request timed out and the handover continues; to see why it takes long,"
            f" run engine status --engine-id {source.engine}; request it again, or stop"
            f" {source.engine} and lose its requests in flight"
        )
    return wait(
        *("switchover", here.clock, found.since_ms),
        ("it has released the lock" if found.is_released else does, deadline),
        (source.engine, source.incarnation, source.token, pid),
        is_fault=found.is_overdue,
        to=found.to,
        by=requester(found.pid),
        end=end,
    )


def _nobody_asks_wait(lock: Lock, here: Here) -> LockWaitFields:
    machine, model = here.machine, model_of(lock.name)
    connected = [each for each in machine.supervisors.values() if each.conn is not None]
    evidence = [
        f"{each.engine} has not launched" if each.incarnation is None else f"{each.engine} prepares"
        for each in connected[:NAMED_MAX]
    ]
    end = f"start one: engine run --dir {here.directory}"
    end += f" --model-name {model}" if model else ""
    if connected:
        end = f"see why: engine status --dir {here.directory} --engine-id {connected[0].engine}"
    evidence = evidence or ["no engine is connected"]
    since = since_ms(lock, machine)
    return wait("nobody_asks", here.clock, since, evidence, is_fault=False, end=end)


# ---------------------------------------------------------------------- processes


def named(processes: Processes) -> str:
    """`pid 12 (vllm), pid 13 (vllm, stopped)`, or why there is nothing to name."""
    shown = ", ".join(
        f"pid {each.pid} ({each.name}{f', {each.halted}' if each.halted else ''})"
        for each in processes
    )
    return shown or "processes that are not visible from this container"


def kill_command(
    engine: str,
    processes: Processes,
    supervisor: SupervisorRecord | None = None,
    halted: str | None = None,
) -> str:
    """How to kill the remaining processes, by their visible pids; never pid 0, which would be the
    process group of the operator's shell."""
    pids = [each.pid for each in processes]
    if supervisor is not None and supervisor.want.pid not in (0, *pids):
        pids.insert(0, supervisor.want.pid)
    if not pids:
        return f"if it hangs, kill the container of {engine} (kubectl delete pod, podman kill)"
    kill = f"if it hangs: kill -9 {' '.join(map(str, pids))} (if it was only stopped: kill -CONT)"
    if "frozen" in (halted, *(each.halted for each in processes)):
        return f"{RESUME['frozen']}: frozen processes may not even die before; {kill}"
    return kill


def built(**fields: Any) -> dict[str, Any]:
    """The document with these fields of `LockserverStatus`, whose defaults are those of a pod
    without a server."""
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
        kind=KIND,
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
        if each.conn is not None and not each.claims(lock.name)
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
        wants=[each.said.lock] if each.said.is_wanted else [],
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
    found = state_file.read(directory, locks_of(()))
    if found is None:
        return None
    clock, record = SystemClock(), found.record
    written_s = os.stat(os.path.join(directory, state_file.NAME)).st_mtime
    written_ms = clock.now_ms() - (time.time() - written_s) * 1000
    start = f"start it: lockserver serve --dir {directory}; until then"
    what, fix = silent or (UNANSWERED, f"{start} {MEANWHILE}")
    locks = {}
    for name in locks_of(found.models, record):
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
            kind=KIND,
            state="unknown",
            **moment(since_ms, clock),
            holder=shown,
            waiting_for=list(seen.processes),
            waits=[wait("no_server", clock, since_ms, [evidence], whose, what=what, end=end)],
            problem=what,
        )
    return built(
        server=schema.LockServerFields(pid=None, since=None, dir=directory, online=False),
        models=list(found.models),
        era=record.era,
        token=record.token,
        problem=found.problem,
        locks=locks,
    )
