"""The report page: one self-contained HTML file with its data embedded as JSON.

`page_data` makes the data from records and verdict, decides what is left out when there is too
much, and counts it. Times are milliseconds: of a kill since that kill, of everything else since the
drill's beginning. In the file `<` is escaped, so no data can be taken for markup.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.files import write_atomic
from understudy.drill.outcomes import (
    Pause,
    first_answers,
    moments_of,
    outcome_of,
    pause_at,
    pauses_in,
    phases_of,
    spread,
    times_away,
)
from understudy.drill.records import LOCK, MODEL, PHASES, Exchange, Kill, Moment, Outcome, Records
from understudy.drill.verdict import DrillReport, pool_kills

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

T = TypeVar("T")
sent_at = attrgetter("sent_ms")


def page_data(
    records: Records,
    report: DrillReport,
    backend: str,
    machine: Mapping[str, Any],
    made_at: str,
) -> dict[str, Any]:
    """The whole document. A pool's kills are shown in its models' lanes, all others one by one."""
    drawn = _Drawn(records)
    kills = [] if records.models else records.engine_kills
    parts = drawn.parts()
    document = {
        "schema": SCHEMA,
        "made_at": made_at,
        "passed": report.passed,
        "problems": report.problems,
        "report": report.to_dict(backend, dict(machine)),
        "kills_left_out": len(kills[KILLS_MAX:]),
        "kills": drawn.kills(kills),
        "part_kills": parts,
        "back_ms": spread(part["back_ms"] for part in parts if part["back_ms"]),
        "requests": drawn.dots(),
    }
    if records.models:
        document["pool"] = {
            "length_ms": 1000 * records.lasted_s,
            "kills": pool_kills(records),
            "models": [drawn.model(name) for name in records.models],
        }
    return document


class _Drawn:
    """The records in the order in which they are drawn."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.exchanges = sorted(records.exchanges, key=sent_at)
        self._outcomes = {id(each): outcome_of(each, records) for each in self.exchanges}
        starts_ms = [kill.killed_ms for kill in records.kills]
        starts_ms += [each.sent_ms for each in self.exchanges[:1]]
        self.began_ms = records.began_ms if records.models else min(starts_ms, default=0.0)
        self._lanes = lanes_of(records.moments)

    def is_bad(self, exchange: Exchange) -> bool:
        return self._outcomes[id(exchange)] is not Outcome.OK

    def line(self, exchange: Exchange, origin_ms: float, pauses: Iterable[Pause]) -> list[Any]:
        """`[sent, first token, end, outcome, engine, pauses]`."""
        return [
            _since(origin_ms, exchange.sent_ms),
            _since(origin_ms, exchange.first_token_ms),
            _since(origin_ms, exchange.ended_ms),
            self._outcomes[id(exchange)],
            exchange.engine,
            [[_since(origin_ms, each.from_ms), _since(origin_ms, each.to_ms)] for each in pauses],
        ]

    def dots(self) -> dict[str, Any]:
        """All requests, `[sent, first token after, outcome, grant]`, or a sample of them."""
        kept = sampled(self.exchanges, self.is_bad, DOTS_MAX)
        return {
            "total": len(self.exchanges),
            "left_out": len(self.exchanges) - len(kept),
            "dots": [
                [
                    _since(self.began_ms, each.sent_ms),
                    _since(each.sent_ms, each.first_token_ms),
                    self._outcomes[id(each)],
                    each.token,
                ]
                for each in kept
            ],
        }

    # ------------------------------------------------------------------ kills

    def kills(self, kills: Sequence[Kill]) -> list[dict[str, Any]]:
        firsts = first_answers(kills, self.exchanges)
        ends_ms = [*(kill.killed_ms for kill in kills[1:]), math.inf]
        seen = zip(range(KILLS_MAX), kills, firsts, ends_ms, strict=False)
        return [
            {"number": number + 1, **self._kill(kill, first, until_ms)}
            for number, kill, first, until_ms in seen
        ]

    def _kill(self, kill: Kill, first: Exchange | None, until_ms: float) -> dict[str, Any]:
        """One kill, with its timeline until the next one at `until_ms`."""
        at_ms, phases = kill.killed_ms, phases_of(kill, first)
        moments_ms = {name: _since(at_ms, ms) for name, ms in moments_of(kill, first).items()}
        deaths_ms = {name: _since(at_ms, ms) for name, ms in kill.deaths_ms.items()}
        known = [ms for ms in (*moments_ms.values(), *deaths_ms.values()) if ms]
        length_ms = max(LENGTH_MIN_MS, *known) if known else LENGTH_UNKNOWN_MS
        from_ms, to_ms = -BEFORE_KILL * length_ms, min(AFTER_LAST * length_ms, until_ms - at_ms)
        lanes = {
            part: spans(moments, at_ms, from_ms, to_ms) for part, moments in self._lanes.items()
        }
        return {
            "target": kill.target,
            "engine": kill.engine,
            "new_engine": kill.new_engine,
            "new_token": kill.new_token,
            "at_ms": _since(self.began_ms, at_ms),
            "failover_ms": moments_ms["first token"],
            "phases_ms": {name: _round(phases[name]) for name in PHASES if name in phases},
            "moments_ms": moments_ms,
            "from_ms": _round(from_ms),
            "to_ms": _round(to_ms),
            "deaths_ms": deaths_ms,
            "lanes": {part: lane for part, lane in lanes.items() if lane},
            "requests": self._around(kill, at_ms + from_ms, at_ms + to_ms, until_ms),
        }

    def _around(self, kill: Kill, from_ms: float, to_ms: float, until_ms: float) -> list[list[Any]]:
        """The requests of a timeline, as `line`, but with the only pause of a stream that continued
        at another engine, or null. If there are too many, failed ones and those nearest to the kill
        are kept."""
        start = bisect_left(self.exchanges, from_ms - LOOK_BACK_MS, key=sent_at)
        end = bisect_left(self.exchanges, to_ms, key=sent_at)
        found = [each for each in self.exchanges[start:end] if each.ended_ms >= from_ms]
        found.sort(key=lambda each: (not self.is_bad(each), abs(each.sent_ms - kill.killed_ms)))
        lines = []
        for each in sorted(found[:REQUESTS_PER_KILL_MAX], key=sent_at):
            pause = pause_at(kill, until_ms, each)
            *line, pauses = self.line(each, kill.killed_ms, [pause] if pause else [])
            lines.append([*line, *(pauses or [None])])
        return lines

    def parts(self) -> list[dict[str, Any]]:
        """The kills that have no timeline, in order; `back_ms`: how long each victim was away."""
        return [
            {
                "part": _named(kill),
                "at_ms": _since(self.began_ms, kill.killed_ms),
                "back_ms": _since(kill.killed_ms, kill.back_ms),
            }
            for kill in self.records.kills
            if kill.engine is None or kill.model
        ]

    # ------------------------------------------------------------------ a pool's models

    def model(self, name: str) -> dict[str, Any]:
        """A model's states and requests."""
        records, share = self.records, len(self.records.models)
        turns = self._lanes.get(MODEL + name, [])
        away = times_away(turns, name)
        mine = [each for each in self.exchanges if each.model == name]
        pauses = {id(each): pauses_in(each, away) for each in mine}
        kept = sampled(
            mine, lambda each: bool(pauses[id(each)]) or self.is_bad(each), LINES_MAX // share
        )
        lane = spans(turns, self.began_ms, 0.0, 1000 * records.lasted_s)
        shown = lane[-SPANS_MAX // share :]
        return {
            "name": name,
            "engines": list(records.models[name]),
            "spans": shown,
            "requests": [self.line(each, self.began_ms, pauses[id(each)]) for each in kept],
            "left_out": len(lane) - len(shown) + len(mine) - len(kept),
        }


def lanes_of(moments: Iterable[Moment]) -> dict[str, list[Moment]]:
    """The moments of each part, in order; the lock is the last part."""
    ordered = sorted(moments, key=lambda each: (each.part == LOCK, each.part, each.at_ms))
    return {part: list(group) for part, group in groupby(ordered, attrgetter("part"))}


def spans(
    moments: Sequence[Moment], origin_ms: float, from_ms: float, to_ms: float
) -> list[list[Any]]:
    """The states of one part from edge to edge of a window that is relative to `origin_ms`, each as
    `[from, to, state, note]`. The first state may be older than the window."""
    start = bisect_left(moments, origin_ms + from_ms, key=attrgetter("at_ms"))
    end = bisect_left(moments, origin_ms + to_ms, key=attrgetter("at_ms"))
    seen = moments[max(0, start - 1) : end]
    begins = [_round(max(each.at_ms - origin_ms, from_ms)) for each in seen]
    ends = [*begins[1:], _round(to_ms)]
    return [
        [begin, until, each.state, each.note]
        for begin, until, each in zip(begins, ends, seen, strict=False)
    ]


def sampled(items: Sequence[T], is_special: Callable[[T], bool], most: int) -> list[T]:
    """At most `most` of `items`, in order: the special ones as far as there is room, and an even
    sample of the others."""
    special = [number for number, each in enumerate(items) if is_special(each)][:most]
    plain = [number for number, each in enumerate(items) if not is_special(each)]
    room = most - len(special)
    step = max(1, math.ceil(len(plain) / room)) if room else len(plain) + 1
    kept = [*special, *(plain[::step] if room else [])]
    return [items[number] for number in sorted(kept)]


def _named(kill: Kill) -> str:
    victim = f"{kill.target} of {kill.engine}" if kill.engine else kill.victim
    return f"{victim}, {kill.model} {kill.phase}" if kill.model else victim


def _since(origin_ms: float, at_ms: float | None) -> float | None:
    return None if at_ms is None else _round(at_ms - origin_ms)


def _round(value_ms: float) -> float:
    return round(value_ms, 2)  # finer than any chart's pixels


def check_destination(path: Path) -> None:
    """Raise if no page can be written to `path`, before a drill that takes minutes.

    Raises:
        UsageError: `drill.bad_report`.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(
            "drill.bad_report",
            f"--report {path}: no file can be written there; choose a file in a writable directory",
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
