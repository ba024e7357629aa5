"""The report page: one self-contained HTML file with its data embedded as JSON.

`page_data` makes the data from records and verdict, decides what is left out when there is too
much, and counts it. Times are milliseconds: of a kill since that kill, of everything else since the
drill's first request. In the file `<` is escaped, so no data can be taken for markup.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.files import write_atomic
from understudy.drill.outcomes import (
    first_answers,
    moments_of,
    outcome_of,
    pause_at,
    pauses_in,
    phases_of,
    spread,
    times_away,
)
from understudy.drill.records import LOCK, PHASES, Exchange, Kill, Moment, Outcome, Records
from understudy.drill.verdict import DrillReport, pool_kills
from understudy.host import ResourceUsage

TEMPLATE = Path(__file__).parent / "page.html"
PLACE = "{{data}}"
MODE = 0o644  # meant to be shared
SCHEMA = 1
DOTS_MAX = 5000  # more than a chart has room for; some 150 KiB
KILLS_MAX = 500  # with a timeline of their own, at some 3 KiB each
REQUESTS_PER_KILL_MAX = 24  # rows of one timeline; a drill has some four clients
BEFORE_KILL = 0.12  # share of a timeline before its kill
AFTER_LAST = 1.08  # of its length: room for the last label
LENGTH_MIN_MS = 5.0
LENGTH_UNKNOWN_MS = 1000.0  # of a timeline without events after the kill
LOOK_BACK_MS = 10_000.0  # older requests are not considered
SPANS_MAX = 20_000  # of all models: some 1.5 MiB
LINES_MAX = 6_000  # requests in the lanes of all models: some 400 KiB
PARTS_SEEN_WITHIN = 1000  # moments: every part reports its state when it is first watched

Outcomes = Mapping[int, Outcome]  # of each exchange, by its id()


@dataclass(frozen=True, slots=True)
class SeenKill:
    """A kill, the first request answered after it, and the time of the next kill."""

    kill: Kill
    first: Exchange | None
    until_ms: float
    is_direct: bool = True

    @property
    def served_ms(self) -> float | None:
        return self.first.first_token_ms if self.first is not None else None

    def timeline_ms(self) -> tuple[float, float]:
        """Start and end of its timeline, relative to the kill."""
        kill = self.kill
        moments = (kill.detected_ms, kill.fenced_ms, kill.granted_ms, kill.active_ms)
        seen = [*moments, self.served_ms, *kill.deaths_ms.values()]
        known = [moment - kill.killed_ms for moment in seen if moment is not None]
        length_ms = max(LENGTH_MIN_MS, *known) if known else LENGTH_UNKNOWN_MS
        end_ms = min(AFTER_LAST * length_ms, self.until_ms - kill.killed_ms)
        return -BEFORE_KILL * length_ms, end_ms


def page_data(
    records: Records,
    report: DrillReport,
    backend: str,
    machine: Mapping[str, Any],
    usages: Mapping[str, tuple[ResourceUsage, ResourceUsage]],
    made_at: str,
) -> dict[str, Any]:
    """The whole document. A pool's kills are shown in its models' lanes, all others one by one."""
    ordered = sorted(records.exchanges, key=lambda each: each.sent_ms)
    outcomes = {id(each): outcome_of(each, records) for each in ordered}
    began_ms = _began_ms(records, ordered)
    parts = _part_kills(records, began_ms)
    kills = [] if records.models else _seen_kills(records, ordered)
    moments = sorted(records.moments, key=lambda each: each.at_ms)
    document = {
        "schema": SCHEMA,
        "made_at": made_at,
        "passed": report.passed,
        "problems": report.problems,
        "report": report.to_dict(backend, dict(machine)),
        "usages": {
            name: {"before": asdict(before), "after": asdict(after)}
            for name, (before, after) in usages.items()
        },
        "kills_left_out": len(kills[KILLS_MAX:]),
        "kills": [
            _kill(number, seen, began_ms, _around(seen, ordered, outcomes), moments)
            for number, seen in enumerate(kills[:KILLS_MAX], 1)
        ],
        "part_kills": parts,
        "back_ms": spread(part["back_ms"] for part in parts if part["back_ms"]).to_dict(),
        "requests": dots_of(ordered, outcomes, began_ms),
    }
    if records.models:
        models = [_model(name, records, ordered, outcomes) for name in records.models]
        length_ms = 1000 * records.lasted_s
        document["pool"] = {"length_ms": length_ms, "kills": pool_kills(records), "models": models}
    return document


def _seen_kills(records: Records, ordered: Sequence[Exchange]) -> list[SeenKill]:
    kills = records.engine_kills
    firsts = first_answers(kills, ordered)
    ends_ms = [*(kill.killed_ms for kill in kills[1:]), math.inf]
    return [
        SeenKill(kill, first, end_ms, records.is_direct)
        for kill, first, end_ms in zip(kills, firsts, ends_ms, strict=False)
    ]


def lanes(
    moments: Sequence[Moment], kill: Kill, from_ms: float, to_ms: float
) -> dict[str, list[list[Any]]]:
    """The states of each part, relative to the kill: `[from, to, state, note]`.

    `moments` are in order; the first state of a part may come from before the timeline.
    """
    start = _index(moments, kill.killed_ms + from_ms)
    end = _index(moments, kill.killed_ms + to_ms)
    found: dict[str, list[list[Any]]] = {}
    for moment in (*_last_before(moments, start), *moments[start:end]):
        at_ms = _round(max(moment.at_ms - kill.killed_ms, from_ms))
        lane = found.setdefault(moment.part, [])
        if lane:
            lane[-1][1] = at_ms
        lane.append([at_ms, _round(to_ms), moment.state, moment.note])
    engines = sorted(name for name in found if name != LOCK)
    return {name: found[name] for name in (*engines, LOCK) if name in found}


def _last_before(moments: Sequence[Moment], start: int) -> Iterable[Moment]:
    """The last moment of every part before the one at `start`."""
    parts = {moment.part for moment in islice(moments, PARTS_SEEN_WITHIN)}
    last: dict[str, Moment] = {}
    for number in range(start - 1, -1, -1):
        last.setdefault(moments[number].part, moments[number])
        if len(last) >= len(parts):
            break
    return last.values()


def _index(moments: Sequence[Moment], at_ms: float) -> int:
    return bisect_left(moments, at_ms, key=lambda moment: moment.at_ms)


def _kill(
    number: int,
    seen: SeenKill,
    began_ms: float,
    requests: list[list[Any]],
    moments: Sequence[Moment],
) -> dict[str, Any]:
    kill, (from_ms, to_ms) = seen.kill, seen.timeline_ms()
    phases = phases_of(kill, seen.first)
    return {
        "number": number,
        "target": kill.target,
        "engine": kill.engine,
        "new_engine": kill.new_engine,
        "new_token": kill.new_token,
        "at_ms": _round(kill.killed_ms - began_ms),
        "failover_ms": _since(kill, seen.served_ms),
        "phases_ms": {name: _round(phases[name]) for name in PHASES if name in phases},
        "moments_ms": {
            name: _since(kill, at_ms) for name, at_ms in moments_of(kill, seen.first).items()
        },
        "from_ms": _round(from_ms),
        "to_ms": _round(to_ms),
        "deaths_ms": {name: _since(kill, at_ms) for name, at_ms in kill.deaths_ms.items()},
        "lanes": lanes(moments, kill, from_ms, to_ms),
        "requests": requests,
    }


def _around(seen: SeenKill, ordered: Sequence[Exchange], outcomes: Outcomes) -> list[list[Any]]:
    """The requests of a timeline, `[sent, first token, end, outcome, engine, pause]`. `pause`: from
    when to when a stream paused that went on at another engine, or null.

    If there are too many, failed ones and those nearest to the kill are kept.
    """
    kill = seen.kill
    from_ms, to_ms = (kill.killed_ms + each for each in seen.timeline_ms())
    start = bisect_left(ordered, from_ms - LOOK_BACK_MS, key=lambda each: each.sent_ms)
    end = bisect_left(ordered, to_ms, key=lambda each: each.sent_ms)
    found = [each for each in ordered[start:end] if each.ended_ms >= from_ms]
    found.sort(key=lambda e: (outcomes[id(e)] is Outcome.OK, abs(e.sent_ms - kill.killed_ms)))
    kept = sorted(found[:REQUESTS_PER_KILL_MAX], key=lambda each: each.sent_ms)
    return [
        [
            _since(kill, each.sent_ms),
            _since(kill, each.first_token_ms),
            _since(kill, each.ended_ms),
            outcomes[id(each)],
            each.engine,
            _pause(seen, each),
        ]
        for each in kept
    ]


def _pause(seen: SeenKill, exchange: Exchange) -> list[float | None] | None:
    pause = None if seen.is_direct else pause_at(seen.kill, seen.until_ms, exchange)
    if pause is None:
        return None
    return [_since(seen.kill, pause.from_ms), _since(seen.kill, pause.to_ms)]


def dots_of(ordered: Sequence[Exchange], outcomes: Outcomes, began_ms: float) -> dict[str, Any]:
    """All requests, `[sent, first token after, outcome, grant]`, or an even sample of them.

    Failed requests are kept as far as there is room.
    """
    faults = [each for each in ordered if outcomes[id(each)] is not Outcome.OK][:DOTS_MAX]
    fine = [each for each in ordered if outcomes[id(each)] is Outcome.OK]
    room = DOTS_MAX - len(faults)
    step = max(1, math.ceil(len(fine) / room)) if room else len(fine) + 1
    kept = sorted([*faults, *(fine[::step] if room else [])], key=lambda each: each.sent_ms)
    return {
        "total": len(ordered),
        "left_out": len(ordered) - len(kept),
        "dots": [
            [
                _round(each.sent_ms - began_ms),
                _round(each.first_token_ms - each.sent_ms)
                if each.first_token_ms is not None
                else None,
                outcomes[id(each)],
                each.token,
            ]
            for each in kept
        ],
    }


def _part_kills(records: Records, began_ms: float) -> list[dict[str, Any]]:
    """The kills that have no timeline, in order; `back_ms`: how long each victim was away."""
    return [
        {
            "part": f"{kill.target} of {kill.engine}, {kill.model} {kill.phase}"
            if kill.engine
            else f"{kill.victim}, {kill.model} {kill.phase}"
            if kill.model
            else kill.victim,
            "at_ms": _round(kill.killed_ms - began_ms),
            "back_ms": None if kill.took_ms is None else _round(kill.took_ms),
        }
        for kill in records.kills
        if kill.engine is None or records.models
    ]


def _began_ms(records: Records, ordered: Sequence[Exchange]) -> float:
    """When the first request was sent or the first kill was made; of a pool, the drill began."""
    starts_ms = [kill.killed_ms for kill in records.kills]
    starts_ms += [each.sent_ms for each in ordered[:1]]
    return records.began_ms if records.models else min(starts_ms, default=0.0)


# ------------------------------------------------------------------ a pool: every model as a lane


def _model(
    name: str, records: Records, ordered: Sequence[Exchange], outcomes: Outcomes
) -> dict[str, Any]:
    share = max(1, len(records.models))
    spans = _spans(name, records)
    mine = [each for each in ordered if each.model == name]
    away = times_away(records.turns, name)
    lines = [_line(each, away, outcomes[id(each)], records.began_ms) for each in mine]
    kept_spans, kept_lines = spans[-SPANS_MAX // share :], _even(lines, LINES_MAX // share)
    return {
        "name": name,
        "engines": list(records.models[name]),
        "spans": kept_spans,
        "requests": kept_lines,
        "left_out": len(spans) - len(kept_spans) + len(lines) - len(kept_lines),
    }


def _spans(name: str, records: Records) -> list[list[Any]]:
    """`[from, to, state, reason]`, one after another."""
    moments = sorted(
        (each for each in records.turns if each.part == name), key=lambda each: each.at_ms
    )
    began_ms = records.began_ms
    end_ms = began_ms + 1000 * records.lasted_s
    ends = [*(each.at_ms for each in moments[1:]), end_ms]
    return [
        [
            _round(max(0.0, moment.at_ms - began_ms)),
            _round(max(0.0, moment.at_ms - began_ms, to_ms - began_ms)),
            moment.state,
            moment.note,
        ]
        for moment, to_ms in zip(moments, ends, strict=False)
    ]


def _line(
    exchange: Exchange, away: Sequence[tuple[float, float]], outcome: Outcome, began_ms: float
) -> list[Any]:
    """`[sent, first token, end, outcome, engine, pauses]`."""

    def since(at_ms: float | None) -> float | None:
        return None if at_ms is None else _round(at_ms - began_ms)

    pauses = [[since(each.from_ms), since(each.to_ms)] for each in pauses_in(exchange, away)]
    times = (since(exchange.sent_ms), since(exchange.first_token_ms), since(exchange.ended_ms))
    return [*times, outcome, exchange.engine, pauses]


def _even(lines: list[list[Any]], most: int) -> list[list[Any]]:
    """An even sample, with every pause and every fault as far as there is room."""
    if len(lines) <= most:
        return lines
    special = [each for each in lines if each[5] or each[3] != Outcome.OK][:most]
    plain = [each for each in lines if not each[5] and each[3] == Outcome.OK]
    room = most - len(special)
    step = max(1, -(-len(plain) // room)) if room else len(plain) + 1
    return sorted([*special, *plain[::step]], key=lambda each: each[0])


def _since(kill: Kill, at_ms: float | None) -> float | None:
    return _round(at_ms - kill.killed_ms) if at_ms is not None else None


def _round(value_ms: float) -> float:
    return round(value_ms, 2)  # finer than any chart's pixels


def check_destination(path: Path) -> None:
    """Raise if no page can be written to `path`, before a drill that takes minutes.

    Raises:
        UsageError: `drill.bad_report`.
    """
    reason = None
    if path.is_dir():
        reason = "it is a directory"
    elif not path.parent.is_dir():
        reason = f"{path.parent} is not a directory"
    elif not os.access(path.parent, os.W_OK):
        reason = f"{path.parent} is not writable"
    if reason is not None:
        raise UsageError(
            "drill.bad_report", f"--report {path}: {reason}; choose a file in a writable directory"
        )


def render(data: dict[str, Any]) -> str:
    """The page for `data`."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    before, after = TEMPLATE.read_text(encoding="utf-8").split(PLACE)
    return before + text + after


def write_page(path: Path, data: dict[str, Any]) -> None:
    """Write the page for `data` to `path`, atomically.

    Raises:
        UnderstudyError: `drill.report_not_written`.
    """
    try:
        write_atomic(str(path), render(data), MODE, survives_power_cut=False)
    except OSError as error:
        raise UnderstudyError(
            "drill.report_not_written", f"cannot write the report page to {path}: {error.strerror}"
        ) from error
