"""What `understudy top` shows: documents and records in, lines out.

Pure: no terminal, no clock. A line is a text and the name of a rich style, so that it can be
checked in tests and printed without a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise
from typing import Any

from plumbing.part.format import since, size, table
from plumbing.part.models import ACTIVE, kind_of
from understudy.status import view as pod
from understudy.status.gateway_view import load_of
from understudy.status.memory_view import Document, devices
from understudy.top.pool_view import booked_bars, switches, times_of_models

Line = tuple[str, str]

FAILOVERS_SHOWN = 5
BAR_CELLS = 30
GAP = "   "
LOAD = {
    "connections": "connections",
    "in_flight": "in flight",
    "waiting": "waiting for an engine",
    "parked": "parked",
    "replaying": "replaying",
    "suspects": "suspects",
}
STATES = ("init", "standby", "waking", "active", "draining", "releasing", "resting", "dead")
STYLES = {"healthy": "bold green", "degraded": "bold yellow", "down": "bold red"}
KEYS = "q quit   e events   l logs   p pod   ? help"

HELP = (
    "q       quit",
    "p       the pod: engines or models, requests, memory, failovers (the first page)",
    "e       the latest events, live",
    "l       the last lines of each part's log, as kept by `understudy up`",
    "?       this help",
    "",
    "Time in states is computed from the events that the engines still have.",
    "Phases of a failover: fence, until the old engine's processes are gone; grant;",
    "wake, until a test inference has passed; serve, until requests are accepted.",
    "`understudy drill` also measures detection.",
)


class TopPage(StrEnum):
    """A page; the value is its key."""

    POD = "p"
    EVENTS = "e"
    LOGS = "l"
    HELP = "?"


@dataclass(frozen=True, slots=True)
class Shown:
    """Everything that a page may need. `height`: the number of lines."""

    view: Document
    events: Sequence[Mapping[str, Any]]
    logs: Sequence[str]
    now: datetime
    height: int


def page(which: TopPage, shown: Shown) -> list[Line]:
    """The whole screen, in at most `shown.height` lines."""
    state = str(shown.view["state"])
    title = pod.lines(shown.view, shown.now)[0]
    head = [(title, STYLES.get(state, ""))]
    room = max(0, shown.height - len(head) - 2)
    body = _body(which, shown, room)
    if len(body) > room:  # a terminal of 24 lines
        body = [line for line in body if line[0]]
    return [*head, *body[:room], ("", ""), (KEYS, "dim")]


def _body(which: TopPage, shown: Shown, room: int) -> list[Line]:
    match which:
        case TopPage.POD:
            return _pod(shown)
        case TopPage.EVENTS:
            return _tail(map(_event, shown.events), room)
        case TopPage.LOGS:
            return _tail(((line, "") for line in shown.logs), room)
        case TopPage.HELP:
            return [(line, "") for line in HELP]


def _pod(shown: Shown) -> list[Line]:
    view, now = shown.view, shown.now
    below_title = pod.lines(view, now)[1:]
    out: list[Line] = [(line, "red" if line.startswith("! ") else "") for line in below_title]
    pool = view.get("pool")
    if pool is None:
        out += _section("time in states", times_in_states(view["engines"], shown.events, now))
    else:
        out += _section("switches", switches(shown.events, now))
        out += _section("time in states", times_of_models(pool, shown.events, now))
    out += _section("requests", requests(view.get("gateway")))
    out += _section("memory", memory_bars(view["gms"]) if pool is None else booked_bars(pool))
    return out + _section("failovers", failovers(view, now))


def _section(title: str, lines: Sequence[str]) -> list[Line]:
    return [("", ""), (title, "bold"), *((line, "") for line in lines)] if lines else []


def _tail(lines: Iterable[Line], room: int) -> list[Line]:
    return list(lines)[-room:] if room else []


def _event(record: Mapping[str, Any]) -> Line:
    style = {"error": "red", "warning": "yellow", "debug": "dim"}.get(str(record.get("severity")))
    text = f"{record.get('ts')}  {record.get('source', ''):<11}  {record.get('message')}"
    return text, style or ""


def log_line(part: str, line: str) -> str:
    """A line of a part's log as text: time, level and message of a JSON record."""
    try:
        record = json.loads(line)
        text = f"{record['ts'][11:23]} {record['level'].upper():<7} {record['msg']}"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        text = line  # text, other JSON, or truncated
    return f"{part} | {text}"


def times_in_states(
    engines: Sequence[Document], events: Sequence[Mapping[str, Any]], now: datetime
) -> list[str]:
    """The time of each engine in each state, including the current one."""
    rows: list[tuple[str, ...]] = []
    for part in engines:
        about = part.get("engine") or {}
        spent_ms = _spent_ms(str(about.get("id")), events)
        if about.get("state") in STATES:
            spent_ms[about["state"]] += _age_ms(about.get("since"), now)
        if any(spent_ms.values()):
            began = [now - timedelta(milliseconds=spent_ms[state]) for state in STATES]
            spent = (since(at.isoformat(), now) if at < now else "-" for at in began)
            rows.append((str(about["id"]), *spent))
    return table([("engine", *STATES), *rows]) if rows else []


def _spent_ms(engine: str, events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    spent = dict.fromkeys(STATES, 0.0)
    for record in events:
        data = record.get("data") or {}
        is_change = record.get("type") == "engine.state" and record.get("source") == engine
        if is_change and data.get("from") in spent:
            spent[data["from"]] += float(data.get("lasted_ms") or 0)
    return spent


def _age_ms(began: str | None, now: datetime) -> float:
    try:
        return max(0.0, (now - datetime.fromisoformat(str(began))).total_seconds() * 1000)
    except (ValueError, TypeError):
        return 0.0


def requests(gateway: Document | None) -> list[str]:
    """What the gateway has in hand, and what failovers have cost so far; none in direct mode."""
    if gateway is None or "error" in gateway:
        return []
    load, totals = load_of(gateway), gateway.get("totals") or {}
    now = [f"{load.get(name, 0)} {word}" for name, word in LOAD.items()]
    held, limit = (
        size(each) for each in (load.get("memory_bytes"), gateway.get("memory_bytes_max"))
    )
    ended: dict[str, int] = {}
    for each in totals.get("requests") or ():
        ended[each["ending"]] = ended.get(each["ending"], 0) + each["count"]
    ends = [f"{count} {name}" for name, count in ended.items() if count]
    pauses = totals.get("pauses", 0)
    mean = f" of {totals['pause_ms'] / pauses:.0f} ms on average" if pauses else ""
    return [
        f"{GAP.join(now)}{GAP}holds {held} of {limit}",
        f"{pauses} pauses{mean}{GAP}{totals.get('resumes', 0)} resumed{GAP}"
        f"{totals.get('replayed_tokens', 0)} tokens replayed{GAP}"
        f"{totals.get('lost_requests', 0)} lost with a process of the gateway",
        f"ended: {', '.join(ends) or 'none'}",
    ]


def memory_bars(gms: Sequence[Document]) -> list[str]:
    """A bar for each device: `#` committed, `+` being loaded, `~` out of service, `k` KV memory
    that outlives its engine, where it has a share of the device; `.` free."""
    rows: list[tuple[str, ...]] = []
    for device in (each for part in gms for each in devices(part)):
        capacity = int(device.get("capacity_bytes") or 0)
        if not capacity:
            continue
        kinds = {"committed_bytes": "#", "staging_bytes": "+"}
        kinds |= {"superseded_bytes": "~", "releasing_bytes": "~"}
        used = {key: int(device.get(key) or 0) for key in kinds}
        kv = device.get("kv") or {}
        if kv.get("capacity_bytes"):  # else it is bounded by the machine, and not by this figure
            kinds["kv"], used["kv"] = "k", int(kv.get("pool_bytes") or 0)
        cells = "".join(
            # At least one cell for anything above zero.
            mark * max(used[key] > 0, round(BAR_CELLS * used[key] / capacity))
            for key, mark in kinds.items()
        )[:BAR_CELLS]
        room = f"{size(sum(used.values()))} of {size(capacity)}"
        rows.append((str(device.get("device_uuid")), f"[{cells:.<{BAR_CELLS}}]", room))
    return table(rows) if rows else []


def failovers(view: Document, now: datetime) -> list[str]:
    """The last grants of `active` that took it from another engine, newest first."""
    granted = view["lockserver"].get("last_grants") or ()
    taken = [
        each
        for each in granted
        if kind_of(str(each.get("lock"))) == ACTIVE and each.get("contended")
    ]
    own = {}  # each engine's own account of its takeover, by token
    for part in view["engines"]:
        last = part.get("last_failover")
        if last:
            own[last["token"]] = last
    rows = [
        (
            f"{since(each.get('ts'), now)} ago",
            str(each.get("engine")),
            f"token {each.get('token')}",
            *_phases(each, own.get(each.get("token")) or {}),
        )
        for each in reversed(taken[-FAILOVERS_SHOWN:])
    ]
    header = ("when", "to", "grant no.", "fence ms", "grant ms", "wake ms", "serve ms")
    return table([header, *rows]) if rows else []


def _phases(grant: Document, own: Document) -> tuple[str, ...]:
    marks = (
        grant.get("lost_mono_ms"),
        grant.get("fenced_mono_ms"),
        *(own.get(f"{name}_mono_ms") for name in ("granted", "canary", "active")),
    )
    pairs = pairwise(marks)
    return tuple("-" if a is None or b is None else f"{b - a:.1f}" for a, b in pairs)
