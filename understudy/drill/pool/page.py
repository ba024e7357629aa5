"""The data of a pool's report page: every model as a lane. The page itself is that of all drills.

Times are milliseconds since the first request. What there is too much of is left out and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from understudy.drill.page import Outcomes, dots_of, page_head
from understudy.drill.pool.records import PoolDrillRecords
from understudy.drill.pool.verdict import (
    PoolDrillReport,
    away,
    numbered,
    outcome_document,
    pauses_in,
    pool_outcome,
)
from understudy.drill.records import Exchange, Outcome
from understudy.drill.verdict import spread
from understudy.host import ResourceUsage

SPANS_MAX = 20_000  # of all models: some 1.5 MiB
REQUESTS_MAX = 6_000  # lines in the lanes: some 400 KiB


def pool_page_data(
    records: PoolDrillRecords,
    report: PoolDrillReport,
    backend: str,
    machine: Mapping[str, Any],
    usages: Mapping[str, tuple[ResourceUsage, ResourceUsage]],
    made_at: str,
) -> dict[str, Any]:
    """The whole document."""
    ordered = sorted(records.base.exchanges, key=lambda each: each.sent_ms)
    outcomes: Outcomes = {id(each): pool_outcome(each, records) for each in ordered}
    kills = [outcome_document(number, kill, records) for number, kill in numbered(records)]
    parts = [
        {
            "part": f"{kill['target']}{_whose(kill)}, {kill['model']} {kill['phase']}",
            "at_ms": kill["at_ms"],
            "back_ms": kill["back_ms"],
        }
        for kill in kills
    ]
    length_ms = 1000 * records.base.lasted_s
    return {
        **page_head(report, backend, machine, usages, made_at),
        "kills_left_out": 0,
        "kills": [],
        "part_kills": parts,
        "back_ms": spread(each["back_ms"] for each in parts if each["back_ms"]).to_dict(),
        "requests": dots_of(ordered, outcomes, records.began_ms),
        "pool": {
            "length_ms": length_ms,
            "kills": kills,
            "models": [_model(name, records, ordered, outcomes) for name in records.models],
        },
    }


def _whose(kill: Mapping[str, Any]) -> str:
    return f" of {kill['engine']}" if kill["engine"] else ""


def _model(
    name: str, records: PoolDrillRecords, ordered: Sequence[Exchange], outcomes: Outcomes
) -> dict[str, Any]:
    share = max(1, len(records.models))
    spans = _spans(name, records)
    mine = [each for each in ordered if each.model == name]
    gone = away(records, name)
    lines = [_line(each, gone, outcomes[id(each)], records.began_ms) for each in mine]
    kept_spans, kept_lines = spans[-SPANS_MAX // share :], _even(lines, REQUESTS_MAX // share)
    return {
        "name": name,
        "engines": list(records.models[name]),
        "spans": kept_spans,
        "requests": kept_lines,
        "left_out": len(spans) - len(kept_spans) + len(lines) - len(kept_lines),
    }


def _spans(name: str, records: PoolDrillRecords) -> list[list[Any]]:
    """`[from, to, state, reason]`, one after another."""
    moments = sorted(
        (each for each in records.moments if each.model == name), key=lambda each: each.at_ms
    )
    began_ms = records.began_ms
    end_ms = began_ms + 1000 * records.base.lasted_s
    ends = [*(each.at_ms for each in moments[1:]), end_ms]
    return [
        [
            _round(max(0.0, moment.at_ms - began_ms)),
            _round(max(0.0, moment.at_ms - began_ms, to_ms - began_ms)),
            moment.state,
            moment.reason,
        ]
        for moment, to_ms in zip(moments, ends, strict=False)
    ]


def _line(
    exchange: Exchange, gone: Sequence[tuple[float, float]], outcome: Outcome, began_ms: float
) -> list[Any]:
    """`[sent, first token, end, outcome, engine, pauses]`."""

    def since(at_ms: float | None) -> float | None:
        return None if at_ms is None else _round(at_ms - began_ms)

    pauses = [[since(each.from_ms), since(each.to_ms)] for each in pauses_in(exchange, gone)]
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


def _round(value_ms: float) -> float:
    return round(value_ms, 2)
