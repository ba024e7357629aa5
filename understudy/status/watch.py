"""What `understudy status --watch` shows below the status: requests, memory, failovers, events.

Pure: documents and records in, lines out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from plumbing.pod.models import ACTIVE, kind_of
from plumbing.text import duration, since, size, table
from understudy.status.gateway_view import load_of
from understudy.status.memory_view import Document, devices

ROWS_SHOWN = 5  # of failovers, and of a pool's switches
EVENTS_SHOWN = 8
BAR_CELLS = 30
GAP = "   "
PHASES = ("wait", "drain", "release", "raise")
LOAD = {
    "connections": "connections",
    "in_flight": "in flight",
    "waiting": "waiting for an engine",
    "parked": "parked",
    "replaying": "replaying",
    "suspects": "suspects",
}
# The marks of the owners in a pool's bar, in the order in which they are named behind it.
MARKS = "#=+*%@&$"


def watch_lines(view: Document, events: Sequence[Mapping[str, Any]], now: datetime) -> list[str]:
    """The sections that have something to show, each below its title and an empty line."""
    pool = view.get("pool")
    found = {
        "requests": requests(view.get("gateway")),
        "memory": memory_bars(view["gms"]) if pool is None else booked_bars(pool),
        "switches": switches(events, now),
        "failovers": failovers(view, now),
        "events": [_event(each) for each in events[-EVENTS_SHOWN:]],
    }
    return [line for title, rows in found.items() if rows for line in ("", title, *rows)]


def _event(record: Mapping[str, Any]) -> str:
    return f"{record.get('ts')}  {record.get('source', ''):<11}  {record.get('message')}"


def requests(gateway: Document | None) -> list[str]:
    """The gateway's load, and what failovers have cost so far; none without a gateway."""
    if gateway is None or "error" in gateway:
        return []
    load, totals = load_of(gateway), gateway.get("totals") or {}
    now = [f"{load.get(name, 0)} {word}" for name, word in LOAD.items()]
    held, limit = size(load.get("memory_bytes")), size(gateway.get("memory_bytes_max"))
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
    rows = []
    for device in (each for part in gms for each in devices(part)):
        kinds = {"committed_bytes": "#", "staging_bytes": "+"}
        kinds |= {"superseded_bytes": "~", "releasing_bytes": "~"}
        held = [(mark, int(device.get(key) or 0)) for key, mark in kinds.items()]
        kv, capacity = device.get("kv") or {}, int(device.get("capacity_bytes") or 0)
        if kv.get("capacity_bytes"):  # else it is bounded by the machine, and not by this figure
            held.append(("k", int(kv.get("pool_bytes") or 0)))
        if capacity:
            room = f"{size(sum(each for _, each in held))} of {size(capacity)}"
            rows.append((str(device.get("device_uuid")), _bar(held, capacity), room))
    return table(rows) if rows else []


def booked_bars(pool: Document) -> list[str]:
    """A bar for each device, a mark for each owner: `o` others, `-` the margin, `.` free."""
    rows = []
    for device in pool.get("devices") or ():
        owners: dict[str, int] = {}
        for each in device["booked"]:
            owners[each["owner"]] = owners.get(each["owner"], 0) + each["bytes"]
        numbered = enumerate(sorted(owners.items()))
        parts = [(MARKS[n % len(MARKS)], name, held) for n, (name, held) in numbered]
        parts += [("o", "others", device["outside_bytes"]), ("-", "margin", device["margin_bytes"])]
        parts = [each for each in parts if each[2]]
        if device["total_bytes"]:
            bar = _bar([(mark, held) for mark, _, held in parts], device["total_bytes"])
            names = ", ".join(f"{mark} {name} {size(held)}" for mark, name, held in parts)
            rows.append((device["device"], bar, f"{size(device['free_bytes'])} free", names or "-"))
    return table(rows) if rows else []


def _bar(held: Sequence[tuple[str, int]], total: int) -> str:
    """At least one cell for anything above zero."""
    marks = (mark * max(n > 0, round(BAR_CELLS * n / total)) for mark, n in held)
    return f"[{''.join(marks)[:BAR_CELLS]:.<{BAR_CELLS}}]"


def switches(events: Sequence[Mapping[str, Any]], now: datetime) -> list[str]:
    """A pool's last switches, newest first, with the duration of each phase."""
    found = [each for each in events if each.get("type") == "pool.switch"]
    rows = []
    for record in reversed(found[-ROWS_SHOWN:]):
        data = record.get("data") or {}
        took = (duration(float(data.get(f"{phase}_ms") or 0)) for phase in PHASES)
        others = ", ".join(data.get("victims") or ()) or "-"
        rows.append((f"{since(record.get('ts'), now)} ago", str(data.get("model")), others, *took))
    return table([("when", "to", "in place of", *PHASES), *rows]) if rows else []


def failovers(view: Document, now: datetime) -> list[str]:
    """The last grants of `active` that took it from another engine, newest first, with phases:
    fence, until the old engine's processes are gone; grant; wake, until a test inference has
    passed; serve, until requests are accepted."""
    granted = view["lockserver"].get("last_grants") or ()
    taken = [it for it in granted if kind_of(str(it.get("lock"))) == ACTIVE and it.get("contended")]
    lasts = [part["last_failover"] for part in view["engines"] if part.get("last_failover")]
    own = {last["token"]: last for last in lasts}  # each engine's own account of its takeover
    rows = []
    for grant in reversed(taken[-ROWS_SHOWN:]):
        after = own.get(grant.get("token")) or {}
        marks = [grant.get(f"{name}_mono_ms") for name in ("lost", "fenced")]
        marks += [after.get(f"{name}_mono_ms") for name in ("granted", "canary", "active")]
        phases = ("-" if None in pair else f"{pair[1] - pair[0]:.1f}" for pair in pairwise(marks))
        who = str(grant.get("engine")), f"token {grant.get('token')}"
        rows.append((f"{since(grant.get('ts'), now)} ago", *who, *phases))
    header = ("when", "to", "grant no.", "fence ms", "grant ms", "wake ms", "serve ms")
    return table([header, *rows]) if rows else []
