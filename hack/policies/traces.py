"""The traces: who asks for what, and when. Every set of rules gets the same ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hack.policies.world import Client, Costs

FOR_EVER = 1_000_000


@dataclass(frozen=True)
class Trace:
    """`horizon_ms`: how long it runs. `is_saturated`: somebody always waits or is served, so that
    the serving share says what the rules cost."""

    name: str
    about: str
    models: dict[str, Costs]
    clients: Callable[[], list[Client]]
    horizon_ms: float
    slots: int = 1
    is_saturated: bool = True
    can_park: bool = True


def _always(value_ms: float) -> Iterator[float]:
    return itertools.repeat(value_ms)


def _random(rng: random.Random, mean_ms: float) -> Iterator[float]:
    """Exponential, cut at eight times the mean."""
    return iter(lambda: min(rng.expovariate(1 / mean_ms), 8 * mean_ms), None)


def _closed(model: str, start_ms: float, service_ms: float, think_ms: float) -> Client:
    return Client(model, start_ms, _always(service_ms), _always(think_ms), FOR_EVER)


def _busy_and_one() -> list[Client]:
    busy = [_closed("a", 1_250.0 * number, 10_000.0, 0.0) for number in range(8)]
    one = Client("b", 20_000.0, _always(1_000.0), _always(0.0), times=1)
    return [*busy, one]


def _four_saturated(service_ms: float, *, can_park: bool) -> Callable[[], list[Client]]:
    def make() -> list[Client]:
        rng = random.Random(4)
        return [
            Client(
                *(name, rng.uniform(0.0, 5_000.0), _random(rng, service_ms), _always(0.0)),
                FOR_EVER,
                can_park,
            )
            for name in "abcd"
            for _ in range(4)
        ]

    return make


def _two_in_turn() -> list[Client]:
    """One caller asks a, then b, then a: each request is a second long."""
    return [_closed("a", 0.0, 1_000.0, 1_000.0), _closed("b", 1_000.0, 1_000.0, 1_000.0)]


def _zipf(pause_ms: float) -> Callable[[], list[Client]]:
    def make() -> list[Client]:
        rng = random.Random(8)
        names = [f"m{number}" for number in range(8)]
        weights = [1 / (number + 1) for number in range(8)]
        picks = rng.choices(names, weights, k=16)
        return [
            Client(
                *(name, rng.uniform(0.0, 10_000.0), _random(rng, 4_000.0)),
                _random(rng, pause_ms),
                FOR_EVER,
            )
            for name in picks
        ]

    return make


def traces(*, is_quick: bool) -> list[Trace]:
    """All of them; quick ones are short."""
    scale = 0.25 if is_quick else 1.0
    four = {name: Costs() for name in "abcd"}
    costly = {name: Costs(wake_ms=8_000.0, release_ms=1_000.0) for name in "abcd"}
    eight = {f"m{number}": Costs() for number in range(8)}
    return [
        Trace(
            "one request beside a busy model",
            "S3: eight clients ask a without pause, one request asks b after 20 s",
            {"a": Costs(), "b": Costs()},
            _busy_and_one,
            scale * 1_200_000.0,
        ),
        Trace(
            "four saturated models",
            "four clients each, streams of 60 s in the mean, all can be parked",
            four,
            _four_saturated(60_000.0, can_park=True),
            scale * 3_600_000.0,
        ),
        Trace(
            "four saturated models, nothing can be parked",
            "as above, but no stream can be parked or sent again",
            four,
            _four_saturated(60_000.0, can_park=False),
            scale * 3_600_000.0,
            can_park=False,
        ),
        Trace(
            "four saturated models, costly switches",
            "as the first of these, but a wake takes 8 s and a release 1 s",
            costly,
            _four_saturated(60_000.0, can_park=True),
            scale * 3_600_000.0,
        ),
        Trace(
            "two models in turn",
            "S1: two callers, requests of 1 s, 1 s between them",
            {"a": Costs(), "b": Costs()},
            _two_in_turn,
            scale * 600_000.0,
            is_saturated=False,
        ),
        Trace(
            "zipf, busy",
            "S4: 16 clients on 8 models, requests of 4 s in the mean, pauses of 2 s, two awake",
            eight,
            _zipf(2_000.0),
            scale * 1_200_000.0,
            slots=2,
            is_saturated=False,
        ),
        Trace(
            "zipf, load that pauses",
            "as above with pauses of 60 s: models are idle by chance, and who switches only then "
            "does as well",
            eight,
            _zipf(60_000.0),
            scale * 1_200_000.0,
            slots=2,
            is_saturated=False,
        ),
    ]
