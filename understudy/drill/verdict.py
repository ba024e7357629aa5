"""The verdict of a drill: records in, report and its text out. Nothing here measures or waits.

`counted` has what must not be found and is a number in the document, `problems_of` everything else
that fails a drill. A drill that measured nothing must not look like one that found nothing, so
these also cover what could not be checked.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

from plumbing.text import table
from understudy.drill.outcomes import (
    Spread,
    doubled_pieces,
    failover_pauses,
    first_answers,
    outcome_of,
    pauses_at_pod,
    pauses_in,
    phases_of,
    spread,
    times_away,
)
from understudy.drill.records import PHASES, Exchange, Kill, Outcome, Records, StatedBound
from understudy.drill.targets import GMS, GMS_SUPERVISOR, POOL
from understudy.host import machine

LOST_STATES = ("silent", "gone")  # of a pod, as its front says
CUT_CODE = "pool.cut"  # the marked error of a request that could neither finish nor be parked

# Causes of deaths that a pool wants. A supervisor that exits may be gone before its last event is
# read.
WANTED_BY_POOL = frozenset({"", "asked_to_be_cold"})
# What an engine was loading is lost with its memory service, and so the engine begins anew.
OF_GMS_KILL = frozenset({"engine.gms_lost"})

IN_POOL, IN_FLEET = "pool", "fleet"  # the modes of their drills


class Evidence:
    """The records of a drill, with what follows from them."""

    def __init__(self, records: Records, kills_wanted: int) -> None:
        self.records, self.is_pool = records, records.mode == IN_POOL
        self.is_fleet = records.mode == IN_FLEET
        self.kills_wanted = kills_wanted
        self.outcomes = [(each, outcome_of(each, records)) for each in records.exchanges]
        self.bounds = Bounds(records.bounds)
        kills = records.engine_kills
        firsts = first_answers(kills, records.exchanges)
        # Each kill of an engine's process, and the first answer after it.
        self.failovers = list(zip(kills, firsts, strict=True))
        self.failovers_ms = [
            first.first_token_ms - kill.killed_ms
            for kill, first in self.failovers
            if first is not None and first.first_token_ms is not None
        ]

    def of(self, *outcomes: Outcome) -> list[Exchange]:
        return [exchange for exchange, outcome in self.outcomes if outcome in outcomes]

    @cached_property
    def parked(self) -> list[float]:
        """How long each stream paused that continued in its model's next turn."""
        away = {name: times_away(self.records.moments, name) for name in self.records.models}
        found = (pauses_in(it, away.get(it.model, ())) for it in self.records.exchanges)
        return [pause_ms for pauses in found for pause_ms in pauses]

    @cached_property
    def waits(self) -> list[tuple[Exchange, float]]:
        """Each request's time until its first text, or until its end if it got none."""
        return [
            (each, (each.ended_ms if each.first_token_ms is None else each.first_token_ms))
            for each in self.records.exchanges
        ]

    def longest_wait(self, model: str | None = None) -> float | None:
        """The longest wait, as a share of the bound that the pool stated for it."""
        return _longest(
            self.bounds.share(each.model, each.sent_ms, until_ms)
            for each, until_ms in self.waits
            if model in (None, each.model)
        )

    def longest_pause(self) -> float | None:
        return _longest(
            self.bounds.share(each.model, *max(pairwise(each.text_ms), key=lambda g: g[1] - g[0]))
            for each in self.records.exchanges
            if len(each.text_ms) > 1
        )


class Bounds:
    """The bounds that the pool stated, by model and time."""

    def __init__(self, stated: Iterable[StatedBound]) -> None:
        self._stated: dict[str, list[StatedBound]] = {}
        for each in sorted(stated, key=lambda one: one.at_ms):
            self._stated.setdefault(each.model, []).append(each)

    def share(self, model: str, from_ms: float, to_ms: float) -> float | None:
        """A time of waiting, divided by the largest bound that was stated from just before it until
        it was over; None: none was, or there is no bound."""
        stated = self._stated.get(model, [])
        first = max(0, bisect_right(stated, from_ms, key=lambda each: each.at_ms) - 1)
        last = bisect_right(stated, to_ms, key=lambda each: each.at_ms)
        found = [each.bound_ms for each in stated[first : max(last, first + 1)] if each.bound_ms]
        return (to_ms - from_ms) / max(found) if found else None


def _longest(shares: Iterable[float | None]) -> float | None:
    known = [each for each in shares if each is not None]
    return round(max(known), 4) if known else None


# ------------------------------------------------------------------ the rules


def counted(evidence: Evidence) -> dict[str, Sequence[object]]:
    """What must not be found, by the keys of the document. A pool's cut is counted apart, whether a
    client saw it as a status or in its stream."""
    records = evidence.records
    expected, exchanges = records.expected, records.exchanges

    def of(*outcomes: Outcome) -> list[str]:
        found = evidence.of(*outcomes)
        found = [each for each in found if not (evidence.is_pool and CUT_CODE in each.detail)]
        return [f"{each.model}: {each.detail}" if each.model else each.detail for each in found]

    doubled = sum(doubled_pieces(each, expected.get(each.prompt)) for each in exchanges)
    lost: dict[str, Sequence[object]] = {"lost_in_flight": of(Outcome.LOST, Outcome.BROKEN)}
    if evidence.is_pool:
        cut = [each for each in exchanges if CUT_CODE in each.detail]
        lost = {"lost": of(Outcome.LOST), "cut": cut}
    return {
        **lost,
        "broken_streams": of(Outcome.BROKEN),
        "refused": of(Outcome.REFUSED),
        "wrong_tokens": of(Outcome.WRONG),
        "doubled_tokens": range(doubled),
        **({} if evidence.is_fleet else {"double_active": records.overlaps}),
        "false_deaths": _lost_pods(records) if evidence.is_fleet else _false_deaths(records),
    }


def _lost_pods(records: Records) -> list[str]:
    """Pods that the front took for lost although nothing was done to them. A pod that is killed is
    ready again before the next kill."""
    return [
        f"{each.part} was {each.state}, and nothing had been done to it"
        for each in records.moments
        if each.part in records.pods
        and each.state in LOST_STATES
        and not any(
            kill.pod in ("", each.part)
            and kill.killed_ms <= each.at_ms <= (kill.back_ms or math.inf)
            for kill in records.kills
        )
    ]


def _false_deaths(records: Records) -> list[str]:
    """Deaths of engines that neither the drill nor the pool wanted."""
    killed = {kill.incarnation for kill in records.engine_kills}
    wanted = WANTED_BY_POOL if records.models else frozenset()
    if any(kill.target in (GMS, GMS_SUPERVISOR) for kill in records.kills):
        wanted |= OF_GMS_KILL
    return [
        f"{death.engine} died although nothing had been killed: {death.message}"
        for death in records.deaths
        if death.incarnation not in killed and death.cause not in wanted
    ]


def problems_of(
    evidence: Evidence, counts: Mapping[str, Sequence[object]]
) -> Iterator[tuple[str, str]]:
    """Why the drill did not pass: the name of each rule that is broken, and a sentence."""
    records = evidence.records
    for name, noun in {
        "lost": "requests were lost",
        "lost_in_flight": "requests were lost",
        "broken_streams": "streams were broken",
    }.items():
        if found := counts.get(name):
            yield name, f"{len(found)} {noun}, which the gateway had to continue ({found[0]})"
    for name in ("double_active", "false_deaths"):
        yield from ((name, str(each)) for each in counts.get(name, ()))
    if hung := evidence.of(Outcome.HUNG):
        yield "hung", f"{len(hung)} requests got neither an answer nor an error"
    answered = {each.model for each in evidence.of(Outcome.OK)}
    if starved := [name for name in records.models if name not in answered]:
        yield "starved", f"{', '.join(starved)} answered no request in full"
    if not answered:
        yield "starved", "the pod answered no request in full"
    refused = evidence.of(Outcome.REFUSED)
    if records.url and refused:
        of_all = f"{len(refused)} of {len(evidence.outcomes)} requests"
        first = f"status {refused[0].status}, {refused[0].detail or refused[0].end}"
        yield "outside", f"{records.url} refused {of_all} ({first})"
    yield from _left_undone(evidence)
    if evidence.is_pool and not records.bounds:
        yield "no bound", "the pool stated no bound, so no wait could be compared"
    for name, what, share in (
        ("late", "wait", evidence.longest_wait()),
        ("paused", "pause", evidence.longest_pause()),
    ):
        if share is not None and share > 1.0:
            yield name, f"the longest {what} took {share:.1%} of its bound"


def _left_undone(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """What was to happen, and did not, or not as often."""
    records = evidence.records
    kills = len(evidence.failovers)
    wanted = [("kills", len(records.kills), evidence.kills_wanted, "kills were made")]
    if not (evidence.is_pool or evidence.is_fleet):
        checked = "grants could be checked against the old processes"
        wanted += [
            ("takeovers", len(evidence.failovers_ms), kills, "kills were followed by an answer"),
            ("unchecked", records.grants_checked, kills, checked),
        ]
    for name, made, all_of_them, what in wanted:
        if made < all_of_them:
            yield name, f"only {made} of {all_of_them} {what}"
    # An engine with a standby is judged by its successor.
    judged = [it for it in records.kills if it.engine is None or it.pod or evidence.is_pool]
    if away := [kill.victim for kill in judged if kill.back_ms is None]:
        yield "not back", f"{', '.join(away)} did not come back"


# ------------------------------------------------------------------ the report


@dataclass(slots=True)
class DrillReport:
    """What a drill found: the values of its JSON document, by key.

    `evidence`: what it is about. `faults`: the counts that must be zero; `problems`: why it did not
    pass, as sentences.
    `lost_in_flight` includes `broken_streams`, and `wrong_tokens` the answers with doubled ones.
    """

    evidence: Evidence
    values: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    is_interrupted: bool = False

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    @property
    def passed(self) -> bool:
        return not any(self.faults.values()) and not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `understudy drill --json`."""
        document = {"passed": self.passed, "problems": self.problems, **self.values}
        return document | {"machine": machine()}


def judge(records: Records, kills_wanted: int, backend: str | None = None) -> DrillReport:
    """The report of a whole drill of a pod with this backend."""
    evidence = Evidence(records, kills_wanted)
    counts, by_kill = counted(evidence), [pauses_at_pod(each, records) for each in records.kills]
    pauses = list(chain(*by_kill)) if evidence.is_fleet else failover_pauses(records)
    pause_ms = spread(pauses)
    faults = {name: len(found) for name, found in counts.items()}
    values: dict[str, Any] = {
        "mode": records.mode,
        "backend": backend or "reference",
        "requests": len(records.exchanges),
        "kills": len(records.kills),
        "killed": dict(Counter(kill.target for kill in records.kills)),
        **faults,
        "lost_in_gateway": len(evidence.of(Outcome.LOST_IN_GATEWAY)),
        "resumed": len(pauses),
        "lasted_s": round(records.lasted_s, 3),
    }
    if evidence.is_fleet:
        values |= _fleet_values(records, pause_ms, by_kill)
    else:
        make = _pool_values if evidence.is_pool else _values
        values |= make(evidence, pause_ms)
    problems = [sentence for _, sentence in problems_of(evidence, counts)]
    return DrillReport(evidence, values, problems, faults)


def _values(evidence: Evidence, pause_ms: Spread) -> dict[str, Any]:
    """Of a pod of one model."""
    records, phases = evidence.records, [phases_of(*each) for each in evidence.failovers]
    found = {
        "failover_ms": spread(evidence.failovers_ms),
        "pause_ms": pause_ms,
        "phases_ms": {
            name: spread(each[name] for each in phases if name in each) for name in PHASES
        },
        **kv_share(records.kills),
    }
    if records.url:
        found["url"] = records.url
    if back := [kill.took_ms for kill in records.kills if kill.target == GMS and kill.took_ms]:
        found["gms"] = {"recovery_ms": spread(back)}
    return found


def _fleet_values(
    records: Records, pause_ms: Spread, by_kill: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """`by_kill`: the pauses of the streams that each kill hit."""
    pairs = list(zip(records.kills, by_kill, strict=True))
    targets = dict.fromkeys(each.target for each in records.kills)
    return {
        "pods": len(records.pods),
        "pause_ms": pause_ms,
        "pauses_ms": {
            name: spread(ms for kill, pauses in pairs if kill.target == name for ms in pauses)
            for name in targets
        },
        "outcomes": [
            {
                **_outcome(number, kill, records),
                "pod": kill.pod,
                "streams": kill.streams,
                "paused": len(pauses),
                "longest_pause_ms": round(max(pauses), 3) if pauses else None,
            }
            for number, (kill, pauses) in enumerate(pairs, 1)
        ],
    }


def kv_share(kills: Iterable[Kill]) -> dict[str, Any]:
    """The blocks of the KV cache that survived their engines, over the kills whose successor
    reported what it adopted. What an engine published after its last status counts if it was
    adopted. `adopted_share` is None if nothing was published."""
    known = [kill for kill in kills if kill.adopted_blocks is not None]
    adopted = sum(kill.adopted_blocks or 0 for kill in known)
    published = sum(max(kill.kept_blocks, kill.adopted_blocks or 0) for kill in known)
    share = round(adopted / published, 4) if published else None
    return {"adopted_blocks": adopted, "published_blocks": published, "adopted_share": share}


def _pool_values(evidence: Evidence, pause_ms: Spread) -> dict[str, Any]:
    records = evidence.records
    back = [kill.took_ms for kill in records.kills if kill.target == POOL and kill.took_ms]
    return {
        "switches": len(records.switches),
        "parked": len(evidence.parked),
        "longest_wait_of_bound": evidence.longest_wait(),
        "longest_pause_of_bound": evidence.longest_pause(),
        "models": {name: _model_values(name, evidence) for name in records.models},
        "outcomes": [
            {
                **_outcome(number, kill, records),
                "engine": kill.engine,
                "model": kill.model,
                "phase": kill.phase,
                "outcome": kill.result,
            }
            for number, kill in enumerate(records.kills, 1)
        ],
        "not_reached": list(records.not_reached),
        "switch_ms": spread(each.length_ms for each in records.switches),
        "wait_ms": spread(until_ms - each.sent_ms for each, until_ms in evidence.waits),
        "pause_ms": spread(evidence.parked),
        "failover_pause_ms": pause_ms,
        "pool_back_ms": spread(back),
    }


def _model_values(name: str, evidence: Evidence) -> dict[str, Any]:
    waits = [until_ms - e.sent_ms for e, until_ms in evidence.waits if e.model == name]
    return {
        "answered": sum(each.model == name for each in evidence.of(Outcome.OK)),
        "switches": sum(each.model == name for each in evidence.records.switches),
        "longest_wait_ms": round(max(waits, default=0.0), 1),
        "longest_wait_of_bound": evidence.longest_wait(name),
    }


def _outcome(number: int, kill: Kill, records: Records) -> dict[str, Any]:
    """What each kill of a pool and of a fleet has in the document."""
    return {
        "number": number,
        "target": kill.target,
        "at_ms": round(kill.killed_ms - records.began_ms, 1),
        "back_ms": None if kill.took_ms is None else round(kill.took_ms, 1),
    }


# ------------------------------------------------------------------ the text

PERCENTILES, WIDTH = ("p50", "p99", "max"), 9


def text_of(report: DrillReport) -> list[str]:
    """The document as text: a table of the times that were measured, and a line for each other
    figure."""
    about, figures = machine(), dict(_figures(report.values))
    out = [f"{_title(report)} on {about['cpus']} CPUs ({about['cpu']})"]
    rows = [("milliseconds", *(each.rjust(WIDTH) for each in PERCENTILES))]
    for name, times in figures.items():
        if isinstance(times, Mapping) and times["p50"] is not None:
            rows.append((_words(name), *(f"{times[each]:{WIDTH}.1f}" for each in PERCENTILES)))
    single = {name: value for name, value in figures.items() if not isinstance(value, Mapping)}
    out += table(rows)
    out += table([(_words(name), "-" if it is None else str(it)) for name, it in single.items()])
    missed = report.values.get("not_reached", ())
    out += [f"not made: {each}, as no model came there in time" for each in missed]
    out += [f"problem: {each}" for each in report.problems]
    failed = "interrupted" if report.is_interrupted else "FAILED"
    return [*out, "passed" if report.passed else failed]


def _figures(values: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Each figure by its place in the document; a spread is one."""
    for key, value in values.items():
        if isinstance(value, Mapping) and "p50" not in value:
            yield from _figures(value, f"{place}{key} ")
        elif not isinstance(value, list):
            yield place + key, value


def _words(name: str) -> str:
    return name.replace("_ms", "").replace("_", " ")


def _title(report: DrillReport) -> str:
    found = report.values
    mode: str = report.evidence.records.mode
    what = {IN_POOL: "a pool of models", IN_FLEET: f"a fleet of {found.get('pods')} pods"}
    return f"drill of {what.get(mode, 'a pod')}, {found['backend']} backend,"
