"""What every simulation here is made with: seeds, failures that say how to be seen again, and
planted rules.

A world is told by a seeded generator what happens next, and checks its promises after every step.
`SEED` is the first seed and `RUNS` how many follow it: `make sim SEED=4711 RUNS=1` is that one
schedule again. A failure says its seed and the last things that happened. `SCHEDULES_MAX` is what
CI sets: the most that one test runs.

A planted rule is a rule of the design that is left out, in the real core or in what surrounds it:
some schedule must then break a promise. A world that lets a planted rule pass proves nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

SEED = int(os.environ.get("SEED", "1"))
SCHEDULES_MAX = int(os.environ.get("SCHEDULES_MAX", "1000000"))
SHOWN = 60  # of the last steps; the seed has them all

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def seeds(runs: int) -> range:
    """The seeds of this run: `RUNS` of them if that is set, else `runs`."""
    return range(SEED, SEED + int(os.environ.get("RUNS", str(min(runs, SCHEDULES_MAX)))))


@contextmanager
def replayable(seed: int, trace: Callable[[], list[str]]) -> Iterator[None]:
    """Whatever fails in here says how to see it again."""
    try:
        yield
    except BaseException as error:
        steps = trace()
        shown = " | ".join(steps[-SHOWN:])
        raise AssertionError(
            f"seed {seed} (again: SEED={seed} RUNS=1): {error!r} after {len(steps)} steps: {shown}"
        ) from error


# ---------------------------------------------------------------------- planted rules


@dataclass(frozen=True)
class PlantedRule:
    """`plant` leaves the rule out. `seed`: a schedule that shows it, looked at first."""

    name: str
    plant: Plant
    caught: str  # a regular expression for the promise that is broken then
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def is_caught(self, patch: Patch, run: Callable[[int], Any], searched: Iterable[int]) -> str:
        """Plant it, and run schedules until one breaks the promise: what that one said. Fails if
        none does."""
        self.plant(patch)
        with pytest.raises(AssertionError, match=self.caught) as found:
            _run_all(run, itertools.chain((self.seed,), searched))
        return str(found.value)


def _run_all(run: Callable[[int], Any], searched: Iterable[int]) -> None:
    for seed in searched:
        run(seed)


class PlantedRules(list[PlantedRule]):
    """The rules of one part of a design."""

    def rule(self, name: str, caught: str, seed: int = 0) -> Callable[[Plant], Plant]:
        """The decorated function leaves out the rule `name`."""

        def add(plant: Plant) -> Plant:
            self.append(PlantedRule(name, plant, caught, seed))
            return plant

        return add

    def instead(
        self, name: str, caught: str, owner: Any, attribute: str, seed: int = 0
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """The decorated function takes the place of `owner.attribute`, which is its first argument:
        so the rule `name` is left out."""

        def add(replacement: Callable[..., Any]) -> Callable[..., Any]:
            @self.rule(name, caught, seed)
            def plant(patch: Patch) -> None:
                real = getattr(owner, attribute)
                patch.setattr(
                    owner, attribute, lambda *asked, **named: replacement(real, *asked, **named)
                )

            return replacement

        return add

    def put(
        self, name: str, caught: str, owner: Any, attribute: str, value: Any, seed: int = 0
    ) -> None:
        """The rule `name` is left out where `owner.attribute` is `value`."""
        self.rule(name, caught, seed)(lambda patch: patch.setattr(owner, attribute, value))

    def parametrized(self) -> Any:
        return pytest.mark.parametrize("rule", self, ids=str)
