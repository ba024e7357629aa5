"""What stock clients have seen, judged by what was killed meanwhile. Pure.

A wrong answer is always a fault, and so is a refused connection. A request that was in the gateway
when the gateway's own process was killed is lost with it, and counted apart; so is a stream of a
kind that cannot be continued, which must end with an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hack.stock_clients.kinds import RequestKind
from understudy.drill.records import GATEWAYS, Records

SHOWN_MAX = 20  # of errors and of wrong answers


class Fate(StrEnum):
    """What became of a request."""

    OK = "ok"
    WRONG = "wrong"  # another answer than before the first kill
    ERROR = "error"
    LOST_IN_GATEWAY = "lost_in_gateway"
    NOT_CONTINUED = "not_continued"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request of a stock client. `error`: as the package raised it; `is_like_before`: the
    answer is the one that was given before the first kill."""

    kind: RequestKind
    began_ms: float
    ended_ms: float
    error: str = ""
    is_refused: bool = False
    is_like_before: bool = False
    longest_wait_ms: float = 0.0
    detail: str = ""  # both answers, where they differ

    def overlaps(self, from_ms: float, to_ms: float | None) -> bool:
        return self.began_ms <= (from_ms if to_ms is None else to_ms) and self.ended_ms >= from_ms


@dataclass(slots=True)
class Clients:
    """All requests of all clients, and the kinds that they are of."""

    kinds: Sequence[RequestKind]
    attempts: list[Attempt] = field(default_factory=list)

    def to_dict(self, records: Records) -> dict[str, Any]:
        """The counts, by kind and as a whole."""
        fates = [(each, fate_of(each, records)) for each in self.attempts]
        by_kind = {kind.name: dict.fromkeys(("requests", *FAULTS), 0) for kind in self.kinds}
        waits = dict.fromkeys(by_kind, 0.0)
        for attempt, fate in fates:
            name, found = attempt.kind.name, by_kind[attempt.kind.name]
            found["requests"] += 1
            if fate is not Fate.OK:
                found[fate] += 1
            waits[name] = max(waits[name], attempt.longest_wait_ms)
        counts = {str(fate): sum(fate is each for _, each in fates) for fate in FAULTS}
        return {
            "requests": len(fates),
            **counts,
            "kinds": {
                name: {**found, "longest_wait_ms": round(waits[name], 1)}
                for name, found in by_kind.items()
            },
            **{
                f"first_{fate}": [
                    f"{attempt.kind.name}: {attempt.error or attempt.detail}"
                    for attempt, each in fates
                    if each is fate
                ][:SHOWN_MAX]
                for fate in (Fate.ERROR, Fate.WRONG)
            },
        }


FAULTS = tuple(fate for fate in Fate if fate is not Fate.OK)


def fate_of(attempt: Attempt, records: Records) -> Fate:
    """What became of one request, given what the drill has killed."""
    if not attempt.error:
        return Fate.OK if attempt.is_like_before else Fate.WRONG
    if attempt.is_refused:
        return Fate.ERROR
    gateways = [kill for kill in records.part_kills if kill.target in GATEWAYS]
    if any(attempt.overlaps(kill.killed_ms, kill.gone_ms) for kill in gateways):
        return Fate.LOST_IN_GATEWAY
    is_killed = any(attempt.overlaps(kill.killed_ms, None) for kill in records.kills)
    is_excused = is_killed and not attempt.kind.is_continued
    return Fate.NOT_CONTINUED if is_excused else Fate.ERROR
