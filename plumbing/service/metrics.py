"""Prometheus metrics, one page per process: zero from the first scrape, never absent.

An alert cannot use a metric that appears only after something has happened: `rate()` over nothing
is nothing. So a metric with labels is declared with their known values, which are exported as zeros
at once. States are gauges with a label `state`, one of them 1.

The page is Prometheus's text format, written here: its library imports HTTP servers and clients,
which cost each process of a pod 3 MiB and a third of its start.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import platform
import resource
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from plumbing import __version__
from plumbing.service.notify import restarts

PREFIX = "understudy"
COMMIT_ENV = "UNDERSTUDY_COMMIT"  # set by an image's build; a wheel does not know its commit

# From a grant on an idle machine (1 ms) to a drain budget (30 s) and a first load (10 min).
DURATION_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 600.0),
)

Labels = Mapping[str, Sequence[str]] | Sequence[str]  # with their known values, or only names
Sample = tuple[str, str, float]  # what is appended to the name, its `le`, the value
V = TypeVar("V", bound="Value | Tally")


class Value:
    """One number, of a gauge or a counter."""

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def inc(self, by: float = 1.0) -> None:
        self.value += by

    def samples(self) -> Iterator[Sample]:
        yield "", "", self.value


class Tally:
    """The counts of a histogram: one for each bound, and one for all values above."""

    def __init__(self, bounds_s: Sequence[float] = DURATION_BUCKETS_S) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds

    def samples(self) -> Iterator[Sample]:
        bounds = (*self.bounds_s, math.inf)
        for bound, count in zip(bounds, itertools.accumulate(self.counts), strict=True):
            yield "_bucket", _number(bound), count
        yield "_count", "", sum(self.counts)
        yield "_sum", "", self.sum_s


class Metric(Generic[V]):
    """What the page has under one name, for each combination of its labels' values."""

    def __init__(self, kind: str, help_text: str, labels: Labels, make: Callable[[], V]) -> None:
        """`make`: a zero, for a combination that is met first."""
        self._kind, self._help_text = kind, help_text
        self._names = tuple(labels)
        self._make = make
        known = labels.values() if isinstance(labels, Mapping) else [()] * len(labels)
        self._found: dict[tuple[str, ...], V] = {key: make() for key in itertools.product(*known)}

    def labels(self, **labels: str) -> V:
        """What it has for these values, of all of its labels."""
        assert labels.keys() == set(self._names), f"the labels are {self._names}"
        key = tuple(labels[name] for name in self._names)
        if key not in self._found:
            self._found[key] = self._make()
        return self._found[key]

    def lines(self, name: str) -> Iterator[str]:
        """Its part of the page."""
        yield f"# HELP {name} {_escaped(self._help_text)}"
        yield f"# TYPE {name} {self._kind}"
        for key, found in self._found.items():
            named = list(zip(self._names, key, strict=True))
            for end, bound, number in found.samples():
                pairs = [*named, ("le", bound)] if bound else named
                text = ",".join(f'{label}="{_quoted(value)}"' for label, value in pairs)
                yield f"{name}{end}{f'{{{text}}}' if text else ''} {_number(number)}"


class OneHot:
    """One gauge per state; exactly one is 1 once `set` has been called for these labels."""

    def __init__(self, gauge: Metric[Value], states: Sequence[str]) -> None:
        self._gauge, self._states = gauge, tuple(states)

    def set(self, state: str, **labels: str) -> None:
        """Make `state` the current one for `labels`, all labels but `state` given."""
        for each in self._states:
            self._gauge.labels(state=each, **labels).set(1 if each == state else 0)


class Metrics:
    """The metrics of one process. Names are given without the `understudy_` prefix.

    Labels are given with their known values, `{"phase": ("wake", "serve")}`, whose product is
    exported as zeros from the start; or by name only where values are not known yet: call
    `.labels(…)` once when they are.
    """

    def __init__(self) -> None:
        self.refresh: Callable[[], None] = lambda: None  # called before each scrape is answered
        self.by_name: dict[str, Metric[Any]] = {}
        build = build_info()
        info = self.gauge("build_info", "Version of this process; always 1.", tuple(build))
        info.labels(**build).set(1)
        self.counter(
            "program_restarts_total", "Restarts of this program by its init, in its container."
        ).labels().inc(restarts())
        self.limit_hits = self.counter(
            "limit_hits_total", "Number of times a limit was reached, by limit.", ("limit",)
        )
        self._cpu = self.counter("process_cpu_seconds_total", "CPU time of this process.").labels()
        started = self.gauge("process_start_time_seconds", "When this process was started.")
        started.labels().set(_started_s())
        text = "Address space of this process."
        self._virtual = self.gauge("process_virtual_memory_bytes", text).labels()
        text = "Resident memory of this process."
        self._resident = self.gauge("process_resident_memory_bytes", text).labels()
        self._fds = self.gauge("process_open_fds", "Open descriptors of this process.").labels()
        self._fds_max = self.gauge("process_max_fds", "Limit of open descriptors.").labels()

    def gauge(self, name: str, help_text: str, labels: Labels = ()) -> Metric[Value]:
        return self._add(name, Metric("gauge", help_text, labels, Value))

    def counter(self, name: str, help_text: str, labels: Labels = ()) -> Metric[Value]:
        """A counter, whose name ends in `_total`."""
        return self._add(name, Metric("counter", help_text, labels, Value))

    def histogram(
        self,
        name: str,
        help_text: str,
        labels: Labels = (),
        make: Callable[[], Tally] = Tally,
    ) -> Metric[Tally]:
        return self._add(name, Metric("histogram", help_text, labels, make))

    def _add(self, name: str, metric: Metric[V]) -> Metric[V]:
        """Put it on the page, in place of one of the same name."""
        self.by_name[f"{PREFIX}_{name}"] = metric
        return metric

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
        self._look_at_process()
        lines = (line for name, metric in self.by_name.items() for line in metric.lines(name))
        return "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")

    def _look_at_process(self) -> None:
        used = os.times()
        self._cpu.set(used.user + used.system)
        self._fds_max.set(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        with contextlib.suppress(OSError):  # no descriptor to look with: as at the last scrape
            with open("/proc/self/statm") as stream:
                virtual, resident, *_ = map(int, stream.read().split())
            self._virtual.set(virtual * resource.getpagesize())
            self._resident.set(resident * resource.getpagesize())
            self._fds.set(len(os.listdir("/proc/self/fd")))


def _started_s() -> float:
    with open("/proc/self/stat") as stream:
        ticks = int(stream.read().rpartition(")")[2].split()[19])  # man 5 proc: starttime
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted_s + ticks / os.sysconf("SC_CLK_TCK")


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(float(value)).replace("nan", "NaN")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')


def build_info() -> dict[str, str]:
    """`version`, `commit` ("unknown" unless the environment names it) and `python`."""
    return {
        "version": __version__,
        "commit": os.environ.get(COMMIT_ENV) or "unknown",
        "python": platform.python_version(),
    }
