"""The status document of a pool as text: for `pool status`, and for a pod's own status.

Pure. Owns words and lines, no facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plumbing.text import duration, size, table

Document = Mapping[str, Any]

HEADER = ("model", "state", "for", "tier", "engines", "in flight", "waiting", "memory", "reason")
PROBLEMS_MAX = 5
STEPS = {
    "waits": "waits for room",
    "switches": "others make room",
    "rises": "on its way up",
    "next_turn": "waits for its next turn",
    "refused": "refused",
    "failed": "failed",
    "recovering": "not known yet",
}


def text_of(pool: Document) -> str:
    """All that `pool status` prints."""
    where = f"pool   {state_of(pool)}   pid {pool['pid']}   since {pool['since']}   {pool['dir']}"
    body = [where, *lines(pool)] if pool["online"] else [f"pool   offline view   {pool['dir']}"]
    problems = pool["problems"]
    body += [f"! {problem}" for problem in problems[:PROBLEMS_MAX]]
    if len(problems) > PROBLEMS_MAX:
        body.append(f"! and {len(problems) - PROBLEMS_MAX} more problems")
    return "\n".join(body)


def lines(
    pool: Document, models_max: int | None = None, waiting_max: int | None = None
) -> list[str]:
    """The models, who waits, the devices and the leases."""
    models = list(pool.get("models") or ())
    out = table([HEADER, *(_row(each) for each in models[:models_max])])
    if (more := len(models) - len(models[:models_max])) > 0:
        out.append(f"       and {more} more: see `understudy pool status`")
    plan = list(pool.get("plan") or ())
    out += map(_next, plan[:waiting_max])
    if (more := len(plan) - len(plan[:waiting_max])) > 0:
        out.append(f"       and {more} more models are waited for")
    out += [f"device {each['device']}   {_room(each)}" for each in pool.get("devices") or ()]
    for lease in pool.get("leases") or ():
        how = "granted" if lease["granted"] else "waiting"
        why = f"   {lease['waits_for']}" if lease.get("waits_for") else ""
        who = f"   {lease['command']}, pid {lease['pid']}" if lease.get("command") else ""
        out.append(
            f"lease  {lease['lease']}   {size(lease['bytes'])} of {lease['device']}   {how} for"
            f" {duration(lease['for_ms'])}{who}{why}"
        )
    return out


def state_of(pool: Document) -> str:
    return "recovering" if pool.get("recovering") else "deciding"


def _next(model: Document) -> str:
    """A model that somebody waits for and that does not serve yet, with what happens next."""
    who = f"{model['tickets']} waiting" if model["tickets"] else "ordered"
    asked = f"; asked: {', '.join(model['victims'])}" if model["victims"] else ""
    return (
        f"next   {model['model']}   {STEPS.get(model['step'], model['step'])}   {who} for"
        f" {duration(model['waited_ms'])}   {model['why']}{asked}"
    )


def _row(model: Document) -> tuple[str, ...]:
    waiting = str(model["tickets"])
    if model["oldest_ticket_ms"] is not None:
        waiting += f" (oldest {duration(model['oldest_ticket_ms'])})"
    held = sum(sum(kinds.values()) for kinds in model["bytes"].values())
    notes = [word for word in ("pinned", "recovering") if model[word]]
    if model["estimated"]:
        notes.append("size estimated" if model["sizes"] else "size unknown")
    why = model["alarm"] or model["fault"] or model["waits_for"] or model["reason"]
    return (
        model["model"],
        model["state"],
        duration(model["for_ms"]),
        model["tier"],
        ", ".join(_engine(each) for each in model["engines"]),
        str(model["in_flight"]),
        waiting,
        size(held),
        "; ".join([*notes, *([why] if why else [])]) or "-",
    )


def _engine(engine: Document) -> str:
    shadow = " (shadow)" if engine["shadow"] else ""
    return f"{engine['engine']}{shadow} {engine['state'] or 'unreachable'}"


def _room(device: Document) -> str:
    if device["total_bytes"] is None:
        return "not measured yet"
    owners: dict[str, int] = {}
    for each in device["booked"]:
        name = each["owner"] + (" (leaving)" if each["leaving"] else "")
        owners[name] = owners.get(name, 0) + each["bytes"]
    parts = [f"{name} {size(found)}" for name, found in owners.items()]
    if device["outside_bytes"]:
        parts.append(f"others {size(device['outside_bytes'])}")
    held = ", ".join(parts) or "nothing is booked"
    return f"{size(device['free_bytes'])} free of {size(device['total_bytes'])}   {held}"
