"""One thing that is waited for, as people are told of it, and the words that all of them share.

Pure. What makes up a wait is in `wait_holder`, `wait_queue` and `wait_members`; which a lock has in
`waits`; what there is to be seen of processes is looked up by `status`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockserver.core.lock import Lock, LockState
from lockserver.core.machine import Machine
from lockserver.core.supervisor import Supervisor
from lockserver.witness import Probe

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
    probe: Probe = Probe.UNPROVEN
    processes: Sequence[Process] = ()
    members: Sequence[SeenMember] = ()
    strangers: Mapping[str, Sequence[Process]] = field(default_factory=dict)
    strangers_ms: float = 0.0


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


def since_ms(lock: Lock, machine: Machine) -> float:
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


def pid_of(supervisor: Supervisor) -> str:
    return f"pid {supervisor.pid}" if supervisor.pid else "whose pid is not visible here"


def pidfd_of(supervisor: Supervisor) -> str:
    """What the kernel says of a supervisor that is known here."""
    if supervisor.lease is not None:
        return "over TCP: leases stand for its processes"
    if not supervisor.has_process:
        return "no pidfd: its connection stands for its supervisor"
    return f"pidfd of its supervisor, {pid_of(supervisor)}, not readable: it lives"


def kill(engine: str, processes: Sequence[Process], supervisor: Supervisor | None = None) -> str:
    """The command that ends what remains, with the pids that are visible. Never pid 0, which
    would be the whole process group of whoever types it."""
    pids = [int(each["pid"]) for each in processes]
    if supervisor is not None and supervisor.pid and supervisor.pid not in pids:
        pids.insert(0, supervisor.pid)
    if not pids:
        return f"if it hangs, end the container of {engine} (kubectl delete pod, podman kill)"
    return f"if it hangs: kill -9 {' '.join(map(str, pids))} (if it was stopped: kill -CONT)"
