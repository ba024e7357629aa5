"""The gateway's metrics, made at each scrape from what its children have counted.

Every known label is exported as zero from the first scrape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from gateway.core.events import Ending
from gateway.messages import (
    ADDED_BUCKETS_S,
    PAUSE_BUCKETS_S,
    Distribution,
    GatewayTotals,
)
from gateway.supervisor import report
from gateway.supervisor.parts import GatewayParts
from plumbing.hop import Continuation
from plumbing.service.metrics import PREFIX, Metrics
from plumbing.service.prometheus import Family, histogram_samples

COUNTERS = {
    "delivered_tokens": "Tokens that clients were sent, each once.",
    "replayed_tokens": "Tokens that engines were given to resume requests; clients had them.",
    "pauses": "Streams that were interrupted, and waited to be resumed.",
    "resumes": "Streams that went on after an interruption.",
    "continuations_lost": "Streams that can no longer be continued, for lack of memory.",
    "lost_requests": "Requests in flight in a process of the gateway that died.",
    "child_restarts": "Processes of the gateway that died and were replaced.",
}
GAUGES = {
    "in_flight_requests": "Requests in the gateway.",
    "waiting_requests": "Requests that wait for an engine, nothing of them answered.",
    "parked_requests": "Streams that wait to be resumed.",
    "parked_oldest_seconds": "How long the oldest of them has waited.",
    "replaying_requests": "Streams that an engine plays again, up to where their clients are.",
    "suspect_requests": "Requests that were in an engine at two deaths without progress.",
    "connections": "Connections of clients.",
    "held_bytes": "Memory of journals, bodies and held answers.",
    "held_bytes_max": "The limit of it, above which requests cannot be continued.",
    "accepting": "1 while connections are accepted.",
    "ready": "1 while /ready is 200.",
    "spare_ready": "1 while a process is ready to take over.",
    "lock_server_connected": "1 while the lock server is connected.",
}


class GatewayMetrics:
    """`metrics` is what is scraped."""

    def __init__(self, gateway: GatewayParts) -> None:
        self.metrics = Metrics()
        self.metrics.collect(self._families)
        self._gateway = gateway

    def _families(self) -> Iterator[Family]:
        nursery = self._gateway.nursery
        totals = nursery.counted()
        counts = {
            "delivered_tokens": totals.tokens,
            "replayed_tokens": totals.replayed_tokens,
            "pauses": totals.pauses,
            "resumes": totals.resumes,
            "continuations_lost": totals.continuations_lost,
            "lost_requests": nursery.lost_requests,
            "child_restarts": nursery.core.restarts.deaths_total,
        }
        for name, text in COUNTERS.items():
            yield _family(name, "counter", text, counts[name])
        values = report.gauges(self._gateway)
        for name, text in GAUGES.items():
            yield _family(name, "gauge", text, values[name])
        yield _requests(totals)
        text = "Number of times a limit was reached, by limit."
        limits = [("", {"limit": limit}, count) for limit, count in sorted(totals.limits.items())]
        yield Family(_name("limit_hits"), "counter", text, limits)
        text = "How long streams paused, from the break to the first new token."
        yield _histogram("pause_seconds", text, PAUSE_BUCKETS_S, totals.pause_s)
        text = "Time from a request, read whole, to its first byte sent to an engine that was free."
        yield _histogram("added_seconds", text, ADDED_BUCKETS_S, totals.added_s)


def _family(name: str, kind: str, text: str, value: float) -> Family:
    return Family(_name(name), kind, text, (("", {}, value),))


def _requests(totals: GatewayTotals) -> Family:
    counted = {(each.ending, str(each.continuation)): each.count for each in totals.requests}
    zeros = itertools.product(map(str, Ending), map(str, Continuation))
    samples = [
        ("", {"outcome": outcome, "continuation": continuation}, count)
        for (outcome, continuation), count in (dict.fromkeys(zeros, 0) | counted).items()
    ]
    text = "Requests by how they ended, and by what a failover would have done to them."
    return Family(_name("requests"), "counter", text, samples)


def _histogram(name: str, text: str, bounds_s: tuple[float, ...], found: Distribution) -> Family:
    samples = histogram_samples(bounds_s, found.counts, found.sum_s)
    return Family(_name(name), "histogram", text, samples)


def _name(name: str) -> str:
    return f"{PREFIX}_gateway_{name}"
