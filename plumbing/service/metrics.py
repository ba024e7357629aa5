"""Prometheus metrics, one registry per process: zero from the first scrape, never absent.

An alert cannot use a metric that appears only after something has happened: `rate()` over nothing
is nothing. So a metric with labels is declared with their known values, which are exported as zeros
at once. States are gauges with a label `state`, one of them 1.
"""

from __future__ import annotations

import itertools
import os
import platform
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from plumbing import __version__
from plumbing.service.prometheus import Counter, Family, Gauge, Histogram, Metric, Sample, page

PREFIX = "understudy"
COMMIT_ENV = "UNDERSTUDY_COMMIT"  # set by an image's build; a wheel does not know its commit
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# From a grant on an idle machine (1 ms) to a drain budget (30 s) and a first load (10 min).
DURATION_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 600.0),
)

Labels = Mapping[str, Sequence[str]] | Sequence[str]  # with their known values, or only names
Collect = Callable[[], Iterable[Family]]
M = TypeVar("M", bound=Metric[Any])


class OneHot:
    """One gauge per state; exactly one is 1 once `set` has been called for these labels."""

    def __init__(self, gauge: Gauge, states: Sequence[str]) -> None:
        self._gauge = gauge
        self.states = tuple(states)

    def set(self, state: str, **labels: str) -> None:
        """Make `state` the current one for `labels`, all labels but `state` given."""
        if state not in self.states:
            raise ValueError(f"{state!r} is not one of {', '.join(self.states)}")
        for each in self.states:
            self._gauge.labels(state=each, **labels).set(1 if each == state else 0)


class Metrics:
    """The metrics of one process. Names are given without the `understudy_` prefix.

    Labels are given with their known values, `{"lock": ("active", "loader")}`, whose product is
    exported as zeros from the start; or by name only where values are not known yet: call
    `.labels(…)` once when they are. `limits` are the limits that `limit_hits` will name.
    """

    def __init__(self, limits: Sequence[str] = ()) -> None:
        self.refresh: Callable[[], None] = lambda: None  # called before each scrape is answered
        self._collectors: list[Collect] = [process_families]
        self._build = self.gauge(
            "build_info",
            "Version of this process; always 1.",
            ("version", "commit", "python", "driver"),
        )
        self.build_info()
        self.limit_hits = self.counter(
            "limit_hits_total", "Number of times a limit was reached, by limit.", {"limit": limits}
        )

    def gauge(self, name: str, help_text: str, labels: Labels = ()) -> Gauge:
        return self._added(Gauge(f"{PREFIX}_{name}", help_text, tuple(labels)), labels)

    def counter(self, name: str, help_text: str, labels: Labels = ()) -> Counter:
        """A counter; `_total` is appended where `name` lacks it."""
        return self._added(Counter(f"{PREFIX}_{name}", help_text, tuple(labels)), labels)

    def histogram(
        self,
        name: str,
        help_text: str,
        labels: Labels = (),
        buckets: Sequence[float] = DURATION_BUCKETS_S,
    ) -> Histogram:
        metric = Histogram(f"{PREFIX}_{name}", help_text, tuple(labels), buckets)
        return self._added(metric, labels)

    def collect(self, collector: Collect) -> None:
        """Show what `collector` returns at each scrape, too."""
        self._collectors.append(collector)

    def one_hot(
        self,
        name: str,
        help_text: str,
        states: Sequence[str],
        labels: Mapping[str, Sequence[str]] | None = None,
    ) -> OneHot:
        """A state as gauges labelled `state`, beside `labels`."""
        return OneHot(self.gauge(name, help_text, {**(labels or {}), "state": states}), states)

    def build_info(self, driver: str = "none") -> None:
        """Export the version; called again once the GPU driver's version is known."""
        self._build.clear()
        self._build.labels(**build_info(), driver=driver).set(1)

    def render(self) -> bytes:
        """The page that Prometheus scrapes, of type `CONTENT_TYPE`."""
        self.refresh()
        return page(family for collect in self._collectors for family in collect())

    def _added(self, metric: M, labels: Labels) -> M:
        """`metric`, exporting zeros for every combination of the labels' known values."""
        if isinstance(labels, Mapping) or not labels:
            known = labels.values() if isinstance(labels, Mapping) else ()
            for values in itertools.product(*known):
                metric.labels(*values)
        self._collectors.append(lambda: (metric.family(),))
        return metric


def process_families() -> list[Family]:
    """What this process uses, by the names that Prometheus has for it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    gauges = {
        "virtual_memory_bytes": ("Virtual memory.", _statm_bytes(0)),
        "resident_memory_bytes": ("Resident memory.", _statm_bytes(1)),
        "start_time_seconds": ("When the process started, since 1970.", _started_s()),
        "open_fds": ("Open descriptors.", len(os.listdir("/proc/self/fd"))),
        "max_fds": ("Limit of open descriptors.", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    }
    cpu: tuple[Sample, ...] = (("", {}, used.ru_utime + used.ru_stime),)
    name = f"{PREFIX}_process"
    return [
        Family(f"{name}_cpu_seconds", "counter", "CPU time, user and system.", cpu),
        *(
            Family(f"{name}_{each}", "gauge", text, (("", {}, value),))
            for each, (text, value) in gauges.items()
        ),
    ]


def _statm_bytes(column: int) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * resource.getpagesize()


def _started_s() -> float:
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    since_boot_s = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def build_info() -> dict[str, str]:
    """`version`, `commit` ("unknown" unless the environment names it) and `python`."""
    return {
        "version": __version__,
        "commit": os.environ.get(COMMIT_ENV) or "unknown",
        "python": platform.python_version(),
    }
