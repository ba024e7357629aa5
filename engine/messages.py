"""The messages of an engine: with its own backend, and on its control socket.

Two protocols with the frames of `plumbing.wire`. CHANNEL runs over a socketpair between the
supervisor and the backend's main process. CONTROL is the Unix socket `engine_<id>.sock`, where
every process of the backend registers and where users ask for status, drain, rehearse deaths. Must
not know what a message leads to: that is `engine/core`. What a process shows without a message is
`Counts`.
"""

from __future__ import annotations

import ctypes
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field

from plumbing.pod.messages import EngineReportMsg as EngineReportMsg
from plumbing.pod.messages import EventMsg as EventMsg
from plumbing.pod.messages import SetGoalMsg as SetGoalMsg
from plumbing.pod.messages import StatusMsg as StatusMsg
from plumbing.pod.messages import StatusReplyMsg as StatusReplyMsg
from plumbing.pod.messages import WatchMsg as WatchMsg
from plumbing.service.clock import SystemClock
from plumbing.wire.messages import Catalogue, Message

INT64_MAX = 2**63 - 1
RANKS_MAX = 64  # one engine's tensor-parallel cohort in one pod; a node has 8 or 16 devices
PID_MAX = 2**22  # PID_MAX_LIMIT, include/linux/threads.h

Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Id = Annotated[str, Meta(min_length=1, max_length=96)]
Name = Annotated[str, Meta(min_length=1, max_length=32)]
Sentence = Annotated[str, Meta(max_length=4096)]
ContinuationId = Annotated[str, Meta(max_length=128)]
Era = Annotated[str, Meta(min_length=1, max_length=32)]
Rank = Annotated[int, Meta(ge=0, le=RANKS_MAX - 1)]
Pid = Annotated[int, Meta(ge=1, le=PID_MAX)]
KvMemoryKind = Literal["gms", "private"]


class Counts(ctypes.Structure):
    """Of one process, on the page that it shares with the supervisor (`lifeline.py`): `progress` of
    generation; requests `rejected`; tokens `replayed` of resumed requests, which another engine had
    made; KV blocks `published` for the next engine since the wake, and those `kept` that it would
    find now."""

    _fields_: ClassVar[Any] = [
        (name, ctypes.c_uint64)
        for name in ("progress", "rejected", "replayed", "published", "kept")
    ]


# ---------------------------------------------------------------- supervisor → backend, and answers


class WakeMsg(Message, frozen=True, tag="wake"):
    """Take memory for the KV cache; the descriptor is the listening socket, on which the backend
    must not accept before `serve`. A Unix socket with a path is the engine's private one, on which
    the backend obeys the headers and paths of `plumbing.gateway_protocol`. On any other, which an
    engine with a lock over TCP has, clients connect themselves.
    """

    FDS = (1, 1)
    token: Count
    era: Era  # of the token: it compares with tokens of the same era only


class WokenMsg(Message, frozen=True, tag="woken"):
    """`kv_memory`: whose memory the KV cache is in. `adopted_blocks`: those of an earlier engine
    that it begins with. `kv_note`: why there are none, or why none are published."""

    kv_memory: KvMemoryKind = "private"
    adopted_blocks: Count = 0
    kv_note: Sentence = ""


class ServeMsg(Message, frozen=True, tag="serve"):
    """Start accepting on the listening socket, if the canary passes. The backend begins that as
    soon as it is woken, while the supervisor looks at its processes. Answered by `canary`."""


class RunCanaryMsg(Message, frozen=True, tag="run_canary"):
    """While serving: do one real inference and judge its outcome."""


class CanaryMsg(Message, frozen=True, tag="canary"):
    """`mono_ms` is CLOCK_MONOTONIC at the verdict."""

    ok: bool
    detail: Sentence = ""
    mono_ms: float = field(default_factory=SystemClock().now_ms)


class HealthMsg(Message, frozen=True, tag="health"):
    """Ask whether the backend works; answered by `healthy`."""


class HealthyMsg(Message, frozen=True, tag="healthy"):
    in_flight: Count


class DrainMsg(Message, frozen=True, tag="drain"):
    """Refuse new work, finish what runs within `budget_ms`, then answer `drained`.

    `resume`: the gateway continues streams at the next engine. Close the connections of those that
    can be continued, each after a whole group, and finish only the rest.

    `release_ms`: say `drained` in between, and go on: unmap and give back all KV memory within this
    time, and leave the serving file, in every process. The backend is then as after `prepared`, and
    may be woken again. `keep_kv`: a hand-over; what was published stays in gms for the next engine.
    Otherwise the memory must be free for others.
    """

    budget_ms: Count
    resume: bool = False
    release_ms: Count | None = None
    keep_kv: bool = False


class DrainedMsg(Message, frozen=True, tag="drained"):
    """Nothing is in flight: the answer to `drain` without `release_ms`."""


class RestedMsg(Message, frozen=True, tag="rested"):
    """The answer to `drain` with `release_ms`. `kv_bytes_resident` is what processes still map: it
    must be 0."""

    kv_bytes_resident: Count = 0


class PlaceWeightsMsg(Message, frozen=True, tag="place_weights"):
    """While prepared: release the weights in every process, so that the memory service may free
    them, or map them again where they were. May be repeated. A wake maps them by itself."""

    is_away: bool
    budget_ms: Count


class WeightsPlacedMsg(Message, frozen=True, tag="weights_placed"):
    """The answer to `place_weights`. `note`: why they are not away, or their memory is not free;
    it may be asked again."""

    is_away: bool
    freed_bytes: Count = 0
    note: Sentence = ""


# ---------------------------------------------------------------- backend → supervisor, unasked


class PreparedMsg(Message, frozen=True, tag="prepared"):
    """Weights in place and everything ready but the KV cache, whose size is `kv_bytes`.

    `warnings` are for users: settings that work, at a cost they may not expect. `continuation` is
    `continuation_id` of `plumbing.gateway_protocol.Hello`: streams continue only at an engine with
    an equal one. It is empty where none can be continued. `can_rest`: it can be asked to `rest`,
    and to `place_weights` unless `cannot_offload` has a reason, as part of a sentence.
    """

    weights_bytes: Count
    kv_bytes: Count
    epoch: Sentence
    warnings: tuple[Sentence, ...] = ()
    continuation: ContinuationId = ""
    can_rest: bool = False
    cannot_offload: Sentence = "its backend cannot release its weights"


CHANNEL = Catalogue(
    *(WakeMsg, WokenMsg, ServeMsg, RunCanaryMsg, CanaryMsg),
    *(HealthMsg, HealthyMsg, DrainMsg, DrainedMsg, RestedMsg),
    *(PlaceWeightsMsg, WeightsPlacedMsg),
    PreparedMsg,
)

# ---------------------------------------------------------------- the control socket


class OkMsg(Message, frozen=True, tag="ok"):
    detail: Sentence = ""


class RegisterMsg(Message, frozen=True, tag="register"):
    """A process of the backend, after it holds the witness; the descriptor is its page
    (`engine/lifeline.py`)."""

    FDS = (0, 1)
    incarnation: Id
    name: Name
    pid: Pid


class MayLoadMsg(Message, frozen=True, tag="may_load"):
    """One of `ranks` asks for its weights. Answered by `load` once it may proceed, which can take
    hours while another engine is loading: watch for the end of the connection, not a clock."""

    incarnation: Id
    ranks: Annotated[int, Meta(ge=1, le=RANKS_MAX)] = 1


class LoadMsg(Message, frozen=True, tag="load"):
    """`rw_or_ro`: write if nothing is committed (the loader lock is held). `ro`: only ever
    import."""

    mode: Annotated[str, Meta(min_length=2, max_length=8)]


class AttachedMsg(Message, frozen=True, tag="attached"):
    """A rank has its weights mapped. `identity` is the part that does not depend on the rank.
    `place`: where, in a pod with models."""

    incarnation: Id
    rank: Rank
    identity: dict[str, Any]
    place: Id | None = None


class FaultReportMsg(Message, frozen=True, tag="fault_report"):
    """Why a process of the backend is about to exit, in one sentence for users. It waits for the
    answer, so its death is never seen before this.

    `permanent` means that a relaunch cannot help (a checkpoint that is missing or broken): the
    supervisor ends with `exit_code`, 2 for a wrong argument and 1 for everything else.
    `is_machine`: a disk is full or fails, which counts against no engine and no model.
    """

    incarnation: Id
    code: Id
    message: Sentence
    permanent: bool
    exit_code: Annotated[int, Meta(ge=1, le=2)] = 1
    is_machine: bool = False


class LeaveMsg(Message, frozen=True, tag="drain"):
    """As SIGTERM: leave the queue, or drain, then exit. Answered by `ok` at once. `finish`: no
    stream is left to the next engine."""

    finish: bool = False


class KillMsg(Message, frozen=True, tag="kill"):
    """Rehearse a death: `supervisor`, or `backend-<name>` of a registered process. `is_stop`: with
    SIGSTOP, so that the hang must be detected."""

    target: Name
    is_stop: bool = False


class KillingMsg(Message, frozen=True, tag="killing"):
    """`mono_ms` is CLOCK_MONOTONIC at the signal (for `supervisor`, just before it)."""

    pid: Pid
    mono_ms: float


CONTROL = Catalogue(
    *(RegisterMsg, MayLoadMsg, LoadMsg, AttachedMsg, FaultReportMsg, OkMsg),
    *(StatusMsg, StatusReplyMsg, WatchMsg, EventMsg, LeaveMsg, KillMsg, KillingMsg),
    *(SetGoalMsg, EngineReportMsg),
)
