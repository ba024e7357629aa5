"""What engines say: to their own backend, and to whoever asks on the control socket.

Two protocols with the frames of `plumbing.wire`. CHANNEL runs over a socketpair between the
supervisor and the backend's main process. CONTROL is the Unix socket `engine_<id>.sock`, where
every process of the backend registers and where people ask, drain and rehearse deaths. Must not
know what a message leads to: that is `engine/core`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from plumbing.part.observe import EventRecord as EventRecord
from plumbing.part.observe import Status as Status
from plumbing.part.observe import StatusReply as StatusReply
from plumbing.part.observe import Watch as Watch
from plumbing.wire.messages import Catalogue, Length, Message, Range

INT64_MAX = 2**63 - 1
RANKS_MAX = 64  # one engine's tensor-parallel cohort in one pod; a node has 8 or 16 devices
PID_MAX = 2**22  # PID_MAX_LIMIT, include/linux/threads.h

Count = Annotated[int, Range(0, INT64_MAX)]
Id = Annotated[str, Length(1, 96)]
Name = Annotated[str, Length(1, 32)]
Sentence = Annotated[str, Length(0, 4096)]
Rank = Annotated[int, Range(0, RANKS_MAX - 1)]
Pid = Annotated[int, Range(1, PID_MAX)]

# ---------------------------------------------------------------- supervisor → backend, and answers


@dataclass(frozen=True, slots=True)
class Wake(Message):
    """Take memory for the KV cache; the descriptor is the listening socket, not to be accepted
    from before `serve`."""

    TYPE: ClassVar[str] = "wake"
    FDS: ClassVar[tuple[int, int]] = (1, 1)
    token: Count
    engine: Id


@dataclass(frozen=True, slots=True)
class Woken(Message):
    TYPE: ClassVar[str] = "woken"
    kv_bytes: Count


@dataclass(frozen=True, slots=True)
class RunCanary(Message):
    """Do one real inference and judge its outcome."""

    TYPE: ClassVar[str] = "run_canary"


@dataclass(frozen=True, slots=True)
class Canary(Message):
    TYPE: ClassVar[str] = "canary"
    ok: bool
    detail: Sentence = ""


@dataclass(frozen=True, slots=True)
class Serve(Message):
    """Begin to accept from the listening socket."""

    TYPE: ClassVar[str] = "serve"


@dataclass(frozen=True, slots=True)
class Serving(Message):
    TYPE: ClassVar[str] = "serving"


@dataclass(frozen=True, slots=True)
class Health(Message):
    TYPE: ClassVar[str] = "health"


@dataclass(frozen=True, slots=True)
class Healthy(Message):
    """`progress` only grows: tokens made plus steps of prefill, over all requests."""

    TYPE: ClassVar[str] = "healthy"
    in_flight: Count
    progress: Count
    accepting: bool
    rejected: Count = 0


@dataclass(frozen=True, slots=True)
class Drain(Message):
    """Refuse new work, finish what runs within `budget_ms`, then answer."""

    TYPE: ClassVar[str] = "drain"
    budget_ms: Count


@dataclass(frozen=True, slots=True)
class Drained(Message):
    TYPE: ClassVar[str] = "drained"


# ---------------------------------------------------------------- backend → supervisor, unasked


@dataclass(frozen=True, slots=True)
class Prepared(Message):
    """Weights in place and everything ready but the KV cache, whose size is `kv_bytes`.

    `warnings` are for people: what works, and will cost them something they may not expect.
    """

    TYPE: ClassVar[str] = "prepared"
    weights_bytes: Count
    kv_bytes: Count
    epoch: Sentence
    identity: dict[str, Any]
    warnings: tuple[Sentence, ...] = ()


@dataclass(frozen=True, slots=True)
class FaultReport(Message):
    """Why the backend is about to end, in one sentence for people.

    `permanent` means that a relaunch cannot help (a checkpoint that is missing or broken): the
    supervisor ends with `exit_code`, 2 for a wrong argument and 1 for everything else.
    """

    TYPE: ClassVar[str] = "fault_report"
    code: Id
    message: Sentence
    permanent: bool
    exit_code: Annotated[int, Range(1, 2)] = 1


CHANNEL = Catalogue(
    Wake,
    Woken,
    RunCanary,
    Canary,
    Serve,
    Serving,
    Health,
    Healthy,
    Drain,
    Drained,
    Prepared,
    FaultReport,
)

# ---------------------------------------------------------------- the control socket


@dataclass(frozen=True, slots=True)
class Ok(Message):
    TYPE: ClassVar[str] = "ok"
    detail: Sentence = ""


@dataclass(frozen=True, slots=True)
class Register(Message):
    """A process of the backend, after it holds the witness; the descriptor is its lifeline, where
    it has one."""

    TYPE: ClassVar[str] = "register"
    FDS: ClassVar[tuple[int, int]] = (0, 1)
    incarnation: Id
    name: Name
    pid: Pid


@dataclass(frozen=True, slots=True)
class Registered(Message):
    TYPE: ClassVar[str] = "registered"


@dataclass(frozen=True, slots=True)
class MayLoad(Message):
    """A rank has come to the weights. Answered by `load` once it may go on, which can take hours
    where another engine is loading: poll the connection's end, not a clock."""

    TYPE: ClassVar[str] = "may_load"
    incarnation: Id
    rank: Rank
    ranks: Annotated[int, Range(1, RANKS_MAX)] = 1


@dataclass(frozen=True, slots=True)
class Load(Message):
    """`rw_or_ro`: write if nothing is committed (the loader lock is held, under `token`).
    `ro`: only ever import."""

    TYPE: ClassVar[str] = "load"
    mode: Annotated[str, Length(2, 8)]
    token: Count


@dataclass(frozen=True, slots=True)
class Attached(Message):
    """A rank has its weights mapped. `identity` is the part that does not depend on the rank."""

    TYPE: ClassVar[str] = "attached"
    incarnation: Id
    rank: Rank
    epoch: Sentence
    identity: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Broken(Message):
    """Why a process of the backend is about to end; the other fields are those of `FaultReport`.

    For a process that has no other way to say it: what its parent says of it comes late, and is
    about the parent.
    """

    TYPE: ClassVar[str] = "broken"
    incarnation: Id
    code: Id
    message: Sentence
    permanent: bool
    exit_code: Annotated[int, Range(1, 2)] = 1


@dataclass(frozen=True, slots=True)
class Leftover(Message):
    """A file that a process of the backend uses and does not keep open, so that nothing in /proc
    shows whose it is; to be removed after the incarnation."""

    TYPE: ClassVar[str] = "leftover"
    incarnation: Id
    path: Annotated[str, Length(1, 4096)]


@dataclass(frozen=True, slots=True)
class Leave(Message):
    """What SIGTERM says: leave the queue, or drain, then end. Answered by `ok` at once."""

    TYPE: ClassVar[str] = "drain"


@dataclass(frozen=True, slots=True)
class Kill(Message):
    """Rehearse a death: `supervisor`, or `backend-<name>` of a registered process. `is_stop`: with
    SIGSTOP, so that it hangs and has to be found out."""

    TYPE: ClassVar[str] = "kill"
    target: Name
    is_stop: bool = False


@dataclass(frozen=True, slots=True)
class Killing(Message):
    """`mono_ms` is CLOCK_MONOTONIC at the signal (for `supervisor`, just before it)."""

    TYPE: ClassVar[str] = "killing"
    pid: Pid
    mono_ms: float


CONTROL = Catalogue(
    Ok,
    Register,
    Registered,
    MayLoad,
    Load,
    Attached,
    Broken,
    Leftover,
    Status,
    StatusReply,
    Watch,
    EventRecord,
    Leave,
    Kill,
    Killing,
)
