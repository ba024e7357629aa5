"""How often a gateway's processes tell what they have for the pool: seldom on average, at once when
something happens.

A full queue takes a millisecond to tell, and the pool half of one to judge, so there is a word each
5 ms and no more. But what follows from a word is said at once: a request comes, its model's victim
gets another door, that door is obeyed, the last answer ends. Spaced evenly, these would make a
switch wait for 5 ms.
"""

from __future__ import annotations

DEMAND_S = 0.005  # between two words, on average
AHEAD = 4  # words that may be said before their time


class DemandPace:
    """When the next word may be said. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._even_s = 0.0  # when it would be due if all were evenly spaced

    def next_s(self, now_s: float) -> float:
        return max(now_s, self._even_s - AHEAD * DEMAND_S)

    def said(self, now_s: float) -> None:
        self._even_s = max(now_s, self._even_s) + DEMAND_S
