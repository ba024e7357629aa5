"""Waits for a holder: its end, its word after a restart or in silence, or who it is."""

from __future__ import annotations

from collections.abc import Iterator

from lockserver.core import sentences
from lockserver.core.events import Holder
from lockserver.core.evidence import is_decisive
from lockserver.core.lock import Lock, LockState, Signal
from lockserver.core.machine import Machine
from lockserver.core.supervisor import Supervisor
from lockserver.core.switchover import Switchover
from lockserver.status.wait import NAMED_MAX, Seen, Wait, kill, named, pidfd_of, since_ms
from lockserver.witness import Probe


def holder_waits(
    lock: Lock, holder: Holder, machine: Machine, seen: Seen, now_ms: float, directory: str
) -> Iterator[Wait]:
    supervisor = machine.supervisors.get(holder.supervisor)
    evidence = _evidence(lock, holder, supervisor, seen)
    lives = "its leases last" if holder.lease is not None else "its processes live"

    def wait(reason: str, message: str, since: float, mend: str) -> Wait:
        pid = supervisor.pid if supervisor is not None and supervisor.pid else None
        who = (holder.engine, holder.incarnation, holder.token, pid)
        return Wait(reason, message, since, evidence, mend, *who)

    if lock.is_fenced and holder.lease is None and not seen.is_same_file:
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


def _releasing(lock: Lock, holder: Holder, supervisor: Supervisor | None) -> str:
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
    lock: Lock, holder: Holder, supervisor: Supervisor | None, seen: Seen
) -> tuple[str, ...]:
    if holder.lease is not None:
        return tuple(member.sentence for member in seen.members)
    return _witness(holder, seen), _process(lock, supervisor)


def _witness(holder: Holder, seen: Seen) -> str:
    name = holder.witness.name
    if not seen.is_same_file:
        alive = f"; {named(seen.processes)} had it open" if seen.processes else ""
        return f"witness {name} removed or replaced{alive}"
    if seen.probe is Probe.HELD:
        return f"witness {name} held by {named(seen.processes)}"
    return f"witness {name} {'free' if seen.probe is Probe.FREE else 'sealed, or not to be opened'}"


def _process(lock: Lock, supervisor: Supervisor | None) -> str:
    if lock.is_ended:
        return "its supervisor says that this launch is over"
    if supervisor is not None:
        return pidfd_of(supervisor)
    if lock.state is LockState.RECOVERING:
        return "its supervisor has not been heard by this server"
    return "its supervisor has ended" if lock.cause == Signal.PROCESS_GONE else "no pidfd"


def _end(holder: Holder, seen: Seen, supervisor: Supervisor | None = None) -> str:
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


def switchover_wait(found: Switchover, machine: Machine, now_ms: float) -> Wait:
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


def unknown_wait(lock: Lock, machine: Machine, seen: Seen) -> Wait:
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
    return Wait(
        "unknown_holder",
        "who holds it is not on file: waiting for a claim, or until no process outside the"
        " connected engines holds a witness in the directory, and no lease can last",
        machine.started_ms,
        tuple(evidence) or ("no witness is held by a stranger",),
        f"{mend}nothing else: engines that live connect and claim by themselves",
    )
