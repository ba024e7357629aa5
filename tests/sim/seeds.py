"""Which schedules a simulation runs, and how one that failed is run again.

`SEED` is the first seed and `RUNS` how many follow it: `make sim SEED=4711 RUNS=1` is that one
schedule again. A failure says its seed and the last things that happened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SEED = int(os.environ.get("SEED", "1"))
SHOWN = 60  # of the last steps; the seed has them all


def seeds(runs: int) -> range:
    """The seeds of this run: `RUNS` of them if that is set, else `runs`."""
    return range(SEED, SEED + int(os.environ.get("RUNS", str(runs))))


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
