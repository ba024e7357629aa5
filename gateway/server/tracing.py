"""Spans for OpenTelemetry: what a failover did to a request, as a part of its client's trace.

A span continues the client's `traceparent`, which engines get as it is, so theirs are its siblings.
A pause is two events of it. Only names and numbers are in it, no user's text.

The surprising thing: a span is made when its request has ended, with the times that were kept, so
that a stream which runs costs nothing, and one that never pauses costs a look into a dictionary.
The library is optional and imported only when asked for; its exporter has a thread of its own.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from typing import Any
from urllib.parse import quote

from gateway.core.events import Ending, RequestEnded, StreamPaused, StreamResumed
from gateway.server.requests import HttpRequest
from plumbing.errors import UsageError

OFF, PAUSES, REQUESTS = MODES = ("off", "pauses", "requests")
SERVICE = "understudy-gateway"  # unless OTEL_SERVICE_NAME names it
EXPORTER_ENV, EXPORTER = "OTEL_TRACES_EXPORTER", "otlp_proto_http"
EVENTS_MAX = 64  # of one request: its last 32 pauses; its attributes count all
PATH_CHARS_MAX = 256
CONTEXT_HEADERS = re.compile(rb"\r\n(traceparent|tracestate): ([^\r]*)")


class RequestSpans:
    """The requests of one gateway; `of_all`: also of those that never paused."""

    def __init__(self, provider: Any, *, of_all: bool) -> None:
        """`provider`: of OpenTelemetry's SDK."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._tracer = provider.get_tracer("understudy.gateway")
        self._propagator = TraceContextTextMapPropagator()
        self._of_all = of_all
        self._events: dict[int, deque[tuple[str, dict[str, Any], int]]] = {}

    def note(self, record: StreamPaused | StreamResumed) -> None:
        seen: dict[str, Any] = {
            "understudy.engine": record.engine,
            "understudy.token": record.token,
        }
        if isinstance(record, StreamPaused):
            name = "understudy.paused"
            seen["understudy.cause"] = record.cause.value
            seen["understudy.delivered_tokens"] = record.tokens
        else:
            name = "understudy.resumed"
            seen["understudy.pause_ms"] = record.pause_ms
            seen["understudy.replayed_tokens"] = record.tokens
        events = self._events.setdefault(record.request, deque(maxlen=EVENTS_MAX))
        events.append((name, seen, time.time_ns()))

    def ended(self, request: HttpRequest, record: RequestEnded, lasted_ms: float) -> None:
        events = self._events.pop(record.request, ())
        if not events and not self._of_all:
            return
        now_ns = time.time_ns()
        method = request.method.decode(errors="replace")
        attributes = {
            "http.request.method": method,
            "http.response.status_code": request.status,
            "url.path": quote(request.path[:PATH_CHARS_MAX], safe="/:@"),
            "understudy.request_id": request.request_id.decode(errors="replace"),
            "understudy.engine": request.engine,
            "understudy.continuation": request.continuation.value,
            "understudy.ending": record.ending.value,
            "understudy.tokens": record.tokens,
            "understudy.pauses": record.pauses,
            "understudy.paused_ms": record.paused_ms,
        }
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in CONTEXT_HEADERS.findall(request.head)
        }
        span = self._tracer.start_span(
            method,
            context=self._propagator.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=now_ns - round(lasted_ms * 1e6),
        )
        for name, seen, at_ns in events:
            span.add_event(name, seen, timestamp=at_ns)
        if record.ending is Ending.BROKEN and record.code:
            span.set_status(self._trace.StatusCode.ERROR, record.code)
        span.end(end_time=now_ns)


def open_spans(mode: str) -> RequestSpans | None:
    """None where `mode` is off.

    Raises:
        UsageError: `gateway.no_tracing`.
    """
    if mode == OFF:
        return None
    from importlib.metadata import entry_points  # all of `email`: 40 ms of a start

    name = os.environ.get(EXPORTER_ENV) or EXPORTER
    found = iter(entry_points(group="opentelemetry_traces_exporter", name=name))
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = next(found).load()
    except (ImportError, StopIteration) as error:
        raise UsageError(
            "gateway.no_tracing",
            f"--tracing {mode} needs OpenTelemetry's SDK and the exporter {name!r}"
            f" ({EXPORTER_ENV}): pip install 'understudy[otel]', or leave --tracing off",
        ) from error
    service = os.environ.get("OTEL_SERVICE_NAME", SERVICE)
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service}))
    provider.add_span_processor(BatchSpanProcessor(exporter()))
    return RequestSpans(provider, of_all=mode == REQUESTS)
