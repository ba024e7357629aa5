"""What the child has counted, and what is told of it: totals for beats, events, the access log.

Owns no decision. Users' text never comes here. Pauses and resumes of many streams at once are one
event a second, because a failover under a thousand streams is one thing that happened.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from urllib.parse import quote

from gateway.core.events import (
    ContinuationLost,
    Ending,
    GatewayRecord,
    RequestEnded,
    StreamPaused,
    StreamResumed,
    SuspectFound,
)
from gateway.messages import (
    ADDED_BUCKETS_S,
    LIMITS,
    PAUSE_BUCKETS_S,
    POOL_LIMITS,
    GatewayEventMsg,
    GatewayTotals,
    HistogramTally,
    ModelTotal,
    PoolOutcome,
)
from gateway.schema import GatewayRequest
from gateway.server.open_request import OpenRequest
from gateway.server.tracing import RequestSpans
from plumbing.gateway_protocol import Continuation

access_logger = logging.getLogger("gateway.access")

PATH_CHARS_MAX = 256  # of a path in the access log
EXPIRED = ("pool.not_awake", "pool.busy", "gateway.park_timeout")
CUT = "pool.cut"


class Accounts:
    """`note` is told of every record of the core, `refused` of what never came there."""

    def __init__(
        self,
        happened: Callable[[GatewayEventMsg], None],
        *,
        has_access_log: bool,
        spans: RequestSpans | None = None,
    ) -> None:
        self.added = HistogramTally(ADDED_BUCKETS_S)
        self.limits: Counter[str] = Counter()
        self._happened = happened
        self._has_access_log = has_access_log
        self._spans = spans
        self._pauses = HistogramTally(PAUSE_BUCKETS_S)
        self._requests: Counter[tuple[str, Continuation]] = Counter()
        self._models: Counter[tuple[str, PoolOutcome]] = Counter()
        self._paused: list[StreamPaused] = []
        self._resumed: list[StreamResumed] = []
        self._broken: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._tokens = self._replayed = self._all_paused = self._all_resumed = self._all_lost = 0

    def note(self, record: GatewayRecord) -> None:
        if self._spans is not None and isinstance(record, StreamPaused | StreamResumed):
            self._spans.note(record)
        match record:
            case StreamPaused():
                self._all_paused += 1
                self._paused.append(record)
            case StreamResumed():
                self._all_resumed += 1
                self._replayed += record.tokens
                self._pauses.observe(record.pause_ms / 1000)
                self._resumed.append(record)
            case ContinuationLost():
                self._all_lost += 1
                self._lost[record.reason] += 1
            case SuspectFound():
                self._tell(
                    "gateway.suspect",
                    f"a request was in flight in {record.deaths} engines that died, without "
                    "progress between; the gateway resumes it last and alone",
                    "warning",
                    request=record.request,
                    deaths=record.deaths,
                )
            case RequestEnded():
                self._tokens += record.tokens
                if record.code in POOL_LIMITS:
                    self.limits[record.code] += 1
                if record.ending is Ending.BROKEN:
                    self._broken[record.code] += 1

    def requeued(self, request: OpenRequest) -> None:
        """Its model had to yield before anything was answered; it waits for the next turn."""
        self._models[request.model, PoolOutcome.REQUEUED] += 1

    def ended(self, request: OpenRequest, record: RequestEnded, now_ms: float) -> None:
        """`request` is over; the record was noted."""
        self._requests[record.ending.value, request.continuation] += 1
        if request.model:
            self._models[request.model, outcome_of(record)] += 1
        if self._spans is not None:
            self._spans.ended(request, record, now_ms - request.came_ms)
        if not self._has_access_log:
            return
        http = request.http
        access_logger.info(
            '%s "%s %s" %d %d bytes in %.1f ms, %s%s, id %s',
            _peer(request),
            http.method.decode(errors="replace"),
            quote(http.path[:PATH_CHARS_MAX], safe="/:@"),
            request.status,
            request.sent_bytes,
            now_ms - request.came_ms,
            record.ending.value,
            f", engine {request.engine}" if request.engine else "",
            http.request_id.decode(errors="replace"),
        )

    def refused(self, code: str, status: int, request_id: bytes) -> None:
        """A request was refused before it was read whole."""
        if code in LIMITS:
            self.limits[code] += 1
        self._requests[Ending.REFUSED.value, Continuation.NONE] += 1
        if self._has_access_log:
            access_logger.info("refused with %d %s, id %s", status, code, request_id.decode())

    def totals(self) -> GatewayTotals:
        return GatewayTotals(
            requests=tuple(
                GatewayRequest(ending, continuation, count)
                for (ending, continuation), count in self._requests.items()
            ),
            tokens=self._tokens,
            replayed_tokens=self._replayed,
            pauses=self._all_paused,
            resumes=self._all_resumed,
            continuations_lost=self._all_lost,
            pause_s=self._pauses.so_far(),
            added_s=self.added.so_far(),
            limits=dict(self.limits),
            models=tuple(
                ModelTotal(model, outcome, count)
                for (model, outcome), count in self._models.items()
            ),
        )

    def tell(self) -> None:
        """One event of each kind for all that happened since the last call."""
        if self._paused:
            first, causes = self._paused[0], Counter(each.cause.value for each in self._paused)
            count, why = len(self._paused), ", ".join(sorted(causes))
            self._tell(
                "gateway.paused",
                f"{_streams(count)} of {first.engine} paused ({why})",
                streams=count,
                engine=first.engine,
                token=first.token,
                causes=dict(causes),
            )
        if self._resumed:
            last, longest = self._resumed[-1], max(each.pause_ms for each in self._resumed)
            count = len(self._resumed)
            self._tell(
                "gateway.resumed",
                f"{_streams(count)} resumed at {last.engine} after {longest:.0f} ms at most",
                streams=count,
                engine=last.engine,
                token=last.token,
                pause_ms=round(longest, 1),
                replayed_tokens=sum(each.tokens for each in self._resumed),
            )
        if self._broken:
            count, why = self._broken.total(), ", ".join(sorted(filter(None, self._broken)))
            answers = "1 answer" if count == 1 else f"{count} answers"
            message = f"{answers} had begun and ended with an error ({why})"
            self._tell("gateway.broken", message, "error", answers=count, codes=dict(self._broken))
        if self._lost:
            count, why = self._lost.total(), ", ".join(sorted(self._lost))
            message = f"{_streams(count)} would not survive a failover any more ({why})"
            kind, reasons = "gateway.continuation_lost", dict(self._lost)
            self._tell(kind, message, "warning", streams=count, reasons=reasons)
        self._paused, self._resumed = [], []
        self._broken.clear()
        self._lost.clear()

    def _tell(self, kind: str, message: str, severity: str = "info", **data: object) -> None:
        self._happened(GatewayEventMsg(kind, message, severity, data))


def outcome_of(record: RequestEnded) -> PoolOutcome:
    """How a request for a model of a pool ended."""
    match record.ending:
        case Ending.WHOLE:
            return PoolOutcome.ANSWERED
        case Ending.CLIENT_GONE:
            return PoolOutcome.CANCELLED
    if record.code == CUT:
        return PoolOutcome.CUT
    if record.code in EXPIRED:
        return PoolOutcome.EXPIRED
    return PoolOutcome.REFUSED if record.ending is Ending.REFUSED else PoolOutcome.LOST


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"


def _peer(request: OpenRequest) -> str:
    peer = request.client.peer
    return str(peer[0]) if isinstance(peer, tuple) and peer else "-"
