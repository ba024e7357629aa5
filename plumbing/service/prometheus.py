"""Gauges, counters and histograms, and the text in which Prometheus scrapes them.

The client library of Prometheus would do, but loading it costs each of our processes 50 ms of its
start: it brings HTTP servers and the standard library's mail parser.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

Child = TypeVar("Child")
Sample = tuple[str, Mapping[str, str], float]  # what follows the name, the labels, the value


@dataclass(frozen=True, slots=True)
class Family:
    """One metric as a scrape shows it."""

    name: str
    kind: str  # "gauge", "counter" or "histogram"
    help_text: str
    samples: Sequence[Sample]

    def lines(self) -> list[str]:
        name = f"{self.name}_total" if self.kind == "counter" else self.name
        text = self.help_text.replace("\\", "\\\\").replace("\n", "\\n")
        shown = [f"# HELP {name} {text}", f"# TYPE {name} {self.kind}"]
        for suffix, labels, value in self.samples:
            pairs = ",".join(f'{key}="{_escaped(each)}"' for key, each in sorted(labels.items()))
            shown.append(f"{name}{suffix}{f'{{{pairs}}}' if pairs else ''} {number(value)}")
        return shown


class Metric(Generic[Child]):
    """One metric: one series for each combination of its labels' values."""

    kind: ClassVar[str]

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self._help_text = help_text
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], Child] = {}

    def labels(self, *values: object, **named: object) -> Child:
        """The series with these values, in the order of the labels or by their names."""
        if named:
            if values or named.keys() != set(self._labels):
                raise ValueError(f"the labels of {self.name} are {self._labels}, not {set(named)}")
            values = tuple(named[label] for label in self._labels)
        key = tuple(map(str, values))
        if len(key) != len(self._labels):
            raise ValueError(f"{self.name} has the labels {self._labels}, not {len(key)}")
        if key not in self._series:
            self._series[key] = self._make()
        return self._series[key]

    def clear(self) -> None:
        """Forget every series."""
        self._series.clear()

    def family(self) -> Family:
        samples = [
            (suffix, {**dict(zip(self._labels, key, strict=True)), **more}, value)
            for key, series in self._series.items()
            for suffix, more, value in self._samples(series)
        ]
        return Family(self.name, self.kind, self._help_text, samples)

    def _make(self) -> Child:
        raise NotImplementedError

    def _samples(self, series: Child) -> Iterable[Sample]:
        raise NotImplementedError


class Level:
    """One series of a gauge."""

    def __init__(self) -> None:
        self.read: Callable[[], float] = lambda: self._value
        self._value = 0.0

    def set(self, value: float) -> None:
        self._value = value


class Count:
    """One series of a counter."""

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        if amount < 0:
            raise ValueError("a counter only grows")
        self.value += amount


class Observed:
    """One series of a histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.sum = 0.0
        self.counts = [0] * (len(bounds) + 1)  # the last is for what is above all bounds
        self._bounds = bounds

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value


class Gauge(Metric[Level]):
    """A value that rises and falls. Without labels `set` and `read_by` are those of its series."""

    kind = "gauge"

    def set(self, value: float) -> None:
        self.labels().set(value)

    def read_by(self, read: Callable[[], float]) -> None:
        """Ask `read` at each scrape."""
        self.labels().read = read

    def _make(self) -> Level:
        return Level()

    def _samples(self, series: Level) -> Iterable[Sample]:
        return (("", {}, series.read()),)


class Counter(Metric[Count]):
    """A count of what has happened. Without labels `inc` is that of its series."""

    kind = "counter"

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name.removesuffix("_total"), help_text, labels)

    def inc(self, amount: float = 1) -> None:
        self.labels().inc(amount)

    def _make(self) -> Count:
        return Count()

    def _samples(self, series: Count) -> Iterable[Sample]:
        return (("", {}, series.value),)


class Histogram(Metric[Observed]):
    """How often values up to each bound were observed."""

    kind = "histogram"

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        super().__init__(name, help_text, labels)
        self._bounds = tuple(bounds)

    def observe(self, value: float) -> None:
        self.labels().observe(value)

    def _make(self) -> Observed:
        return Observed(self._bounds)

    def _samples(self, series: Observed) -> Iterable[Sample]:
        return histogram_samples(self._bounds, series.counts, series.sum)


def histogram_samples(bounds: Sequence[float], counts: Sequence[int], total: float) -> list[Sample]:
    """`counts` are those of values between two bounds; the last of them is above all."""
    ends = [*(number(bound) for bound in bounds), "+Inf"]
    below = list(itertools.accumulate(counts))
    buckets: list[Sample] = [
        ("_bucket", {"le": end}, count) for end, count in zip(ends, below, strict=True)
    ]
    return [*buckets, ("_count", {}, below[-1]), ("_sum", {}, total)]


def page(families: Iterable[Family]) -> bytes:
    """What is scraped."""
    return "".join(f"{line}\n" for family in families for line in family.lines()).encode()


def number(value: float) -> str:
    """As Prometheus reads it: `1.0`, `+Inf`."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
