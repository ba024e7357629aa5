"""How long the active engine may show nothing before it counts as hung.

    with a standby ready     hang_ms, stretched by the CPU pressure
    alone                    hang_alone_ms, unless the former is more

A process that waits for a CPU is slow, not hung: so where half of the time is lost to waiting, the
budget doubles. The stretch has a limit, so that a hang is found within 10 s on any machine. Without
a standby, a kill makes a certain outage of a doubtful one; not to know of a standby is to have
none.
"""

from __future__ import annotations

from dataclasses import dataclass

HANG_MS = 3_000
# Of a machine that swaps, or of another engine that is being launched: half a minute of silence has
# been seen to end by itself, and a relaunch takes about as long.
HANG_ALONE_MS = 30_000
STRETCH_MAX = 2.5  # 7.5 s of `hang_ms`, and the looks on top of that, are less than 10 s


@dataclass(frozen=True, slots=True)
class Signs:
    """What a look shows besides the backend's answers."""

    progress: int = 0  # the counter of the shared page; only that it moves matters
    pressure: float | None = None  # the share of time lost to waiting for a CPU, 0 to 1
    has_standby: bool = True  # another engine could be granted the lock at once


NOTHING_SEEN = Signs()


@dataclass(frozen=True, slots=True)
class Patience:
    """The budgets of a silent engine."""

    hang_ms: int = HANG_MS
    hang_alone_ms: int = HANG_ALONE_MS

    def budget_ms(self, signs: Signs) -> float:
        """The longest silence."""
        stretched_ms = self.hang_ms * stretch(signs.pressure)
        return stretched_ms if signs.has_standby else max(stretched_ms, self.hang_alone_ms)

    def explain(self, signs: Signs) -> str:
        """`budget 6.3 s: 3 s, stretched 2.1 times by a CPU pressure of 52 %`."""
        budget_ms, factor = self.budget_ms(signs), stretch(signs.pressure)
        text = f"budget {seconds(budget_ms)}"
        if budget_ms > self.hang_ms * factor:
            return f"{text}: no standby is ready"
        if factor >= 1.05:
            text += f": {seconds(self.hang_ms)}, stretched {factor:.1f} times by a CPU pressure"
            text += f" of {percent(signs.pressure or 0)}"
        return text


DEFAULT = Patience()


def stretch(pressure: float | None) -> float:
    """How many times longer everything may take: 1 without pressure, twice at one half."""
    left = 1 - min(1.0, max(0.0, pressure or 0.0))
    return STRETCH_MAX if left * STRETCH_MAX <= 1 else 1 / left


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def seconds(ms: float) -> str:
    """`3 s`, `7.5 s`."""
    return f"{round(ms / 1000, 1):g} s"
