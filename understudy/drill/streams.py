"""What a client saw of its streams: how long each paused at a failover, and what came twice. Pure.

Behind a gateway a stream that runs on an engine that dies goes on at the next one. Its token says
where it began, so text after a newer grant can only come from the newer engine.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from understudy.drill.records import (
    GATEWAYS,
    End,
    EngineKill,
    Exchange,
    Outcome,
    PartKill,
    Records,
)

CLIENT_ERROR = 400  # and above: not an answer of the model


@dataclass(frozen=True, slots=True)
class Pause:
    """The longest gap between two texts of a stream from a kill until the next one."""

    from_ms: float
    to_ms: float

    @property
    def length_ms(self) -> float:
        return self.to_ms - self.from_ms


def pauses_of(records: Records) -> list[Pause]:
    """One for each kill that a stream went on after; none in direct mode."""
    if records.is_direct:
        return []
    kills = records.kills  # in order
    killed_ms = [*(kill.killed_ms for kill in kills), math.inf]
    found = []
    for exchange in records.exchanges:
        start = bisect_left(killed_ms, exchange.sent_ms)
        end = bisect_left(killed_ms, exchange.last_token_ms or 0.0)
        found += [
            pause_at(kills[number], killed_ms[number + 1], exchange) for number in range(start, end)
        ]
    return [pause for pause in found if pause is not None]


def pause_at(kill: EngineKill, until_ms: float, exchange: Exchange) -> Pause | None:
    """The pause of a stream at this kill, before the next one at `until_ms`; None where it did not
    go on at another engine."""
    times = exchange.text_ms
    is_older = exchange.token is not None and exchange.token <= kill.old_token
    if not times or not is_older or kill.granted_ms is None or times[-1] < kill.granted_ms:
        return None
    # A stream without text before the kill has waited since the kill at least.
    seen = times if times[0] < kill.killed_ms else [kill.killed_ms, *times]
    gaps = [
        Pause(before, after)
        for before, after in pairwise(seen)
        if after > kill.killed_ms and before < until_ms
    ]
    return max(gaps, key=lambda pause: pause.length_ms, default=None)


def doubled_pieces(exchange: Exchange, expected: Exchange | None) -> int:
    """How many pieces of text came a second time: where the answer departs from the expected one,
    it goes on from an earlier place in it."""
    if expected is None or expected.text.startswith(exchange.text):
        return 0
    text, whole = exchange.text, expected.text
    same = _same(text, whole)
    rest = text[same:]
    back = next(
        (
            length
            for length in range(1, min(same, len(rest)) + 1)
            if whole.startswith(rest, same - length)
        ),
        0,
    )
    return sum(same < end <= same + back for end in exchange.piece_ends) or min(back, 1)


def _same(one: str, other: str) -> int:
    """The number of characters until the two differ."""
    pairs = zip(one, other, strict=False)
    least = min(len(one), len(other))
    return next((number for number, (a, b) in enumerate(pairs) if a != b), least)


def died_in_gateway(exchange: Exchange, kills: Sequence[PartKill]) -> bool:
    """Whether the request was in a gateway's process when that was killed."""
    return any(
        kill.target in GATEWAYS
        and exchange.sent_ms <= (kill.gone_ms or kill.killed_ms)
        and exchange.ended_ms >= kill.killed_ms
        for kill in kills
    )


def blamed(exchange: Exchange, outcome: Outcome, records: Records) -> Outcome:
    """`outcome`, or lost in the gateway if it was lost there, or refused if the request was sent to
    an address outside the pod and no engine has seen it."""
    is_lost = outcome in (Outcome.LOST, Outcome.BROKEN)
    if is_lost and died_in_gateway(exchange, records.part_kills):
        return Outcome.LOST_IN_GATEWAY
    is_error = exchange.status == 0 or exchange.status >= CLIENT_ERROR
    is_outside = records.url and exchange.token is None and is_error
    return Outcome.REFUSED if is_outside and exchange.end is not End.HUNG else outcome
