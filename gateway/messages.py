"""The messages inside a gateway: parent ↔ child over a socketpair, and on its control socket.

CHANNEL: the parent tells a child what it may do, and the child's beat is the whole truth about that
child, with its counts as totals since it started. So a beat that is lost with its sender costs at
most half a second of counting. CONTROL is the Unix socket `gateway.sock`, for users. Must not know
what a message leads to.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from gateway.core.events import (
    QUEUE_MAX,
    DeathExpected,
    DoorSet,
    EngineGranted,
    LaneRules,
    NobodyGranted,
)
from gateway.schema import GatewayLoad, GatewayRequest, GatewayUpstream
from plumbing.pod.messages import EventMsg as EventMsg
from plumbing.pod.messages import StatusMsg as StatusMsg
from plumbing.pod.messages import StatusReplyMsg as StatusReplyMsg
from plumbing.pod.messages import WatchMsg as WatchMsg
from plumbing.wire.messages import Catalogue, Message
from pool.core.events import ModelDemand
from pool.messages import PooledModel

# 512 tickets of each of a hundred models; a parked stream has one, so the queue is no limit here.
CHANNEL_FRAME_BYTES_MAX = 4 << 20
CHANNEL_ENV = "UNDERSTUDY_CHANNEL"  # the number of the child's end of the channel

INT64_MAX = 2**63 - 1
# The refusals that a larger limit would have spared; the others are the client's own.
LIMITS = (
    *("headers_too_large", "request_too_large", "request_timeout", "too_many_pipelined"),
    "overloaded",
)
# What a pool answers where there is no room or no time for a request; counted as limits.
POOL_LIMITS = ("pool.queue_full", "pool.not_awake", "pool.busy", "pool.cut")
BEAT_MS = 500  # a child beats at least this often; six of them fit into the 3 s of silence allowed

# The upper bounds of the buckets of the two histograms; a last one has what is above all bounds.
# A pause is 20 ms with the reference engine, some hundred with vLLM, and a relaunch takes minutes.
PAUSE_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
ADDED_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0)

Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Path = Annotated[str, Meta(max_length=4096)]
Sentence = Annotated[str, Meta(max_length=4096)]
ModelName = Annotated[str, Meta(max_length=64)]
Severity = Annotated[str, Meta(max_length=8)]

# ---------------------------------------------------------------- parent → child


class ConfigureGatewayMsg(Message, frozen=True, tag="configure"):
    """All settings, first on the channel. Files are read now: certificates and keys of users that
    were renewed on disk reach a child that is started after that."""

    directory: Annotated[bytes, Meta(max_length=4096)]  # `os.fsencode`: it need not be UTF-8
    hold_ms: Count  # a request of which nothing was sent waits this long for an engine
    park_timeout_ms: Count  # a stream waits this long to be resumed
    resumes_max: Count  # at once
    memory_bytes: Count  # of journals, bodies and answers held, in all
    keepalive_comments_ms: Count  # a comment this often in a paused stream; 0: none
    access_log: bool
    tls_cert: Path = ""
    tls_key: Path = ""
    api_keys: Path = ""
    tracing: Annotated[str, Meta(max_length=16)] = "off"  # of `gateway.server.tracing.MODES`
    lanes: Mapping[str, LaneRules] = field(default_factory=dict)  # of a pool's models; empty: none
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of these
    queue_max: Count = QUEUE_MAX  # requests that wait for any of them


class AcceptMsg(Message, frozen=True, tag="accept"):
    """Accept on this listening socket from now on, instead of another one. It is shared: never
    `shutdown()` it."""

    FDS = (1, 1)
    address: Sentence


class StopMsg(Message, frozen=True, tag="stop"):
    """Finish what is in flight within `budget_ms`, then exit with 0. Accept no more meanwhile,
    unless every engine was told to end: then no other process will, so refuse what comes."""

    budget_ms: Count


class NewsMsg(Message, frozen=True, tag="news"):
    """What the parent has heard of engines, or decided about sleep; a beat obeys a `DoorSet`."""

    event: EngineGranted | NobodyGranted | DeathExpected | DoorSet


class ModelDoorsMsg(Message, frozen=True, tag="model_doors"):
    """What a child may do with the requests for each model of the pool. The numbers are the
    parent's; answered by `model_demand` with the same numbers."""

    models: Mapping[str, PooledModel]


# ---------------------------------------------------------------- child → parent


class Distribution(Struct, frozen=True):
    """The counts of a histogram: one for each bound, and one for all values above."""

    counts: tuple[Count, ...]
    sum_s: float = 0.0


class HistogramTally:
    """A `Distribution` that grows: the child's side of a histogram."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def so_far(self) -> Distribution:
        return Distribution(tuple(self._counts), self._sum_s)


class PoolOutcome(StrEnum):
    """What becomes of a request for a model of a pool. All but `REQUEUED` are its end."""

    ANSWERED = "answered"
    EXPIRED = "expired"  # its deadline passed while it waited
    CANCELLED = "cancelled"  # its client left
    REFUSED = "refused"  # at once: the queue is full, the model does not fit or has failed
    REQUEUED = "requeued"  # its model yielded before anything was answered
    CUT = "cut"  # its model yielded, and the answer could not be parked
    LOST = "lost"  # its answer broke off


class ModelTotal(Struct, frozen=True):
    """How many requests for one model of a pool have come to one outcome."""

    model: ModelName
    outcome: PoolOutcome
    count: Count


class GatewayTotals(Struct, frozen=True):
    """The counts of a child since its start; they only grow."""

    requests: tuple[GatewayRequest, ...] = ()
    tokens: Count = 0  # delivered, each once
    replayed_tokens: Count = 0  # at resumes; neither delivered nor counted again
    pauses: Count = 0  # of streams
    resumes: Count = 0
    continuations_lost: Count = 0  # streams that could be continued at first, and no longer
    pause_s: Distribution = Distribution((0,) * (len(PAUSE_BUCKETS_S) + 1))
    # From a whole request to its first byte towards an engine that was free to take it.
    added_s: Distribution = Distribution((0,) * (len(ADDED_BUCKETS_S) + 1))
    limits: Mapping[str, int] = field(default_factory=dict)  # how often each was reached, by name
    models: tuple[ModelTotal, ...] = ()  # of a pool


NO_LOAD = GatewayLoad(0, 0, 0, 0, 0.0, 0, 0, 0)


class GatewayBeatMsg(Message, frozen=True, tag="beat"):
    """The whole truth about a child: at least every `BEAT_MS`, and at once when `is_accepting` or
    the door changes, or when a request waits behind a door that is not open. A child is ready to
    accept with its first beat. `problem`: what it cannot do now. `door`: the number of the last
    `door`. `quiet_ms`: since nothing was in flight."""

    progress: Count
    is_accepting: bool
    load: GatewayLoad
    totals: GatewayTotals = GatewayTotals()
    upstream: GatewayUpstream | None = None  # the engine that requests go to, as the child sees it
    problem: Sentence | None = None
    door: Count = 0
    quiet_ms: float = 0.0


class ModelDemandMsg(Message, frozen=True, tag="model_demand"):
    """All that a child has for each model: before its first beat, at every change, and with beats.
    A model that is not named has nothing."""

    models: Mapping[str, ModelDemand]


class GatewayEventMsg(Message, frozen=True, tag="happened"):
    """For the event log: no bodies, no tokens, no keys."""

    kind: Name  # `gateway.…`
    message: Sentence
    severity: Severity = "info"
    data: dict[str, Any] = field(default_factory=dict)


CHANNEL = Catalogue(
    *(ConfigureGatewayMsg, AcceptMsg, StopMsg, NewsMsg, ModelDoorsMsg),
    *(GatewayBeatMsg, ModelDemandMsg, GatewayEventMsg),
    frame_bytes_max=CHANNEL_FRAME_BYTES_MAX,
)

# ---------------------------------------------------------------- the control socket


class ExpectDeathMsg(Message, frozen=True, tag="expect_death"):
    """The sender is about to end the engine that holds this token: no request is suspected
    for its death. Repeated as the answer, once all children are told."""

    engine: Name
    token: Count
    model: ModelName = ""


class RestartChildMsg(Message, frozen=True, tag="restart_child"):
    """Start a fresh child with the files as they are now, let it accept, and let the present one
    finish its streams. Answered once the fresh one accepts; a refusal is an error."""


class ChildRestartedMsg(Message, frozen=True, tag="child_restarted"):
    old_pid: Count  # 0: there was none
    new_pid: Count
    in_flight: Count  # what the old one still has to finish


CONTROL = Catalogue(
    *(StatusMsg, StatusReplyMsg, WatchMsg, EventMsg, RestartChildMsg, ChildRestartedMsg),
    ExpectDeathMsg,
)
