"""What clients saw: each request's outcome, text that came twice, pauses of streams. Pure.

A stream that was cut is broken; if its text before the cut is not a prefix of the expected answer,
it is wrong. Behind a gateway a stream whose engine dies continues at the next one. Its token says
where it began, so text after a newer grant can only come from the newer engine.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

from understudy.drill.records import (
    PHASES,
    End,
    Exchange,
    Kill,
    Moment,
    Outcome,
    Records,
)
from understudy.drill.targets import FRONT, GATEWAY

UNAVAILABLE = frozenset({429, 503})  # the server refused for now
CLIENT_ERROR = 400  # and above: not an answer of the model
AWAKE = "awake"
IN_FLIGHT_MS = 10.0  # for text that a pod sent before its death to reach the client
Spread = dict[str, float | None]


def spread(sample: Iterable[float]) -> Spread:
    """p50, p99 and max in milliseconds, by nearest rank, which never interpolates; None where
    nothing was measured."""
    ordered = sorted(sample)
    ranks = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    if not ordered:
        return dict.fromkeys(ranks)
    return {
        name: round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3)
        for name, share in ranks.items()
    }


# ------------------------------------------------------------------ outcomes


def outcome_of(exchange: Exchange, records: Records) -> Outcome:
    """The outcome of one exchange of these records: lost in the gateway if it was killed meanwhile,
    refused if the request was sent to an address outside the pod and reached no engine. In a fleet
    the front is that gateway, and its address is not kept while it is away."""
    outcome = classify(exchange, records.expected)
    is_lost = outcome in (Outcome.LOST, Outcome.BROKEN)
    is_lost |= bool(records.pods) and outcome is Outcome.REFUSED
    part = FRONT if records.pods else GATEWAY
    if is_lost and any(_was_inside(exchange, kill, part) for kill in records.kills):
        return Outcome.LOST_IN_GATEWAY
    is_error = exchange.status == 0 or exchange.status >= CLIENT_ERROR
    is_outside = records.url and exchange.token is None and is_error
    return Outcome.REFUSED if is_outside and exchange.end is not End.HUNG else outcome


def _was_inside(exchange: Exchange, kill: Kill, part: str) -> bool:
    """Whether the request was in this part when that was killed."""
    gone_ms = kill.back_ms if part == FRONT else kill.gone_ms
    return (
        kill.target == part
        and exchange.sent_ms <= (gone_ms or kill.killed_ms)
        and exchange.ended_ms >= kill.killed_ms
    )


def classify(exchange: Exchange, expected: dict[str, Exchange]) -> Outcome:
    """The outcome of one exchange, compared with the expected answer to its prompt."""
    if exchange.end is End.REFUSED or exchange.status in UNAVAILABLE:
        return Outcome.REFUSED
    if exchange.end is End.HUNG:
        return Outcome.HUNG
    if exchange.end is End.GARBLED:
        return Outcome.WRONG
    if exchange.status >= 500 or exchange.status == 0:
        return Outcome.LOST  # accepted, and the engine died before it could answer
    answer = expected.get(exchange.prompt)
    if exchange.status != 200 or exchange.token is None or answer is None:
        return Outcome.WRONG
    if not answer.text.startswith(exchange.text):
        return Outcome.WRONG
    if exchange.end is End.CUT:
        return Outcome.BROKEN
    is_same = (exchange.text, exchange.finish_reason) == (answer.text, answer.finish_reason)
    is_counted = answer.tokens is None or exchange.tokens == answer.tokens
    return Outcome.OK if is_same and is_counted else Outcome.WRONG


def doubled_pieces(exchange: Exchange, expected: Exchange | None) -> int:
    """How many pieces of text came a second time: where the answer departs from the expected one,
    it continues from an earlier place in it."""
    if expected is None or expected.text.startswith(exchange.text):
        return 0
    text, whole = exchange.text, expected.text
    pairs = zip(text, whole, strict=False)
    least = min(len(text), len(whole))
    same = next((number for number, (a, b) in enumerate(pairs) if a != b), least)
    rest = text[same:]
    lengths = range(1, min(same, len(rest)) + 1)
    back = next((length for length in lengths if whole.startswith(rest, same - length)), 0)
    return sum(same < end <= same + back for end in exchange.piece_ends) or min(back, 1)


# ------------------------------------------------------------------ failovers


def first_answers(kills: Sequence[Kill], exchanges: Iterable[Exchange]) -> list[Exchange | None]:
    """For each kill, the request after it, and before the next one, that got the first token under
    a newer grant."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.sent_ms)
    starts = [bisect_left(ordered, kill.killed_ms, key=lambda e: e.sent_ms) for kill in kills]
    ends = [*starts, len(ordered)][1:]
    found = []
    for kill, start, end in zip(kills, starts, ends, strict=True):
        served = [
            (each.first_token_ms, number)
            for number, each in enumerate(ordered[start:end], start)
            if each.first_token_ms is not None and (each.token or 0) > kill.old_token
        ]
        found.append(ordered[min(served)[1]] if served else None)
    return found


def phases_of(kill: Kill, first: Exchange | None) -> dict[str, float]:
    """Milliseconds of each phase of one failover whose start and end were observed; `first`: the
    first answer after it.

    Clamped at zero: two processes may see the same instant in either order.
    """
    moments = [kill.killed_ms, kill.detected_ms, kill.fenced_ms, kill.granted_ms, kill.active_ms]
    moments.append(first.first_token_ms if first is not None else None)
    return {
        name: max(0.0, after - before)
        for name, before, after in zip(PHASES, moments, moments[1:], strict=False)
        if before is not None and after is not None
    }


# ------------------------------------------------------------------ pauses


def longest_gap(
    times_ms: Iterable[float], from_ms: float = -math.inf, until_ms: float = math.inf
) -> float | None:
    """The longest gap between two texts that ends after `from_ms` and begins before `until_ms`."""
    pairs = (pair for pair in pairwise(times_ms) if pair[1] > from_ms and pair[0] < until_ms)
    return max((after - before for before, after in pairs), default=None)


def pause_at(kill: Kill, until_ms: float, exchange: Exchange) -> float | None:
    """The pause of a stream at this kill, before the next one at `until_ms`; None if it did not
    continue at another engine."""
    times = exchange.text_ms
    is_older = exchange.token is not None and exchange.token <= kill.old_token
    if not times or not is_older or kill.granted_ms is None or times[-1] < kill.granted_ms:
        return None
    return _gap_since(kill, until_ms, times)


def _gap_since(kill: Kill, until_ms: float, times: Sequence[float]) -> float | None:
    """The longest gap. A stream without text before the kill has waited since the kill at least."""
    seen = times if times[0] < kill.killed_ms else [kill.killed_ms, *times]
    return longest_gap(seen, kill.killed_ms, until_ms)


def failover_pauses(records: Records) -> list[float]:
    """One for each kill that a stream continued after."""
    kills, found = records.engine_kills, []
    killed_ms = [*(kill.killed_ms for kill in kills), math.inf]
    for exchange in records.exchanges:
        start = bisect_left(killed_ms, exchange.sent_ms)
        end = bisect_left(killed_ms, exchange.last_token_ms or 0.0)
        for number in range(start, end):
            kill, until_ms = kills[number], killed_ms[number + 1]
            if kill.model:
                if exchange.model != kill.model or kill.new_engine in (None, kill.engine):
                    continue  # relaunched: no failover
                until_ms = (kill.back_ms or kill.killed_ms) + 1.0
            found.append(pause_at(kill, until_ms, exchange))
    return [pause for pause in found if pause is not None]


def pauses_at_pod(kill: Kill, records: Records) -> list[float]:
    """The pause of each stream that was in the pod when it was hit, and that went on elsewhere."""
    later = (each.killed_ms for each in records.kills if each.killed_ms > kill.killed_ms)
    until_ms, found = min(later, default=math.inf), []
    for exchange in records.exchanges:
        times = exchange.text_ms
        is_hit = kill.pod in ("", exchange.pod) and exchange.sent_ms < kill.killed_ms
        if is_hit and times and times[-1] > kill.killed_ms + IN_FLIGHT_MS:
            found.append(_gap_since(kill, until_ms, times))
    return [pause for pause in found if pause is not None]


def times_away(moments: Iterable[Moment], model: str) -> list[tuple[float, float]]:
    """From when to when the model was not awake, each time."""
    found: list[tuple[float, float]] = []
    since_ms: float | None = None
    for moment in (each for each in moments if each.part == model):
        if moment.state == AWAKE and since_ms is not None:
            found.append((since_ms, moment.at_ms))
            since_ms = None
        elif moment.state != AWAKE and since_ms is None:
            since_ms = moment.at_ms
    return found


def pauses_in(exchange: Exchange, away: Sequence[tuple[float, float]]) -> list[float]:
    """A stream's pauses in the times when its model was not awake, if it continued afterwards."""
    times = exchange.text_ms
    through = (each for each in away if times and times[0] <= each[0] and each[1] <= times[-1])
    gaps = (longest_gap(times, *each) for each in through)
    return [gap for gap in gaps if gap is not None]
