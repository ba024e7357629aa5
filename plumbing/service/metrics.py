"""Prometheus metrics, one registry per process: zero from the first scrape, never absent.

An alert cannot use a metric that appears only after something has happened: `rate()` over nothing
is nothing. So a metric with labels is declared with their known values, which are exported as zeros
at once. States are gauges with a label `state`, one of them 1 (prometheus_client's own
Enum repeats the metric's name as the label).
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from plumbing import __version__
from plumbing.service.notify import restarts

PREFIX = "understudy"
COMMIT_ENV = "UNDERSTUDY_COMMIT"  # set by an image's build; a wheel does not know its commit

# From a grant on an idle machine (1 ms) to a drain budget (30 s) and a first load (10 min).
DURATION_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 600.0),
)

# A `_created` series per counter doubles the page and nothing here restarts a counter by itself.
disable_created_metrics()  # type: ignore[no-untyped-call] # the library has no annotation here

Labels = Mapping[str, Sequence[str]] | Sequence[str]  # with their known values, or only names
M = TypeVar("M", Gauge, Counter, Histogram)


class OneHot:
    """One gauge per state; exactly one is 1 once `set` has been called for these labels."""

    def __init__(self, gauge: Gauge, states: Sequence[str]) -> None:
        self._gauge, self._states = gauge, tuple(states)

    def set(self, state: str, **labels: str) -> None:
        """Make `state` the current one for `labels`, all labels but `state` given."""
        for each in self._states:
            self._gauge.labels(state=each, **labels).set(1 if each == state else 0)


class Metrics:
    """The metrics of one process. Names are given without the `understudy_` prefix.

    Labels are given with their known values, `{"lock": ("active", "loader")}`, whose product is
    exported as zeros from the start; or by name only where values are not known yet: call
    `.labels(…)` once when they are.
    """

    def __init__(self) -> None:
        self.refresh: Callable[[], None] = lambda: None  # called before each scrape is answered
        self.registry = CollectorRegistry()
        ProcessCollector(namespace=PREFIX, registry=self.registry)
        build = build_info()
        self.gauge("build_info", "Version of this process; always 1.", tuple(build)).labels(
            **build
        ).set(1)
        self.counter(
            "program_restarts_total", "Restarts of this program by its init, in its container."
        ).inc(restarts())
        self.limit_hits = self.counter(
            "limit_hits_total", "Number of times a limit was reached, by limit.", ("limit",)
        )

    def gauge(self, name: str, help_text: str, labels: Labels = ()) -> Gauge:
        metric = Gauge(name, help_text, tuple(labels), namespace=PREFIX, registry=self.registry)
        return _with_zeros(metric, labels)

    def counter(self, name: str, help_text: str, labels: Labels = ()) -> Counter:
        """A counter; `_total` is appended where `name` lacks it."""
        metric = Counter(name, help_text, tuple(labels), namespace=PREFIX, registry=self.registry)
        return _with_zeros(metric, labels)

    def histogram(
        self,
        name: str,
        help_text: str,
        labels: Labels = (),
        buckets: Sequence[float] = DURATION_BUCKETS_S,
    ) -> Histogram:
        names = tuple(labels)
        metric = Histogram(
            name, help_text, names, namespace=PREFIX, registry=self.registry, buckets=buckets
        )
        return _with_zeros(metric, labels)

    def one_hot(
        self,
        name: str,
        help_text: str,
        states: Sequence[str],
        labels: Mapping[str, Sequence[str]] | None = None,
    ) -> OneHot:
        """A state as gauges labelled `state`, beside `labels`."""
        return OneHot(self.gauge(name, help_text, {**(labels or {}), "state": states}), states)

    def render(self) -> bytes:
        """The page that Prometheus scrapes."""
        self.refresh()
        return generate_latest(self.registry)


def _with_zeros(metric: M, labels: Labels) -> M:
    """`metric`, exporting zeros for every combination of the labels' known values."""
    if labels and isinstance(labels, Mapping):
        for known in itertools.product(*labels.values()):
            metric.labels(*known)
    return metric


def build_info() -> dict[str, str]:
    """`version`, `commit` ("unknown" unless the environment names it) and `python`."""
    return {
        "version": __version__,
        "commit": os.environ.get(COMMIT_ENV) or "unknown",
        "python": platform.python_version(),
    }
