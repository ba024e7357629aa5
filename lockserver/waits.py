"""What a lock waits for: each state that can last, as who, since when, what remains, what to do.

Pure: `status.py` looks at witnesses and /proc, this file says what follows. Decides nothing about
locks. A `Wait` that is no fault is here all the same: a queue behind a live holder and a lock that
nobody asks for are the two questions that people ask of a pod that is well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockserver.core import sentences
from lockserver.core.events import Holder
from lockserver.core.evidence import is_decisive
from lockserver.core.lock import Lock, LockState, Signal
from lockserver.core.machine import Machine
from lockserver.core.queue import Waiter, next_waiter
from lockserver.core.supervisor import Supervisor
from lockserver.core.switchover import Switchover
from lockserver.witness import Probe

SILENT_NAMED_MAX = 16  # silent waiters told one by one; `waiters` has all of them
PEOPLE_NAMED_MAX = 8  # engines or witnesses named in one sentence

Process = Mapping[str, Any]  # {"pid", "name"}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look at the evidence showed. `strangers`: of a lock whose holder is not on file, the
    held witnesses that no connected engine accounts for, each with its processes."""

    is_same_file: bool = True
    probe: Probe = Probe.UNPROVEN
    processes: Sequence[Process] = ()
    strangers: Mapping[str, Sequence[Process]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that is waited for. `is_fault`: somebody should look; else all is well."""

    reason: str
    message: str
    since_ms: float
    evidence: tuple[str, ...]
    mend: str
    engine: str | None = None
    incarnation: str | None = None
    token: int | None = None
    pid: int | None = None
    is_fault: bool = True

    @property
    def sentence(self) -> str:
        return f"{self.message}: {'; '.join(self.evidence)}; {self.mend}"


def named(processes: Sequence[Process]) -> str:
    """`pid 12 (vllm), pid 13 (vllm)`, or why there is nothing to name."""
    if not processes:
        return "processes that are not visible from this container"
    return ", ".join(f"pid {each['pid']} ({each['name']})" for each in processes)


def since_ms(lock: Lock, machine: Machine) -> float:
    """When the lock came into the state that it is in."""
    if lock.state is LockState.HELD and lock.holder is not None:
        return lock.holder.since_mono_ms
    entered = lock.lost_ms if lock.state is LockState.RELEASING else lock.fenced_ms
    return machine.started_ms if entered is None else entered


def waits_of(lock: Lock, machine: Machine, seen: Seen, now_ms: float, directory: str) -> list[Wait]:
    """Everything that this lock, and those who want it, wait for; the gravest first."""
    found: list[Wait] = []
    if lock.holder is not None:
        found += _of_holder(lock, lock.holder, machine, seen, now_ms, directory)
    elif lock.is_unknown:
        found.append(_unknown(lock, machine, seen))
    if machine.ledger.problem is not None:
        found.append(_write_failed(lock, machine, directory))
    if lock.name in machine.switchovers.under_way:
        found.append(_switchover(machine.switchovers.under_way[lock.name], machine, now_ms))
    found += _silent_waiters(lock, machine)
    if lock.state is LockState.FREE and lock.is_fenced and not lock.waiters:
        found.append(_nobody_asks(lock, machine, directory))
    if lock.state is not LockState.FREE:
        found += _queue(lock, machine, now_ms)
    return found


# ---------------------------------------------------------------------- a holder


def _of_holder(
    lock: Lock, holder: Holder, machine: Machine, seen: Seen, now_ms: float, directory: str
) -> Iterator[Wait]:
    supervisor = machine.supervisors.get(holder.supervisor)
    evidence = (_witness(holder, seen), _process(lock, supervisor))

    def wait(reason: str, message: str, since: float, mend: str) -> Wait:
        pid = supervisor.pid if supervisor is not None else None
        who = (holder.engine, holder.incarnation, holder.token, pid)
        return Wait(reason, message, since, evidence, mend, *who)

    if lock.is_fenced and not seen.is_same_file:
        yield wait(
            "witness_lost",
            f"the witness {holder.witness.name} was removed or replaced, so the end of"
            f" {holder.engine} cannot be proven and nobody can be granted after it",
            since_ms(lock, machine),
            "once none of its processes lives, stop the lock server, move lockserver.json away and"
            " start it again",
        )
    elif seen.probe is Probe.FREE and lock.is_fenced and is_decisive(lock, machine.supervisors):
        yield wait(
            "witness_unsealed",
            f"no process holds the witness {holder.witness.name}, but it cannot be sealed against"
            " late ones",
            since_ms(lock, machine),
            f"make {directory} and the files in it writable; it is tried again all the time",
        )
        return
    if lock.state is LockState.RECOVERING:
        left_ms = machine.started_ms + machine.window_ms - now_ms
        if left_ms > 0:
            yield wait(
                "recovering",
                f"waiting up to {left_ms / 1000:.0f} s to hear from {holder.engine}, which held it"
                " before this server started",
                machine.started_ms,
                "nothing yet: engines connect again by themselves; then whom to kill is said here",
            )
        else:
            yield wait(
                "unresponsive",
                f"{holder.engine} is unresponsive since this server started and is not replaced"
                " while its processes live",
                machine.started_ms,
                _kill(holder.engine, seen.processes),
            )
    elif lock.state is LockState.RELEASING:
        message, mend = _releasing(lock, holder, supervisor, seen)
        yield wait("releasing", message, since_ms(lock, machine), mend)
    elif supervisor is not None and supervisor.is_silent:
        yield wait(
            "unresponsive",
            f"{holder.engine} is unresponsive and is not replaced while its processes live",
            supervisor.heard_ms,
            _kill(holder.engine, seen.processes, supervisor),
        )


def _releasing(
    lock: Lock, holder: Holder, supervisor: Supervisor | None, seen: Seen
) -> tuple[str, str]:
    """What a lock that is going still waits for, and what to do."""
    kill = _kill(holder.engine, seen.processes)
    if lock.is_ended:
        message = f"{holder.engine} gave it back, and processes of that launch are still alive"
    elif supervisor is not None:
        message = (
            f"{holder.engine} is no longer connected, and its supervisor lives: waiting for it to"
            " connect again or to end"
        )
        kill = _kill(holder.engine, seen.processes, supervisor)
    elif lock.cause == Signal.CONNECTION_CLOSED:
        message = f"{holder.engine} is no longer connected, and its processes are still alive"
    else:
        message = f"{holder.engine}'s supervisor has ended, and what it started is still alive"
    return message, kill


def _witness(holder: Holder, seen: Seen) -> str:
    name = holder.witness.name
    if not seen.is_same_file:
        alive = f"; {named(seen.processes)} had it open" if seen.processes else ""
        return f"witness {name} removed or replaced{alive}"
    if seen.probe is Probe.HELD:
        return f"witness {name} held by {named(seen.processes)}"
    return f"witness {name} {'free' if seen.probe is Probe.FREE else 'sealed'}"


def _process(lock: Lock, supervisor: Supervisor | None) -> str:
    if lock.is_ended:
        return "its supervisor says that this launch is over"
    if supervisor is None:
        if lock.state is LockState.RECOVERING:
            return "its supervisor has not been heard by this server"
        return "its supervisor has ended" if lock.cause == Signal.PROCESS_GONE else "no pidfd"
    return _pidfd(supervisor)


def _pidfd(supervisor: Supervisor) -> str:
    if not supervisor.has_process:
        return "no pidfd: its connection stands for its supervisor"
    return f"pidfd of its supervisor, {_pid(supervisor)}, not readable: it lives"


def _pid(supervisor: Supervisor) -> str:
    return f"pid {supervisor.pid}" if supervisor.pid else "whose pid is not visible here"


def _kill(engine: str, processes: Sequence[Process], supervisor: Supervisor | None = None) -> str:
    """The command that ends what remains, with the pids that are visible. Never pid 0, which
    would be the whole process group of whoever types it."""
    pids = [int(each["pid"]) for each in processes]
    if supervisor is not None and supervisor.pid and supervisor.pid not in pids:
        pids.insert(0, supervisor.pid)
    if not pids:
        return f"if it hangs, end the container of {engine} (kubectl delete pod, podman kill)"
    return f"if it hangs: kill -9 {' '.join(map(str, pids))} (if it was stopped: kill -CONT)"


def _switchover(found: Switchover, machine: Machine, now_ms: float) -> Wait:
    source, left_s = found.source, max(0.0, found.deadline_ms - now_ms) / 1000
    supervisor = machine.supervisors.get(source.supervisor)
    mend = f"nothing: {found.to} has it as soon as the requests of {source.engine} are finished"
    if found.is_overdue:
        mend = (
            f"nobody waits for it any more, and it still comes; look with engine status --engine-id"
            f" {source.engine}, ask again, or end {source.engine}: requests in flight are lost then"
        )
    return Wait(
        "switchover",
        f"{source.engine} hands it over to {found.to}, as {sentences.asker(found.pid)} asked",
        found.since_ms,
        (
            "it has given the lock back"
            if found.is_given_up
            else "it finishes its requests: its processes live",
            "its time is up" if found.is_overdue else f"{left_s:.0f} s of its time are left",
        ),
        mend,
        source.engine,
        source.incarnation,
        source.token,
        supervisor.pid if supervisor is not None else None,
        is_fault=found.is_overdue,
    )


# ---------------------------------------------------------------------- no holder on file


def _unknown(lock: Lock, machine: Machine, seen: Seen) -> Wait:
    named_here = list(seen.strangers.items())[:PEOPLE_NAMED_MAX]
    evidence = [f"witness {name} held by {named(processes)}" for name, processes in named_here]
    if len(seen.strangers) > len(named_here):
        evidence.append(f"and {len(seen.strangers) - len(named_here)} more")
    pids = [each["pid"] for _, processes in named_here for each in processes]
    kill = f"kill -9 {' '.join(map(str, pids))}" if pids else "end their containers"
    return Wait(
        "unknown_holder",
        "who holds it is not on file: waiting for a claim, or until no process outside the"
        " connected engines holds a witness in the directory",
        machine.started_ms,
        tuple(evidence) or ("no witness is held by a stranger",),
        f"if they should not run: {kill}; engines that live connect and claim by themselves",
    )


def _nobody_asks(lock: Lock, machine: Machine, directory: str) -> Wait:
    connected = [each for each in machine.supervisors.values() if each.conn is not None]
    evidence = [
        f"{each.engine} ({_pid(each)}) "
        + ("has no launch" if each.incarnation is None else f"prepares {each.incarnation}")
        for each in connected[:PEOPLE_NAMED_MAX]
    ]
    mend = f"start one: engine run --dir {directory}"
    if connected:
        engine = connected[0].engine
        mend = f"ask it why: engine status --dir {directory} --engine-id {engine}"
    return Wait(
        "nobody_asks",
        "nobody asks for it: no engine is prepared",
        since_ms(lock, machine),
        tuple(evidence) or ("no engine is connected",),
        mend,
        is_fault=False,
    )


# ---------------------------------------------------------------------- those who want it


def _write_failed(lock: Lock, machine: Machine, directory: str) -> Wait:
    assert machine.ledger.problem is not None
    waiter = _next(lock, machine)
    return Wait(
        "write_failed",
        "nobody can be granted",
        machine.ledger.problem_ms,
        (machine.ledger.problem,),
        f"mend the disk under {directory} (df -h {directory}); then it goes on by itself",
        engine=waiter.engine if waiter else None,
        incarnation=waiter.incarnation if waiter else None,
    )


def _silent_waiters(lock: Lock, machine: Machine) -> Iterator[Wait]:
    waiting = [(each, machine.supervisors[each.supervisor]) for each in lock.waiters]
    silent = [pair for pair in waiting if pair[1].is_silent]
    for waiter, supervisor in silent[:SILENT_NAMED_MAX]:
        yield Wait(
            "waiter_silent",
            f"{waiter.engine} is silent, and passed over until it is heard; it keeps its place",
            supervisor.heard_ms,
            ("connected, and no heartbeat since", _pidfd(supervisor)),
            _kill(waiter.engine, (), supervisor),
            waiter.engine,
            waiter.incarnation,
            pid=supervisor.pid,
            is_fault=lock.state is LockState.FREE,  # else nothing waits for this one
        )


def _queue(lock: Lock, machine: Machine, now_ms: float) -> Iterator[Wait]:
    waiter = _next(lock, machine)
    if waiter is None:
        return
    holder, evidence = lock.holder, f"the lock is {lock.state}, as said above"
    mend = f"nothing more: {waiter.engine} is granted once the lock is free"
    supervisor = machine.supervisors.get(holder.supervisor) if holder is not None else None
    if holder is not None and supervisor is not None and lock.state is LockState.HELD:
        heard_ms = now_ms - supervisor.heard_ms
        evidence = f"{holder.engine} holds it, token {holder.token}, heard {heard_ms:.0f} ms ago"
        mend = f"nothing: {waiter.engine} is granted when {holder.engine} gives it back or is gone"
        if lock.is_fenced and not supervisor.is_silent:
            mend += f"; to change over now: lockserver switchover --to {waiter.engine}"
    yield Wait(
        "queue",
        f"{waiter.engine} is next of {len(lock.waiters)}",
        waiter.since_ms,
        (evidence,),
        mend,
        waiter.engine,
        waiter.incarnation,
        pid=machine.supervisors[waiter.supervisor].pid,
        is_fault=False,
    )


def _next(lock: Lock, machine: Machine) -> Waiter | None:
    silent = {each.id for each in machine.supervisors.values() if each.is_silent}
    return next_waiter(lock.waiters, silent, lock.preferred)


# ---------------------------------------------------------------------- its address


def address_away(address: str, problem: str | None, machine: Machine) -> Wait:
    """After a restart: the service address of a lock is still with the engines, or a stranger's."""
    return Wait(
        "address_away",
        f"{address} is waited for: an engine that has it hands it back when it connects",
        machine.started_ms,
        (problem or "it is in use",),
        "nothing if an engine has it; else stop who has it, or choose another --service",
    )
