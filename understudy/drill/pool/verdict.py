"""The verdict of a drill of a pool: records in, report out. Pure.

Nobody may notice more of a switch, or of a death, than a pause; and no wait and no pause may be
longer than the bound that the pool itself states for the model. What could not be checked is a
problem, as in every drill.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from understudy.drill.pool.records import POOL, BoundSeen, PoolDrillRecords, PoolKill
from understudy.drill.problems import burn_problems
from understudy.drill.records import BurnUse, EngineDeath, Exchange, Outcome
from understudy.drill.streams import Pause, doubled_pieces, pause_at
from understudy.drill.verdict import Spread, outcome_of, spread

CUT_CODE = "pool.cut"  # the marked error of a request that could neither finish nor be parked
# Of deaths that the pool wants, or that cannot be told from them: a supervisor that is killed may
# be gone before its last event is read.
WANTED_DEATHS = frozenset({"", "asked_to_be_cold"})
AWAKE = "awake"
LOST = (Outcome.LOST, Outcome.BROKEN)

IN_DOCUMENT = (
    *("passed", "problems", "mode", "lasted_s", "requests", "switches", "kills", "killed"),
    *("lost", "refused", "cut", "wrong_tokens", "broken_streams", "doubled_tokens"),
    *("double_active", "false_deaths", "lost_in_gateway", "parked", "resumed"),
    *("longest_wait_of_bound", "longest_pause_of_bound", "models", "outcomes", "not_reached"),
)
SPREADS = ("switch_ms", "wait_ms", "pause_ms", "failover_pause_ms", "pool_back_ms")


@dataclass(slots=True)
class PoolDrillReport:
    """What a drill of a pool found. `problems`: why it did not pass, as sentences."""

    requests: int
    switches: int
    kills: int
    killed: dict[str, int]
    lost: int
    refused: int
    cut: int
    wrong_tokens: int
    broken_streams: int
    doubled_tokens: int
    double_active: int
    false_deaths: int
    lost_in_gateway: int
    parked: int
    resumed: int
    longest_wait_of_bound: float | None
    longest_pause_of_bound: float | None
    switch_ms: Spread
    wait_ms: Spread
    pause_ms: Spread
    failover_pause_ms: Spread
    pool_back_ms: Spread
    models: dict[str, dict[str, Any]]
    outcomes: list[dict[str, Any]]
    not_reached: list[str]
    lasted_s: float
    problems: list[str] = field(default_factory=list)
    burn: BurnUse | None = None

    mode = "pool"

    @property
    def passed(self) -> bool:
        faults = self.lost + self.refused + self.cut + self.wrong_tokens + self.broken_streams
        faults += self.doubled_tokens + self.double_active + self.false_deaths
        ratios = (self.longest_wait_of_bound, self.longest_pause_of_bound)
        return not faults and not self.problems and all((each or 0.0) <= 1.0 for each in ratios)

    def to_dict(self, backend: str, machine: dict[str, Any]) -> dict[str, Any]:
        """The one JSON document of `understudy drill --pool --json`."""
        document = {name: getattr(self, name) for name in IN_DOCUMENT}
        document |= {name: getattr(self, name).to_dict() for name in SPREADS}
        document |= {"backend": backend, "machine": machine}
        if self.burn is not None:
            document["burn"] = msgspec.structs.asdict(self.burn)
        return document


def judge_pool(
    records: PoolDrillRecords, kills_wanted: int, switches_wanted: int
) -> PoolDrillReport:
    """The report of a whole drill."""
    base = records.base
    outcomes = [(each, pool_outcome(each, records)) for each in base.exchanges]
    counts = Counter(outcome for _, outcome in outcomes)
    cut = sum(CUT_CODE in each.detail for each in base.exchanges)
    cut_streams = sum(
        CUT_CODE in each.detail and outcome is Outcome.BROKEN for each, outcome in outcomes
    )
    bounds = Bounds(records.bounds)
    pauses = parked_pauses(records)
    failovers = failover_pauses(records)
    waits = [(each, wait_of(each)) for each in base.exchanges]
    report = PoolDrillReport(
        requests=len(base.exchanges),
        switches=len(records.switches),
        kills=len(records.kills),
        killed=dict(Counter(kill.target for kill in records.kills)),
        lost=counts[Outcome.LOST],
        refused=counts[Outcome.REFUSED] - (cut - cut_streams),
        cut=cut,
        wrong_tokens=counts[Outcome.WRONG],
        broken_streams=counts[Outcome.BROKEN] - cut_streams,
        doubled_tokens=sum(
            doubled_pieces(each, base.expected.get(each.prompt)) for each in base.exchanges
        ),
        double_active=len(base.overlaps),
        false_deaths=len(stray_deaths(records)),
        lost_in_gateway=counts[Outcome.LOST_IN_GATEWAY],
        parked=len(pauses),
        resumed=len(failovers),
        longest_wait_of_bound=_longest(
            bounds.share(each.model, each.sent_ms, each.sent_ms + wait) for each, wait in waits
        ),
        longest_pause_of_bound=_longest(
            bounds.share(each.model, before, after)
            for each in base.exchanges
            for before, after in _longest_gap(each)
        ),
        switch_ms=spread(each.length_ms for each in records.switches),
        wait_ms=spread(wait for _, wait in waits),
        pause_ms=spread(pause.length_ms for pause in pauses),
        failover_pause_ms=spread(pause.length_ms for pause in failovers),
        pool_back_ms=spread(
            kill.took_ms for kill in records.kills if kill.target == POOL and kill.took_ms
        ),
        models={name: _model(name, outcomes, records, bounds) for name in records.models},
        outcomes=[outcome_document(number, kill, records) for number, kill in numbered(records)],
        not_reached=list(records.not_reached),
        lasted_s=round(base.lasted_s, 3),
        burn=base.burn,
    )
    report.problems = _problems(report, records, counts, kills_wanted, switches_wanted)
    return report


# ------------------------------------------------------------------ requests


def pool_outcome(exchange: Exchange, records: PoolDrillRecords) -> Outcome:
    return outcome_of(exchange, records.base)


def wait_of(exchange: Exchange) -> float:
    """Until its first text, or its end if there was none; a whole answer comes at its end."""
    until_ms = exchange.first_token_ms
    return (until_ms if until_ms is not None else exchange.ended_ms) - exchange.sent_ms


def _longest_gap(exchange: Exchange) -> list[tuple[float, float]]:
    """From when to when it paused for longest, if it had two pieces of text."""
    gaps = pairwise(exchange.text_ms)
    longest = max(gaps, key=lambda gap: gap[1] - gap[0], default=None)
    return [] if longest is None else [longest]


class Bounds:
    """The bounds that the pool stated, by model and time."""

    def __init__(self, seen: Iterable[BoundSeen]) -> None:
        self._seen: dict[str, list[BoundSeen]] = {}
        for each in sorted(seen, key=lambda one: one.at_ms):
            self._seen.setdefault(each.model, []).append(each)

    def share(self, model: str, from_ms: float, to_ms: float) -> float | None:
        """A time of waiting, divided by the largest bound that was stated from just before it until
        it was over; None: none was, or there is no bound."""
        seen = self._seen.get(model, [])
        first = max(0, bisect_right(seen, from_ms, key=lambda each: each.at_ms) - 1)
        last = bisect_right(seen, to_ms, key=lambda each: each.at_ms)
        stated = [each.bound_ms for each in seen[first : max(last, first + 1)]]
        found = [each for each in stated if each]
        return (to_ms - from_ms) / max(found) if found else None


def _longest(shares: Iterable[float | None]) -> float | None:
    known = [each for each in shares if each is not None]
    return round(max(known), 4) if known else None


# ------------------------------------------------------------------ pauses


def away(records: PoolDrillRecords, model: str) -> list[tuple[float, float]]:
    """From when to when the model was not awake, each time."""
    found: list[tuple[float, float]] = []
    since_ms: float | None = None
    for moment in sorted(records.moments, key=lambda each: each.at_ms):
        if moment.model != model:
            continue
        if moment.state == AWAKE and since_ms is not None:
            found.append((since_ms, moment.at_ms))
            since_ms = None
        elif moment.state != AWAKE and since_ms is None:
            since_ms = moment.at_ms
    return found


def pauses_in(exchange: Exchange, gone: Sequence[tuple[float, float]]) -> list[Pause]:
    """A stream's pauses in the times when its model was away, if it went on afterwards."""
    times = exchange.text_ms
    found = []
    for from_ms, to_ms in gone:
        if len(times) < 2 or times[0] > from_ms or times[-1] < to_ms:
            continue
        start, end = bisect_left(times, from_ms), bisect_right(times, to_ms)
        around = times[max(0, start - 1) : end + 1]
        gaps = (Pause(before, after) for before, after in pairwise(around))
        longest = max(gaps, key=lambda pause: pause.length_ms, default=None)
        found += [longest] if longest is not None else []
    return found


def parked_pauses(records: PoolDrillRecords) -> list[Pause]:
    """One for each time that a stream went on in its model's next turn."""
    gone = {name: away(records, name) for name in records.models}
    return [
        pause
        for each in records.base.exchanges
        for pause in pauses_in(each, gone.get(each.model, ()))
    ]


def failover_pauses(records: PoolDrillRecords) -> list[Pause]:
    """Of streams that went on at their model's shadow, when the engine that stood for it died."""
    found = []
    for kill in records.kills:
        failover = kill.failover
        if failover is None or failover.new_engine in (None, kill.engine):
            continue
        until_ms = (kill.back_ms or kill.killed_ms) + 1.0
        pauses = [
            pause_at(failover, until_ms, each)
            for each in records.base.exchanges
            if each.model == kill.model
        ]
        found += [pause for pause in pauses if pause is not None]
    return found


# ------------------------------------------------------------------ models, kills, problems


def numbered(records: PoolDrillRecords) -> list[tuple[int, PoolKill]]:
    return list(enumerate(records.kills, 1))


def outcome_document(number: int, kill: PoolKill, records: PoolDrillRecords) -> dict[str, Any]:
    """One kill, as the JSON document has it."""
    took_ms = kill.took_ms
    return {
        "number": number,
        "target": kill.target,
        "engine": kill.engine,
        "model": kill.model,
        "phase": kill.phase,
        "at_ms": round(kill.killed_ms - records.began_ms, 1),
        "outcome": kill.outcome,
        "back_ms": None if took_ms is None else round(took_ms, 1),
    }


def _model(
    name: str,
    outcomes: Sequence[tuple[Exchange, Outcome]],
    records: PoolDrillRecords,
    bounds: Bounds,
) -> dict[str, Any]:
    mine = [(each, outcome) for each, outcome in outcomes if each.model == name]
    shares = [bounds.share(name, e.sent_ms, e.sent_ms + wait_of(e)) for e, _ in mine]
    return {
        "answered": sum(outcome is Outcome.OK for _, outcome in mine),
        "switches": sum(each.model == name for each in records.switches),
        "longest_wait_ms": round(max((wait_of(each) for each, _ in mine), default=0.0), 1),
        "longest_wait_of_bound": _longest(shares),
    }


def stray_deaths(records: PoolDrillRecords) -> list[EngineDeath]:
    """Deaths of engines that neither the drill nor the pool wanted."""
    killed = {kill.failover.incarnation for kill in records.kills if kill.failover is not None}
    return [
        death
        for death in records.base.deaths
        if death.incarnation not in killed and death.cause not in WANTED_DEATHS
    ]


def _problems(
    report: PoolDrillReport,
    records: PoolDrillRecords,
    counts: Mapping[Outcome, int],
    kills_wanted: int,
    switches_wanted: int,
) -> list[str]:
    problems = [
        f"{death.engine} died although nothing had been killed: {death.message}"
        for death in stray_deaths(records)
    ]
    if report.kills < kills_wanted:
        problems.append(f"only {report.kills} of {kills_wanted} kills were made")
    if report.switches < switches_wanted:
        problems.append(f"only {report.switches} of {switches_wanted} switches were seen")
    back = [kill.engine or kill.target for kill in records.kills if kill.back_ms is None]
    if back:
        problems.append(f"{', '.join(back)} did not come back")
    if counts[Outcome.HUNG]:
        problems.append(f"{counts[Outcome.HUNG]} requests got neither an answer nor an error")
    starved = [name for name, about in report.models.items() if not about["answered"]]
    if starved:
        problems.append(f"{', '.join(starved)} answered no request in full")
    if not records.bounds:
        problems.append("the pool stated no bound, so no wait could be compared with it")
    bad = next(
        (each for each in records.base.exchanges if pool_outcome(each, records) in LOST), None
    )
    if bad is not None:
        problems.append(f"a request to {bad.model} was lost ({bad.detail})")
    return [*problems, *burn_problems(records.base)]
