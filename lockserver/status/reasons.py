"""What a lock waits for: `TEXTS` is the table of the states that can last, each with its sentence
and its fix; `waits_of` finds those that a lock is in, with who, since when and the evidence.

Pure: `online` looks at witnesses and /proc. Waits that are no fault are listed too: a queue
behind a live holder and a lock that no engine asks for are the two questions that operators ask
about a healthy pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockserver.core.events import Holder
from lockserver.core.evidence import is_decisive
from lockserver.core.lock import Lock, LockState, Signal, next_waiter
from lockserver.core.machine import LockMachine
from lockserver.core.names import WitnessState
from lockserver.core.sentences import requester
from lockserver.core.supervisors import SupervisorRecord
from plumbing.pod.models import ACTIVE, kind_of, model_of
from plumbing.service.clock import Clock
from plumbing.text import duration

FROZEN = "frozen"  # of `procfs.halted`
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
    "unreachable": (
        "engines that are not connected cannot request the lock",
        "{end}; the server retries on its own",
    ),
    "no_server": ("{what}", "{end}"),
}
# Shown beside a lock: they are no lock's own problem.
ELSEWHERE = frozenset({"address_away", "no_gateway", "unreachable"})

Process = Mapping[str, Any]  # {"pid", "name", "halted"}
Who = tuple[str | None, str | None, int | None, int | None]  # engine, incarnation, token, pid
NOBODY: Who = (None, None, None, None)


@dataclass(frozen=True, slots=True)
class LockWait:
    """One thing that is waited for. `is_fault`: an operator should look; otherwise all is well."""

    reason: str
    message: str
    fix: str
    since_ms: float
    evidence: tuple[str, ...]
    engine: str | None = None
    incarnation: str | None = None
    token: int | None = None
    pid: int | None = None
    is_fault: bool = True

    @property
    def sentence(self) -> str:
        return f"{self.message}: {'; '.join(self.evidence)}; {self.fix}"


def wait(
    reason: str,
    since_ms: float,
    evidence: Sequence[str],
    who: Who = NOBODY,
    *,
    is_fault: bool = True,
    **words: Any,
) -> LockWait:
    """The wait for `reason`, with the words of its text."""
    message, fix = (text.format(**{"engine": who[0], **words}) for text in TEXTS[reason])
    return LockWait(reason, message, fix, since_ms, tuple(evidence), *who, is_fault=is_fault)


# ---------------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look at the evidence showed.

    `left_ms`: of a holder over TCP, how long its lease is still valid. Where the holder is not on
    file, `strangers` are the held witnesses that belong to no connected engine, each with its
    processes, and `strangers_ms` is how long engines over TCP that have not connected may still be
    alive."""

    is_same_file: bool = True
    probe: WitnessState = WitnessState.UNPROVEN
    processes: Sequence[Process] = ()
    halted: str | None = None  # what keeps the holder's supervisor from running
    left_ms: float = 0.0
    strangers: Mapping[str, Sequence[Process]] = field(default_factory=dict)
    strangers_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class MissingGateway:
    """No gateway accepts on a service address. `connected`: a sentence on each that could;
    `is_overdue`: that is a fault, and no slow start of the pod."""

    address: str
    since_ms: float
    connected: Sequence[str]
    is_overdue: bool


class Reach(Protocol):
    """Whether engines can connect: the server's directory."""

    problem: str | None
    problem_ms: float  # since when

    @property
    def is_short(self) -> bool: ...


class Address(Protocol):
    """The service address, and why it is not here if it `is_away`."""

    address: str
    problem: str | None

    @property
    def is_away(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Here:
    """Where the facts are: the machine and what is around it."""

    machine: LockMachine
    clock: Clock
    directory: str
    reach: Reach
    service: Address | None
    no_gateway: MissingGateway | None


# ---------------------------------------------------------------------- one lock's waits


def waits_of(lock: Lock, here: Here, seen: Seen, now_ms: float) -> list[LockWait]:
    """Everything that this lock and its waiters wait for, the gravest first."""
    found: list[LockWait] = []
    if lock.holder is not None:
        found += _holder_waits(lock, lock.holder, here, seen, now_ms)
    elif lock.is_unknown:
        found.append(_unknown_wait(here, seen))
    found += _queue_waits(lock, here, now_ms)
    found += _server_waits(lock, here)
    return found


def since_ms(lock: Lock, machine: LockMachine) -> float:
    """When the lock entered its present state."""
    if lock.state is LockState.HELD and lock.holder is not None:
        return lock.holder.since_mono_ms
    entered = lock.lost_ms if lock.state is LockState.RELEASING else lock.fenced_ms
    return machine.started_ms if entered is None else entered


def _holder_waits(
    lock: Lock, holder: Holder, here: Here, seen: Seen, now_ms: float
) -> Iterator[LockWait]:
    machine, entered_ms = here.machine, since_ms(lock, here.machine)
    supervisor = machine.supervisors.get(holder.supervisor)
    pid = supervisor.pid if supervisor is not None and supervisor.pid else None
    who = holder.engine, holder.incarnation, holder.token, pid
    if lock.is_handed_over:
        name = holder.serving.name if holder.serving else f"witness {holder.witness.name}"
        evidence = f"{name} is held by {named(seen.processes)}, or was removed or replaced"
        end = kill_command(holder.engine, seen.processes)
        yield wait(
            *("releasing", entered_ms, (evidence,), who),
            lost="has handed the lock over",
            lives="it is not proven that none of its processes serves",
            end=f"nothing: if it does not stop serving in time, its supervisor kills them; {end}",
        )
        return
    evidences: Sequence[str] = _witness(holder, seen), _process(lock, supervisor, seen.halted)
    if holder.lease_ms is not None:
        evidences = (_lease(supervisor, seen, now_ms),)
    lives = "its processes are alive" if holder.lease_ms is None else "its lease is valid"
    words: dict[str, Any] = {"witness": holder.witness.name, "directory": here.directory}
    words["lives"] = lives
    if lock.is_fenced and holder.lease_ms is None and not seen.is_same_file:
        yield wait("witness_lost", entered_ms, evidences, who, **words)
    elif (
        seen.probe is WitnessState.FREE
        and lock.is_fenced
        and is_decisive(lock, machine.supervisors)
    ):
        yield wait("witness_unsealed", entered_ms, evidences, who, **words)
        return
    left_ms = machine.started_ms + machine.window_ms - now_ms
    if lock.state is LockState.RECOVERING and left_ms > 0:
        left = duration(left_ms)
        yield wait("recovering", machine.started_ms, evidences, who, left=left, **words)
    elif lock.state is LockState.RECOVERING:
        end = _end(holder, seen)
        yield wait("unresponsive", machine.started_ms, evidences, who, end=end, **words)
    elif lock.state is LockState.RELEASING:
        end = _end(holder, seen, None if lock.is_ended else supervisor)
        lost = "has released the lock" if lock.is_ended else "has lost the lock server"
        if lock.cause == Signal.PROCESS_GONE:
            lost = "has lost its supervisor"
        yield wait("releasing", entered_ms, evidences, who, lost=lost, end=end, **words)
    elif supervisor is not None and supervisor.is_silent:
        end = _end(holder, seen, supervisor)
        yield wait("unresponsive", supervisor.heard_ms, evidences, who, end=end, **words)


def _witness(holder: Holder, seen: Seen) -> str:
    name = holder.witness.name
    if not seen.is_same_file:
        alive = f"; {named(seen.processes)} had it open" if seen.processes else ""
        return f"witness {name} was removed or replaced{alive}"
    if seen.probe is WitnessState.HELD:
        return f"witness {name} is held by {named(seen.processes)}"
    if seen.probe is WitnessState.UNSEEN:
        return f"witness {name} cannot be checked: the lock server has no descriptor for it"
    what = "free" if seen.probe is WitnessState.FREE else "sealed, or cannot be opened"
    return f"witness {name} is {what}"


def _process(lock: Lock, supervisor: SupervisorRecord | None, halted: str | None) -> str:
    if lock.is_ended:
        return "its supervisor has ended this launch"
    if supervisor is not None:
        return pidfd_of(supervisor, halted)
    if lock.state is LockState.RECOVERING:
        return "its supervisor has not connected to this server"
    return "its supervisor has exited" if lock.cause == Signal.PROCESS_GONE else "no pidfd"


def _lease(supervisor: SupervisorRecord | None, seen: Seen, now_ms: float) -> str:
    lease = f"its lease expires in {duration(seen.left_ms)}" if seen.left_ms else "no lease"
    if supervisor is None:
        return f"{lease}; it has not connected to this server"
    here = "" if supervisor.conn is not None else "; not connected"
    return f"{lease}{here}; last message {duration(now_ms - supervisor.heard_ms)} ago"


def _end(holder: Holder, seen: Seen, supervisor: SupervisorRecord | None = None) -> str:
    """What would end the wait."""
    if holder.lease_ms is None:
        halted = seen.halted if supervisor is not None else None
        return kill_command(holder.engine, seen.processes, supervisor, halted)
    return (
        f"nothing: its lease expires in {duration(seen.left_ms)} unless it is renewed; if"
        f" {holder.engine} hangs and keeps renewing it, kill its container or host"
    )


def _unknown_wait(here: Here, seen: Seen) -> LockWait:
    shown = list(seen.strangers.items())[:NAMED_MAX]
    evidence = [f"witness {name} is held by {named(processes)}" for name, processes in shown]
    if len(seen.strangers) > len(shown):
        evidence.append(f"and {len(seen.strangers) - len(shown)} more")
    if seen.strangers_ms > 0:
        left = duration(seen.strangers_ms)
        evidence.append(f"leases granted before this server started may be valid for {left} more")
    pids = [each["pid"] for _, processes in shown for each in processes]
    kill = f"kill -9 {' '.join(map(str, pids))}" if pids else "kill their containers"
    end = f"if these should not be running: {kill}; " if seen.strangers else ""
    evidence = evidence or ["no unknown process holds a witness"]
    return wait("unknown_holder", here.machine.started_ms, evidence, end=end)


def _queue_waits(lock: Lock, here: Here, now_ms: float) -> Iterator[LockWait]:
    """What keeps the next grant from being made."""
    machine = here.machine
    supervisors = machine.supervisors
    silent_ids = {each.id for each in supervisors.values() if each.is_silent}
    waiter = next_waiter(lock.waiters, silent_ids, lock.preferred)
    ledger = machine.ledger
    if ledger.problem is not None:
        who = (waiter.engine, waiter.incarnation, None, None) if waiter else NOBODY
        since, why = ledger.problem_ms, (ledger.problem,)
        yield wait("write_failed", since, why, who, directory=here.directory)
    if lock.name in machine.switchovers.under_way:
        yield _switchover_wait(lock, machine, now_ms)
    silent = [each for each in lock.waiters if each.supervisor in silent_ids]
    for each in silent[:SILENT_NAMED_MAX]:
        its = supervisors[each.supervisor]
        yield wait(
            *("waiter_silent", its.heard_ms),
            ("connected, but no heartbeat since", pidfd_of(its)),
            (each.engine, each.incarnation, None, its.pid),
            is_fault=lock.state is LockState.FREE,  # otherwise nothing is delayed by it
            end=kill_command(each.engine, (), its),
        )
    if lock.state is LockState.FREE and lock.is_fenced and not lock.waiters:
        yield _nobody_asks_wait(lock, here)
    if lock.state is LockState.FREE or waiter is None:
        return
    holder, evidence = lock.holder, f"the lock is {lock.state}: see above"
    end = f"nothing more: {waiter.engine} is granted the lock once it is free"
    supervisor = supervisors.get(holder.supervisor) if holder is not None else None
    if holder is not None and supervisor is not None and lock.state is LockState.HELD:
        heard = duration(now_ms - supervisor.heard_ms)
        evidence = f"{holder.engine} holds it, token {holder.token}, last heartbeat {heard} ago"
        end = f"nothing: {waiter.engine} is granted when {holder.engine} releases it or is gone"
        if lock.is_fenced and not supervisor.is_silent:
            flag = f" --lock {lock.name}" if model_of(lock.name) else ""
            end += f"; to switch now: lockserver switchover{flag} --to {waiter.engine}"
    first = waiter.engine, waiter.incarnation, None, supervisors[waiter.supervisor].pid
    words: dict[str, Any] = {"count": len(lock.waiters), "end": end}
    yield wait("queue", waiter.since_ms, (evidence,), first, is_fault=False, **words)


def _switchover_wait(lock: Lock, machine: LockMachine, now_ms: float) -> LockWait:
    found = machine.switchovers.under_way[lock.name]
    source, left_ms = found.source, max(0.0, found.deadline_ms - now_ms)
    supervisor = machine.supervisors.get(source.supervisor)
    pid = supervisor.pid if supervisor is not None else None
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
        *("switchover", found.since_ms),
        ("it has released the lock" if found.is_released else does, deadline),
        (source.engine, source.incarnation, source.token, pid),
        is_fault=found.is_overdue,
        to=found.to,
        by=requester(found.pid),
        end=end,
    )


def _nobody_asks_wait(lock: Lock, here: Here) -> LockWait:
    machine, model = here.machine, model_of(lock.name)
    connected = [each for each in machine.supervisors.values() if each.conn is not None]
    evidence = [
        f"{each.engine} ({pid_of(each)}) "
        + ("has not launched" if each.incarnation is None else f"is preparing {each.incarnation}")
        for each in connected[:NAMED_MAX]
    ]
    end = f"start one: engine run --dir {here.directory}"
    end += f" --model-name {model}" if model else ""
    if connected:
        end = f"see why: engine status --dir {here.directory} --engine-id {connected[0].engine}"
    evidence = evidence or ["no engine is connected"]
    return wait("nobody_asks", since_ms(lock, machine), evidence, is_fault=False, end=end)


def _server_waits(lock: Lock, here: Here) -> Iterator[LockWait]:
    """What the lock server itself, its address and its gateways owe."""
    service, directory = here.service, here.reach
    if kind_of(lock.name) == ACTIVE:  # one service for all models
        if service is not None and service.is_away:
            started_ms, why = here.machine.started_ms, service.problem or "it is in use"
            yield wait("address_away", started_ms, (why,), address=service.address)
        if here.no_gateway is not None:
            yield gateway_wait(here.no_gateway, here.directory)
    if directory.problem is not None and lock.is_fenced:  # told once for the whole document
        end = f"remove the file that replaced it (ls -la {here.directory})"
        if directory.is_short:
            end = "raise the limit of open files or of memory, or close what uses them up"
        yield wait("unreachable", directory.problem_ms, (directory.problem,), end=end)


def gateway_wait(missing: MissingGateway, directory: str) -> LockWait:
    """What requests wait for. Engines are granted their locks all the same."""
    evidence = tuple(missing.connected) or ("no gateway is connected",)
    end = "see why: gateway status" if missing.connected else "start one: gateway serve"
    words: dict[str, Any] = {"address": missing.address, "end": end, "directory": directory}
    return wait("no_gateway", missing.since_ms, evidence, is_fault=missing.is_overdue, **words)


# ---------------------------------------------------------------------- words that several share

RESUME = {  # by `procfs.halted`: how a process runs again
    "stopped": "resume it: kill -CONT {pid}",
    FROZEN: "thaw its container or cgroup (docker unpause; echo THAWED to its freezer.state)",
}


def named(processes: Sequence[Process]) -> str:
    """`pid 12 (vllm), pid 13 (vllm, stopped)`, or why there is nothing to name."""
    if not processes:
        return "processes that are not visible from this container"
    words = ((each["pid"], each["name"], each.get("halted")) for each in processes)
    return ", ".join(
        f"pid {pid} ({name}{', ' + halt if halt else ''})" for pid, name, halt in words
    )


def pid_of(supervisor: SupervisorRecord) -> str:
    return f"pid {supervisor.pid}" if supervisor.pid else "pid not visible here"


def pidfd_of(supervisor: SupervisorRecord, halted: str | None = None) -> str:
    """What the kernel shows of a known supervisor; `halted`: what keeps it from running."""
    if supervisor.is_leased:
        return "over TCP: its lease counts instead of its processes"
    if not supervisor.has_process:
        return "no pidfd: the supervisor counts as alive while it is connected"
    return f"its supervisor ({pid_of(supervisor)}) is alive" + (f", {halted}" if halted else "")


def kill_command(
    engine: str,
    processes: Sequence[Process],
    supervisor: SupervisorRecord | None = None,
    halted: str | None = None,
) -> str:
    """How to kill the remaining processes, by their visible pids; never pid 0, which would be the
    process group of the operator's shell."""
    pids = [int(each["pid"]) for each in processes]
    if supervisor is not None and supervisor.pid and supervisor.pid not in pids:
        pids.insert(0, supervisor.pid)
    if not pids:
        return f"if it hangs, kill the container of {engine} (kubectl delete pod, podman kill)"
    kill = f"kill -9 {' '.join(map(str, pids))} (if it was only stopped: kill -CONT)"
    if FROZEN in (halted, *(each.get("halted") for each in processes)):
        return (
            "thaw its container or cgroup first (docker unpause; echo THAWED to its freezer.state):"
            f" frozen processes may not even die before; if it still hangs then: {kill}"
        )
    return f"if it hangs: {kill}"
