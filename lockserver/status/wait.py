"""One wait, the words that all waits share, and the waits for a lock's holder. Pure.

Waits for a holder: it is exiting, silent, not back after a restart, handing over, or unknown. Other
waits, and which a lock has, are in `waits`; processes are looked up by `document`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockserver.core import sentences
from lockserver.core.events import Holder
from lockserver.core.evidence import is_decisive
from lockserver.core.lock import Lock, LockState, Signal
from lockserver.core.machine import LockMachine
from lockserver.core.names import WitnessState
from lockserver.core.supervisors import SupervisorRecord
from lockserver.core.switchover import Switchover

NAMED_MAX = 8  # engines or witnesses named in one sentence

Process = Mapping[str, Any]  # {"pid", "name"}


@dataclass(frozen=True, slots=True)
class SeenMember:
    """One member over TCP. `left_ms`: of its lease and the margin, None once that has ended;
    `heard_ms`: how long ago, None: not since the server's start."""

    index: int
    name: str = ""
    is_connected: bool = False
    left_ms: float | None = None
    heard_ms: float | None = None

    @property
    def sentence(self) -> str:
        who = f"member {self.index}" + (f" ({self.name})" if self.name else "")
        lease = "no lease" if self.left_ms is None else f"lease ends in {self.left_ms:.0f} ms"
        here = "" if self.is_connected else ", not connected"
        heard = "never heard" if self.heard_ms is None else f"heard {self.heard_ms:.0f} ms ago"
        return f"{who}: {lease}{here}, {heard}"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look at the evidence showed. Of a holder over TCP it is its members; of a lock whose
    holder is not on file it is `strangers`, the held witnesses that no connected engine accounts
    for, each with its processes, and for how long members may live that were not heard yet."""

    is_same_file: bool = True
    probe: WitnessState = WitnessState.UNPROVEN
    processes: Sequence[Process] = ()
    members: Sequence[SeenMember] = ()
    strangers: Mapping[str, Sequence[Process]] = field(default_factory=dict)
    strangers_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class LockWait:
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


def since_ms(lock: Lock, machine: LockMachine) -> float:
    """When the lock came into the state that it is in."""
    if lock.state is LockState.HELD and lock.holder is not None:
        return lock.holder.since_mono_ms
    entered = lock.lost_ms if lock.state is LockState.RELEASING else lock.fenced_ms
    return machine.started_ms if entered is None else entered


def named(processes: Sequence[Process]) -> str:
    """`pid 12 (vllm), pid 13 (vllm)`, or why there is nothing to name."""
    if not processes:
        return "processes that are not visible from this container"
    return ", ".join(f"pid {each['pid']} ({each['name']})" for each in processes)


def pid_of(supervisor: SupervisorRecord) -> str:
    return f"pid {supervisor.pid}" if supervisor.pid else "whose pid is not visible here"


def pidfd_of(supervisor: SupervisorRecord) -> str:
    """What the kernel says of a supervisor that is known here."""
    if supervisor.lease is not None:
        return "over TCP: leases stand for its processes"
    if not supervisor.has_process:
        return "no pidfd: its connection stands for its supervisor"
    return f"pidfd of its supervisor, {pid_of(supervisor)}, not readable: it lives"


def kill(
    engine: str, processes: Sequence[Process], supervisor: SupervisorRecord | None = None
) -> str:
    """The command that ends what remains, with the pids that are visible. Never pid 0, which
    would be the whole process group of whoever types it."""
    pids = [int(each["pid"]) for each in processes]
    if supervisor is not None and supervisor.pid and supervisor.pid not in pids:
        pids.insert(0, supervisor.pid)
    if not pids:
        return f"if it hangs, end the container of {engine} (kubectl delete pod, podman kill)"
    return f"if it hangs: kill -9 {' '.join(map(str, pids))} (if it was stopped: kill -CONT)"


def holder_waits(
    lock: Lock, holder: Holder, machine: LockMachine, seen: Seen, now_ms: float, directory: str
) -> Iterator[LockWait]:
    supervisor = machine.supervisors.get(holder.supervisor)
    evidence = _evidence(lock, holder, supervisor, seen)
    lives = "its leases last" if holder.lease is not None else "its processes live"

    def wait(reason: str, message: str, since: float, mend: str) -> LockWait:
        pid = supervisor.pid if supervisor is not None and supervisor.pid else None
        who = (holder.engine, holder.incarnation, holder.token, pid)
        return LockWait(reason, message, since, evidence, mend, *who)

    if lock.is_fenced and holder.lease is None and not seen.is_same_file:
        yield wait(
            "witness_lost",
            f"the witness {holder.witness.name} was removed or replaced, so the end of"
            f" {holder.engine} cannot be proven and nobody can be granted after it",
            since_ms(lock, machine),
            "once none of its processes lives, stop the lock server, move lockserver.json away and"
            " start it again",
        )
    elif (
        seen.probe is WitnessState.FREE
        and lock.is_fenced
        and is_decisive(lock, machine.supervisors)
    ):
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
                f" while {lives}",
                machine.started_ms,
                _end(holder, seen),
            )
    elif lock.state is LockState.RELEASING:
        message = _releasing(lock, holder, supervisor)
        own = None if lock.is_ended else supervisor
        yield wait("releasing", message, since_ms(lock, machine), _end(holder, seen, own))
    elif supervisor is not None and supervisor.is_silent:
        yield wait(
            "unresponsive",
            f"{holder.engine} is unresponsive and is not replaced while {lives}",
            supervisor.heard_ms,
            _end(holder, seen, supervisor),
        )


def _releasing(lock: Lock, holder: Holder, supervisor: SupervisorRecord | None) -> str:
    """What a lock that is going still waits for."""
    engine = holder.engine
    if holder.lease is not None:
        how = "gave it back" if lock.is_ended else "is no longer whole"
        return f"{engine} {how}, and leases of that launch still last"
    if lock.is_ended:
        return f"{engine} gave it back, and processes of that launch are still alive"
    if supervisor is not None:
        return (
            f"{engine} is no longer connected, and its supervisor lives: waiting for it to connect"
            " again or to end"
        )
    if lock.cause == Signal.CONNECTION_CLOSED:
        return f"{engine} is no longer connected, and its processes are still alive"
    return f"{engine}'s supervisor has ended, and what it started is still alive"


def _evidence(
    lock: Lock, holder: Holder, supervisor: SupervisorRecord | None, seen: Seen
) -> tuple[str, ...]:
    if holder.lease is not None:
        return tuple(member.sentence for member in seen.members)
    return _witness(holder, seen), _process(lock, supervisor)


def _witness(holder: Holder, seen: Seen) -> str:
    name = holder.witness.name
    if not seen.is_same_file:
        alive = f"; {named(seen.processes)} had it open" if seen.processes else ""
        return f"witness {name} removed or replaced{alive}"
    if seen.probe is WitnessState.HELD:
        return f"witness {name} held by {named(seen.processes)}"
    what = "free" if seen.probe is WitnessState.FREE else "sealed, or not to be opened"
    return f"witness {name} {what}"


def _process(lock: Lock, supervisor: SupervisorRecord | None) -> str:
    if lock.is_ended:
        return "its supervisor says that this launch is over"
    if supervisor is not None:
        return pidfd_of(supervisor)
    if lock.state is LockState.RECOVERING:
        return "its supervisor has not been heard by this server"
    return "its supervisor has ended" if lock.cause == Signal.PROCESS_GONE else "no pidfd"


def _end(holder: Holder, seen: Seen, supervisor: SupervisorRecord | None = None) -> str:
    """What ends the wait."""
    if holder.lease is None:
        return kill(holder.engine, seen.processes, supervisor)
    alive = [member for member in seen.members if member.left_ms is not None]
    left_ms = max((member.left_ms or 0.0 for member in alive), default=0.0)
    who = ", ".join(str(member.index) for member in alive) or "none"
    return (
        f"nothing: the last lease ends in {left_ms / 1000:.1f} s, unless it is renewed; if a member"
        f" ({who}) hangs and renews, end its container or host"
    )


def switchover_wait(found: Switchover, machine: LockMachine, now_ms: float) -> LockWait:
    source, left_s = found.source, max(0.0, found.deadline_ms - now_ms) / 1000
    supervisor = machine.supervisors.get(source.supervisor)
    mend = f"nothing: {found.to} has it as soon as the requests of {source.engine} are finished"
    if found.is_overdue:
        mend = (
            f"nobody waits for it any more, and it still comes; look with engine status --engine-id"
            f" {source.engine}, ask again, or end {source.engine}: requests in flight are lost then"
        )
    return LockWait(
        "switchover",
        f"{source.engine} hands it over to {found.to}, as {sentences.requester(found.pid)} asked",
        found.since_ms,
        (
            "it has given the lock back"
            if found.is_released
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


def unknown_wait(lock: Lock, machine: LockMachine, seen: Seen) -> LockWait:
    named_here = list(seen.strangers.items())[:NAMED_MAX]
    evidence = [f"witness {name} held by {named(processes)}" for name, processes in named_here]
    if len(seen.strangers) > len(named_here):
        evidence.append(f"and {len(seen.strangers) - len(named_here)} more")
    if seen.strangers_ms > 0:
        left_s = seen.strangers_ms / 1000
        evidence.append(f"leases that began before this server may last for {left_s:.1f} s more")
    pids = [each["pid"] for _, processes in named_here for each in processes]
    end = f"kill -9 {' '.join(map(str, pids))}" if pids else "end their containers"
    mend = f"if they should not run: {end}; " if seen.strangers else ""
    return LockWait(
        "unknown_holder",
        "who holds it is not on file: waiting for a claim, or until no process outside the"
        " connected engines holds a witness in the directory, and no lease can last",
        machine.started_ms,
        tuple(evidence) or ("no witness is held by a stranger",),
        f"{mend}nothing else: engines that live connect and claim by themselves",
    )
