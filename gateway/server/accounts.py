"""What the gateway has counted since its start, and its reports: events, the access log.

Owns no decision. Users' text never comes here. Pauses and resumes of many streams at once are one
event a second, because a failover under a thousand streams is one thing that happened.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeAlias
from urllib.parse import quote

from gateway.core.events import (
    ContinuationLost,
    Ending,
    GatewayEffect,
    GatewayRecord,
    RequestEnded,
    StreamPaused,
    StreamResumed,
    Told,
)
from gateway.server.requests import HttpRequest
from plumbing.gateway_protocol import Continuation
from plumbing.service.metrics import Tally

access_logger = logging.getLogger("gateway.access")

PATH_CHARS_MAX = 256  # of a path in the access log


# Told of what happens, for the event log: its type, a sentence, its severity, data. No bodies, no
# tokens, no keys.
Tell: TypeAlias = Callable[[str, str, str, Mapping[str, Any]], object]

# The refusals that a larger limit would have spared; the others are the client's own.
LIMITS = ("headers_too_large", "request_too_large", "request_timeout", "overloaded")
# What a pool answers where there is no room or no time for a request; counted as limits.
POOL_LIMITS = ("pool.queue_full", "pool.not_awake", "pool.busy", "pool.cut")

# The upper bounds of the buckets of the two histograms; a last one has what is above all bounds.
# A pause is 20 ms with the reference engine, some hundred with vLLM, and a relaunch takes minutes.
PAUSE_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
ADDED_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0)


class PoolOutcome(StrEnum):
    """How a request for a model of a pool ended."""

    ANSWERED = "answered"
    EXPIRED = "expired"  # its deadline passed while it waited
    CANCELLED = "cancelled"  # its client left
    REFUSED = "refused"  # at once: the queue is full, the model does not fit or has failed
    CUT = "cut"  # its model yielded, and the answer could not be parked
    LOST = "lost"  # its answer broke off


OUTCOME_BY_CODE = {
    **dict.fromkeys(("pool.not_awake", "pool.busy", "gateway.park_timeout"), PoolOutcome.EXPIRED),
    "pool.cut": PoolOutcome.CUT,
}
OUTCOME_BY_ENDING = {
    Ending.WHOLE: PoolOutcome.ANSWERED,
    Ending.CLIENT_GONE: PoolOutcome.CANCELLED,
    Ending.REFUSED: PoolOutcome.REFUSED,
    Ending.BROKEN: PoolOutcome.LOST,
}


class Accounts:
    """`note` is told of every record of the core, `refused` of what never came there. The counts
    only grow."""

    def __init__(self, tell: Tell, *, has_access_log: bool) -> None:
        # From a whole request to its first byte towards an engine that was free to take it.
        self.added = Tally(ADDED_BUCKETS_S)
        self.pauses = Tally(PAUSE_BUCKETS_S)
        self.limits: Counter[str] = Counter()  # how often each was reached, by name
        self.requests: Counter[tuple[str, Continuation]] = Counter()  # by ending and class
        self.models: Counter[tuple[str, PoolOutcome]] = Counter()  # of a pool
        self.tokens = 0  # delivered, each once
        self.replayed_tokens = 0  # at resumes; neither delivered nor counted again
        self.paused: Counter[str] = Counter()  # how often a stream was, by cause
        self.resumed = 0
        self.continuations_lost = 0  # streams that could be continued at first, and no longer
        self.told: Counter[str] = Counter()  # lines of the event log that the core wrote, by kind
        self._tell_of = tell
        self._has_access_log = has_access_log
        self._untold: list[GatewayEffect] = []  # what `tell` makes one event of, with its like

    def note(self, record: GatewayRecord) -> None:
        match record:
            case StreamPaused():
                self.paused[record.cause.value] += 1
                self._untold.append(record)
            case StreamResumed():
                self.resumed += 1
                self.replayed_tokens += record.tokens
                self.pauses.observe(record.pause_ms / 1000)
                self._untold.append(record)
            case ContinuationLost():
                self.continuations_lost += 1
                self._untold.append(record)
            case Told(kind, message, severity, data):
                self.told[kind] += 1
                self._tell(kind, message, severity, **data)

    def ended(self, request: HttpRequest, record: RequestEnded, now_ms: float) -> None:
        """`request` is over."""
        self.tokens += record.tokens
        if record.code in POOL_LIMITS:
            self.limits[record.code] += 1
        if record.ending is Ending.BROKEN:
            self._untold.append(record)
        self.requests[record.ending.value, request.continuation] += 1
        if request.model:
            outcome = OUTCOME_BY_CODE.get(record.code) or OUTCOME_BY_ENDING[record.ending]
            self.models[request.model, outcome] += 1
        if not self._has_access_log:
            return
        access_logger.info(
            '%s "%s %s" %d %d bytes in %.1f ms, %s%s, id %s',
            str(request.peer[0]) if isinstance(request.peer, tuple) else "-",
            request.method.decode(errors="replace"),
            quote(request.path[:PATH_CHARS_MAX], safe="/:@"),
            request.status,
            request.sent_bytes,
            now_ms - request.came_ms,
            record.ending.value,
            f", engine {request.engine}" if request.engine else "",
            request.request_id.decode(errors="replace"),
        )

    def refused(self, code: str, status: int, request_id: bytes) -> None:
        """A request was refused before it was read whole."""
        if code in LIMITS:
            self.limits[code] += 1
        self.requests[Ending.REFUSED.value, Continuation.NONE] += 1
        if self._has_access_log:
            access_logger.info("refused with %d %s, id %s", status, code, request_id.decode())

    def tell(self) -> None:
        """One event of each kind for all that happened since the last call."""
        records, self._untold = self._untold, []
        paused = [each for each in records if isinstance(each, StreamPaused)]
        resumed = [each for each in records if isinstance(each, StreamResumed)]
        broken = Counter(each.code for each in records if isinstance(each, RequestEnded))
        lost = Counter(each.reason for each in records if isinstance(each, ContinuationLost))
        if paused:
            first, causes = paused[0], Counter(each.cause.value for each in paused)
            message = f"{_many(len(paused), 'stream')} of {first.engine} paused ({_names(causes)})"
            where: dict[str, Any] = {"engine": first.engine, "token": first.token}
            self._tell("paused", message, streams=len(paused), **where, causes=dict(causes))
        if resumed:
            last, longest_ms = resumed[-1], max(each.pause_ms for each in resumed)
            self._tell(
                "resumed",
                f"{_many(len(resumed), 'stream')} resumed at {last.engine} after"
                f" {longest_ms:.0f} ms at most",
                streams=len(resumed),
                engine=last.engine,
                token=last.token,
                pause_ms=round(longest_ms, 1),
                replayed_tokens=sum(each.tokens for each in resumed),
            )
        if broken:
            answers = _many(broken.total(), "answer")
            message = f"{answers} had begun and ended with an error ({_names(broken)})"
            self._tell("broken", message, "error", answers=broken.total(), codes=dict(broken))
        if lost:
            streams = _many(lost.total(), "stream")
            message = f"{streams} would not survive a failover any more ({_names(lost)})"
            kind, count, reasons = "continuation_lost", lost.total(), dict(lost)
            self._tell(kind, message, "warning", streams=count, reasons=reasons)

    def _tell(self, kind: str, message: str, severity: str = "info", **data: object) -> None:
        self._tell_of(f"gateway.{kind}", message, severity, data)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _names(counts: Counter[str]) -> str:
    return ", ".join(sorted(filter(None, counts)))
