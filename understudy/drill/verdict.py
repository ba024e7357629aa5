"""The verdict of a drill: records in, report out. Pure; nothing here measures or waits.

A stream that was cut is broken; if its text before the cut is not a prefix of the expected answer,
it is wrong. Broken and lost requests are expected in direct mode, and behind a gateway only where
the gateway's own process was killed. In direct mode, text of an older grant that arrives after text
of a newer one means that two engines served. A drill that measured nothing must not look like one
that found nothing: whatever could not be checked is a problem, and a drill with problems has
failed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from understudy.drill.kept import COMPARED, KvShare, kv_share
from understudy.drill.problems import (
    burn_problems,
    false_deaths,
    outside_problems,
    part_problems,
    problems_of,
    upgrade_problems,
)
from understudy.drill.records import (
    GMS,
    PARTS,
    PHASES,
    BurnUse,
    End,
    EngineKill,
    Exchange,
    MemoryUse,
    Outcome,
    Records,
    Upgrade,
)
from understudy.drill.streams import blamed, doubled_pieces, pauses_of

UNAVAILABLE = frozenset({429, 503})  # the server refused for now

# Attributes of a report that are keys of its JSON document as they are.
IN_DOCUMENT = (
    *("passed", "problems", "requests", "kills", "killed"),
    *("refused", "wrong_tokens", "double_active", "false_deaths", "lost_in_flight", "lasted_s"),
    *("mode", "broken_streams", "doubled_tokens", "resumed", "lost_in_gateway"),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """p50, p99 and max of a sample in milliseconds; None where nothing was measured."""

    p50: float | None
    p99: float | None
    max: float | None

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)


@dataclass(slots=True)
class DrillReport:
    """What a drill found. `problems`: why it did not pass, as sentences.

    `lost_in_flight` includes `broken_streams`, and `wrong_tokens` the answers with doubled ones.
    """

    kills: int
    killed: dict[str, int]
    refused: int
    wrong_tokens: int
    double_active: int
    lost_in_flight: int
    failover_ms: Spread
    phases_ms: dict[str, Spread]
    false_deaths: int = 0
    lasted_s: float = 0.0
    requests: int = 0
    failovers: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    recovery_ms: Spread | None = None
    memory: MemoryUse | None = None
    upgrade: Upgrade | None = None
    upgrade_pause_ms: float | None = None
    burn: BurnUse | None = None
    is_direct: bool = True
    url: str = ""
    broken_streams: int = 0
    doubled_tokens: int = 0
    resumed: int = 0
    lost_in_gateway: int = 0
    pause_ms: Spread = Spread(None, None, None)
    kv: KvShare = field(default_factory=KvShare)
    without_adoption: DrillReport | None = None  # the same drill of a pod that adopts no KV block

    @property
    def mode(self) -> str:
        return "direct" if self.is_direct else "gateway"

    @property
    def passed(self) -> bool:
        faults = self.refused + self.wrong_tokens + self.double_active + self.false_deaths
        faults += 0 if self.is_direct else self.lost_in_flight
        return not faults and not self.problems

    def to_dict(self, backend: str, machine: dict[str, Any]) -> dict[str, Any]:
        """The one JSON document of `understudy drill --json`; `gms` if its servers were killed."""
        document = {name: getattr(self, name) for name in IN_DOCUMENT} | {
            "failover_ms": self.failover_ms.to_dict(),
            "phases_ms": {name: spread.to_dict() for name, spread in self.phases_ms.items()},
            "pause_ms": self.pause_ms.to_dict(),
            **self.kv.to_dict(),
            "backend": backend,
            "machine": machine,
        }
        if self.url:
            document["url"] = self.url
        if self.memory is not None and self.recovery_ms is not None:
            document["gms"] = {
                "recovery_ms": self.recovery_ms.to_dict(),
                "committed_bytes": self.memory.committed_bytes,
                "peak_physical_bytes": self.memory.peak_bytes,
            }
        if self.without_adoption is not None:
            other = self.without_adoption.to_dict(backend, machine)
            document["without_adoption"] = {name: other[name] for name in COMPARED}
        if self.burn is not None:
            document["burn"] = msgspec.structs.asdict(self.burn)
        if self.upgrade is not None:
            document["upgrade"] = {
                "setting": self.upgrade.setting,
                "engines": self.upgrade.engines,
                "from": self.upgrade.source,
                "to": self.upgrade.target,
                "switchover_ms": self.upgrade.switchover_ms,
                "pause_ms": self.upgrade_pause_ms,
            }
        return document


def judge(records: Records, kills_wanted: int) -> DrillReport:
    """The report of a whole drill."""
    outcomes = [(exchange, outcome_of(exchange, records)) for exchange in records.exchanges]
    pauses = pauses_of(records)
    counts = dict.fromkeys(Outcome, 0)
    for _, outcome in outcomes:
        counts[outcome] += 1
    serving = first_answers(records.kills, records.exchanges)
    failovers = [
        first.first_token_ms - kill.killed_ms
        for kill, first in zip(records.kills, serving, strict=True)
        if first is not None and first.first_token_ms is not None
    ]
    phases = [phases_of(kill, first) for kill, first in zip(records.kills, serving, strict=True)]
    recoveries = [
        kill.recovered_ms - kill.killed_ms
        for kill in records.memory_kills
        if kill.recovered_ms is not None
    ]
    return DrillReport(
        kills=len(records.kills) + len(records.memory_kills) + len(records.part_kills),
        killed=_killed(records),
        refused=counts[Outcome.REFUSED],
        wrong_tokens=counts[Outcome.WRONG],
        double_active=len(records.overlaps)
        + (len(served_out_of_order(records.exchanges)) if records.is_direct else 0),
        false_deaths=len(false_deaths(records)),
        lasted_s=round(records.lasted_s, 3),
        lost_in_flight=counts[Outcome.LOST] + counts[Outcome.BROKEN],
        failover_ms=spread(failovers),
        phases_ms={
            name: spread(phase[name] for phase in phases if name in phase) for name in PHASES
        },
        requests=len(records.exchanges),
        failovers=failovers,
        problems=[
            *problems_of(records, outcomes, failovers, kills_wanted),
            *part_problems(records),
            *burn_problems(records),
            *upgrade_problems(records, pause_of(records.upgrade, records.exchanges)),
            *outside_problems(records, outcomes),
        ],
        recovery_ms=spread(recoveries) if records.memory is not None else None,
        memory=records.memory,
        upgrade=records.upgrade,
        upgrade_pause_ms=pause_of(records.upgrade, records.exchanges),
        burn=records.burn,
        is_direct=records.is_direct,
        url=records.url,
        broken_streams=counts[Outcome.BROKEN],
        doubled_tokens=sum(
            doubled_pieces(each, records.expected.get(each.prompt)) for each in records.exchanges
        ),
        resumed=len(pauses),
        lost_in_gateway=counts[Outcome.LOST_IN_GATEWAY],
        pause_ms=spread(pause.length_ms for pause in pauses),
        kv=kv_share(records.kills),
    )


def pause_of(upgrade: Upgrade | None, exchanges: Sequence[Exchange]) -> float | None:
    """Milliseconds from the last text under the old grant to the first under the new one."""
    if upgrade is None or not upgrade.new_token:
        return None
    last_ms = [e.last_token_ms for e in exchanges if e.token == upgrade.old_token]
    first_ms = [e.first_token_ms for e in exchanges if e.token == upgrade.new_token]
    after = min((ms for ms in first_ms if ms), default=math.inf)
    # Behind a gateway, answers that began under the old grant go on under the new one.
    before = max((ms for ms in last_ms if ms and ms < after), default=-math.inf)
    return round(after - before, 3) if math.isfinite(after - before) else None


def outcome_of(exchange: Exchange, records: Records) -> Outcome:
    """The outcome of one exchange of these records."""
    return blamed(exchange, classify(exchange, records.expected), records)


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


def first_answer(kill: EngineKill, exchanges: Iterable[Exchange]) -> Exchange | None:
    """The request after the kill that got the first token under a newer grant."""
    served = [
        exchange
        for exchange in exchanges
        if exchange.sent_ms >= kill.killed_ms
        and exchange.first_token_ms is not None
        and exchange.token is not None
        and exchange.token > kill.old_token
    ]
    return min(served, key=lambda exchange: exchange.first_token_ms or math.inf, default=None)


def first_answers(
    kills: Sequence[EngineKill], exchanges: Iterable[Exchange]
) -> list[Exchange | None]:
    """`first_answer` of every kill, among the requests before the next kill."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.sent_ms)
    starts = [bisect_left(ordered, kill.killed_ms, key=lambda e: e.sent_ms) for kill in kills]
    ends = [*starts, len(ordered)][1:]
    return [
        first_answer(kill, ordered[start:end])
        for kill, start, end in zip(kills, starts, ends, strict=True)
    ]


def moments_of(kill: EngineKill, first: Exchange | None) -> dict[str, float | None]:
    """When each phase of one failover ended, by name; None: not observed."""
    return {
        "killed": kill.killed_ms,
        "detected": kill.detected_ms,
        "fenced": kill.fenced_ms,
        "granted": kill.granted_ms,
        "active": kill.active_ms,
        "first token": first.first_token_ms if first is not None else None,
    }


def phases_of(kill: EngineKill, first: Exchange | None) -> dict[str, float]:
    """Milliseconds of each phase of one failover whose start and end were observed.

    Clamped at zero: two processes may see the same instant in either order.
    """
    moments = list(moments_of(kill, first).values())
    return {
        name: max(0.0, after - before)
        for name, before, after in zip(PHASES, moments, moments[1:], strict=False)
        if before is not None and after is not None
    }


def served_out_of_order(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Answers under an older grant with text after the first text under a newer grant."""
    answered = [
        (exchange.token, exchange)
        for exchange in exchanges
        if exchange.token is not None and exchange.first_token_ms is not None
    ]
    answered.sort(key=lambda pair: pair[0], reverse=True)  # newest grant first
    late = []
    newest_first_turn = own_first_turn = math.inf  # of all newer grants; of this grant so far
    grant = None
    for token, exchange in answered:
        if token != grant:
            grant, newest_first_turn = token, min(newest_first_turn, own_first_turn)
        if exchange.last_turn > newest_first_turn:
            late.append(exchange)
        own_first_turn = min(own_first_turn, exchange.first_turn)
    return late


def spread(sample: Iterable[float]) -> Spread:
    """Percentiles by nearest rank, which never interpolates."""
    ordered = sorted(sample)
    if not ordered:
        return Spread(None, None, None)

    def rank(percent: float) -> float:
        return round(ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)], 3)

    return Spread(rank(50), rank(99), round(ordered[-1], 3))


def _killed(records: Records) -> dict[str, int]:
    counts = dict.fromkeys(records.targets, 0)
    for kill in records.kills:
        counts[kill.target] = counts.get(kill.target, 0) + 1
    parts = Counter(kill.target for kill in records.part_kills)
    parts[GMS] += len(records.memory_kills)
    is_drilled = {GMS: records.memory is not None}
    return counts | {
        part: parts[part] for part in PARTS if parts[part] or is_drilled.get(part, False)
    }
