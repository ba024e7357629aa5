"""The gateway's events and effects: plain values, no behaviour.

`gateway/server` is the shell: it hands in events with `Gateway.handle` and
performs effects in order. The bytes of answers do not travel as events: they go through the methods
of an `Attempt`, which return what to send to the client now (`client_request.py`).

Requests, attempts and greetings are numbers. The shell numbers requests in the order in which they
came, and that order is their age. The core numbers attempts: one is one request on one upstream
connection, and a request has at most one at a time. Whatever an attempt does after `DropAttempt`
reaches no client; an event about it is ignored.

The shell keeps what the core need not know: a request's headers and body, the head of a response,
and an answer that is held whole. It forgets a request after `RequestEnded`, and what an attempt has
held after `DropAttempt`.

A lane of a pool gets its rules beside the gateway's own events.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from gateway.core.answers import Failure
from plumbing.gateway_protocol import Continuation, Hello, Journal, PodReport
from pool.core.events import Door
from pool.core.states import PooledRules


class BreakCause(StrEnum):
    """How an answer broke off before it was whole."""

    CLOSED = "closed"  # end of file or reset, at whatever byte: half a group is not an answer
    GARBAGE = "garbage"  # not HTTP, or a comment that is not the hop's
    ERROR_EVENT = "error_event"  # the engine's own error inside a stream
    WRONG_TOKEN = "wrong_token"  # a response under another token or engine than the grant's
    SUPERSEDED = "superseded"  # another engine was granted the lock
    HANDED_OVER = "handed_over"  # the engine said `hop.HANDED_OVER`: it parks its streams itself
    UNREACHED = "unreached"  # the engine does not listen: nothing of the request was sent
    MOVED = "moved"  # a front takes the stream from a pod that leaves, or is silent
    POD_LOST = "pod_lost"  # the whole pod
    YIELDED = "yielded"  # its model makes room for another one; nothing is wrong with the engine


class Ending(StrEnum):
    """How a request ended, for metrics and for the log."""

    WHOLE = "whole"
    REFUSED = "refused"  # an error of ours, before anything was sent
    BROKEN = "broken"  # a marked error inside an answer, or its connection closed
    CLIENT_GONE = "client_gone"


class GatewayRules(msgspec.Struct, frozen=True):
    """The settings of the core. Times are in ms."""

    hold_ms: float = 10_000.0  # a request of which nothing was sent waits so long for an engine
    # A stream that has begun: a relaunch of a large model; clients give up after ten minutes or so.
    park_timeout_ms: float = 300_000.0
    resumes_max: int = 32  # replays under way at once; more delay the oldest and new requests
    # Bodies, journals and transcripts: a few thousand long streams, or a dozen large answers.
    memory_bytes_max: int = 1 << 30
    silent_ms: float = 1_000.0  # of a pod, four reports: its streams move then


# -------------------------------------------------------------------------------------- events


class GatewayEvent(msgspec.Struct, frozen=True):
    """What has happened, for `Gateway.handle`."""


class RequestCame(GatewayEvent, frozen=True):
    """A client's request has been read whole. What follows `is_stream` counts in a pool only:
    `keep_alive_ms`: how long the model shall stay awake after it, None: as it is set."""

    request: int
    path: str  # without the query
    body_bytes: int
    is_inference: bool  # a known path that may be sent twice: nothing but the answer changes
    is_stream: bool  # the body wants a stream
    model: str = ""
    priority: int | None = None  # lower is sooner; None: its model's own
    keep_alive_ms: float | None = None
    # A front's request: its answer is passed on as it comes, and the front resumes it. The
    # continuation id of the engine that it was begun by, "" if it has no journal.
    passing: str | None = None
    journal_tokens: int = 0  # what its engine plays first
    key: bytes = b""  # in a fleet: requests with one key share a prefix


class HeadCame(GatewayEvent, frozen=True):
    """The head of a response. `engine` and `token` are "" and 0 where the headers are missing.

    `is_marked` means an event stream of class exact or state, with the hop's comments. A response
    that is not marked is held by the shell until `SendHead`, `RequestEnded` or `DropAttempt`, and
    the shell tells `Attempt.hold` of each piece that it holds.
    """

    attempt: int
    status: int
    engine: str
    token: int
    continuation: Continuation
    is_event_stream: bool
    # Through a pod, which signs as the engine does elsewhere: the grant of the engine inside, and
    # its continuation id, which the pod's last report may not have had yet.
    inner_token: int = 0
    continuation_id: str = ""

    @property
    def is_marked(self) -> bool:
        return self.is_event_stream and self.continuation in (
            Continuation.EXACT,
            Continuation.STATE,
        )


class AnswerEnded(GatewayEvent, frozen=True):
    """A response that is not marked is complete, held whole or passed on; with a `cause` the
    upstream connection is over, or useless, and the answer is not whole."""

    attempt: int
    cause: BreakCause | None = None


class ClientLeft(GatewayEvent, frozen=True):
    request: int
    model: str = ""


class EngineGranted(GatewayEvent, frozen=True, tag="granted"):
    """`engine` holds the lock, that of `model`, under `token`, which compares within `era` only.
    Repeats change nothing. `queued`: attempts that the engine before it had not scheduled yet,
    which say nothing about its death."""

    engine: str
    token: int
    era: str
    model: str = ""
    queued: frozenset[int] = frozenset()


class NobodyGranted(GatewayEvent, frozen=True, tag="nobody"):
    """No engine holds the lock, because of `reason`. Answers that are under way go on. `is_final`:
    every engine was told to end and takes no request any more, so none waits for one."""

    reason: str
    model: str = ""
    is_final: bool = False


class GatewayEnds(GatewayEvent, frozen=True):
    """The time to finish is over: every request ends now."""


class DeathExpected(GatewayEvent, frozen=True, tag="expect_death"):
    """A drill ends this engine on purpose, so its death says nothing about any request."""

    engine: str
    token: int
    model: str = ""


class PodNamed(GatewayEvent, frozen=True):
    """A name leads to a pod at this address, or does so no longer."""

    address: str
    is_named: bool


class PodHeard(GatewayEvent, frozen=True):
    """The pod at this address has reported."""

    address: str
    report: PodReport


class PodBroke(GatewayEvent, frozen=True):
    """The connection that it reports on is broken. `is_refused`: and nothing listens there."""

    address: str
    is_refused: bool = False


class Prefilled(GatewayEvent, frozen=True):
    """What `Prefill` asked for is done, or will not be. `is_broken`: the pod, or its engine, broke
    off, perhaps because of this request."""

    request: int
    is_broken: bool = False


class HelloCame(GatewayEvent, frozen=True):
    """The answer to a greeting; without one `problem` says why."""

    greeting: int
    hello: Hello | None
    problem: str = ""


class Tick(GatewayEvent, frozen=True):
    """Time has passed: every `machine.TICK_MS` while `Gateway.needs_ticks`."""


# -------------------------------------------------------------------------------------- effects


class GatewayEffect(msgspec.Struct, frozen=True):
    """What the shell does, in the order given."""


class GreetEngine(GatewayEffect, frozen=True):
    """GET `hop.HELLO_PATH` of this engine, then `HelloCame` with this number."""

    greeting: int
    engine: str
    token: int


class DemandChanged(GatewayEffect, frozen=True):
    """`Lanes.demand` of a model is another one. Without a pool: a request waits behind a door that
    is shut, once for each door."""


class SendRequest(GatewayEffect, frozen=True):
    """Send the request to this engine, on a connection that no other request uses meanwhile.

    With a journal it is a resume. The journal is borrowed: it is true until the next event.
    `Gateway.attempt(attempt)` is the object that the bytes of the answer go through.
    """

    request: int
    attempt: int
    engine: str
    token: int
    journal: Journal | None


class Prefill(GatewayEffect, frozen=True):
    """Have this pod compute the journal of a stream that another pod still has: send it the resume,
    and drop it at its first new token; then `Prefilled`. Its answer reaches no client."""

    request: int
    pod: str
    continuation_id: str
    journal: Journal


class DropAttempt(GatewayEffect, frozen=True):
    """Close the upstream connection of this attempt, and forget what was held of its answer."""

    attempt: int


class SendHead(GatewayEffect, frozen=True):
    """Send the client the head of this attempt's response, then what is held of its body.

    With the engine's Content-Length where there is one, else chunked. `continuation` is what the
    gateway itself promises: `none` where it keeps no journal, and then the shell may forget the
    request's body too, as it is sent once.
    """

    request: int
    attempt: int
    continuation: Continuation


class RequestEnded(GatewayEffect, frozen=True):
    """The request is over: send its client the end of its answer, and count it.

    A whole answer was sent, and ends as HTTP wants, or is held by `attempt`. A refused one is the
    error `why`. Of a broken one the client sees `event`, if any, which is an error inside the
    stream, and no end of it.
    """

    request: int
    ending: Ending
    tokens: int  # delivered, each once
    attempt: int = 0
    why: Failure | None = None
    event: bytes = b""

    @property
    def code(self) -> str:
        """That the client saw, if any; "" of a whole answer."""
        return "" if self.why is None else self.why.code


# -------------------------------------------------------------------------------------- records


class GatewayRecord(GatewayEffect, frozen=True):
    """For metrics, the event log and the access log; nothing to do. No user's text is in it."""


class StreamPaused(GatewayRecord, frozen=True):
    request: int
    cause: BreakCause
    engine: str
    token: int
    tokens: int  # delivered so far


class StreamResumed(GatewayRecord, frozen=True):
    """`pause_ms` is from the break to the first new token, or to the end."""

    request: int
    engine: str
    token: int
    tokens: int  # replayed: neither sent nor counted again
    pause_ms: float


class ContinuationLost(GatewayRecord, frozen=True):
    """A stream that would have survived a failover does so no longer. The stream itself goes on.

    `reason` is `memory` (the total cap) or `tokens` (`hop.JOURNAL_TOKENS_MAX`).
    """

    request: int
    reason: str


class Told(GatewayRecord, frozen=True):
    """A line for the event log, `gateway.KIND`. `data`: what it is about, without users' text."""

    kind: str
    message: str
    severity: str = "info"
    data: Mapping[str, object] = {}


# An engine's batch, as vLLM's on small GPUs. What is sent beyond it waits inside of the engine,
# where it can be neither ordered nor sent again.
MAX_IN_FLIGHT = 256
QUEUE_MAX = 512  # requests that wait for any model, of which nothing was sent


class LaneRules(PooledRules, frozen=True, kw_only=True):
    """The settings of one model: what the pool may change, with `max_in_flight` `MAX_IN_FLIGHT`
    where it is None, and the limits of the queue. Times are in ms."""

    priority: int = 0
    keep_alive_ms: float = 300_000.0
    starve_after_ms: float = 60_000.0  # a request that is so much older is sooner by one priority
    queue_max: int = 128  # requests that wait for this model, of which nothing was sent
    wait_ms: float = 300_000.0  # each for so long

    def priority_for(self, wanted: int | None) -> int:
        """The priority of a request that names `wanted`. A client may only make its requests less
        urgent, unless the pool file lets it do more: else one client starves all others."""
        if wanted is None:
            return self.priority
        best = self.priority if self.client_priority is None else self.client_priority
        return max(wanted, min(best, self.priority))


class DoorSet(GatewayEvent, frozen=True):
    """What may be done with requests for `model`; repeats change nothing. Without a pool
    `SleepDoor` sets a shut door, or None, and `expected_ms` is infinite if only an operator wakes
    the engine. `rules`: the model's settings now, where an operator may have changed them; None: as
    they are."""

    model: str = ""
    number: int = 0
    door: Door | None = None
    rules: PooledRules | None = None
