"""The status document of a pool as text: for `pool status` and `pool explain`, and for a pod's own
status.

Pure. Owns words and lines, no facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plumbing.text import duration, size, table

Document = Mapping[str, Any]

HEADER = ("model", "state", "for", "tier", "engines", "in flight", "waiting", "memory", "reason")
PROBLEMS_MAX = 5


def text_of(pool: Document) -> str:
    """All that `pool status` prints."""
    where = f"pool   {state_of(pool)}   pid {pool['pid']}   since {pool['since']}   {pool['dir']}"
    body = [where, *lines(pool)]
    problems = pool["problems"]
    body += [f"! {problem}" for problem in problems[:PROBLEMS_MAX]]
    if len(problems) > PROBLEMS_MAX:
        body.append(f"! and {len(problems) - PROBLEMS_MAX} more problems")
    return "\n".join(body)


def lines(pool: Document, models_max: int | None = None) -> list[str]:
    """The models, the devices and the leases."""
    models = list(pool.get("models") or ())
    if models_max is not None:  # those that have requests are shown
        models.sort(key=lambda each: not (each["tickets"] or each["in_flight"]))
    out = table([HEADER, *(_row(each) for each in models[:models_max])])
    if (more := len(models) - len(models[:models_max])) > 0:
        out.append(f"       and {more} more: see `understudy pool status`")
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


def _row(model: Document) -> tuple[str, ...]:
    waiting = str(model["tickets"])
    if model["oldest_ticket_ms"] is not None:
        waiting += f" (oldest {duration(model['oldest_ticket_ms'])})"
    held = sum(sum(kinds.values()) for kinds in model["bytes"].values())
    notes = [word for word in ("pinned", "recovering") if model[word]]
    if model["estimated"]:
        notes.append("size estimated" if model["sizes"] else "size unknown")
    why = model["alarm"] or model["fault"] or model["waits_for"] or model["reason"]
    engines = [
        f"{each['engine']}{' (shadow)' * each['shadow']} {each['state'] or 'unreachable'}"
        for each in model["engines"]
    ]
    return (
        model["model"],
        model["state"],
        duration(model["for_ms"]),
        model["tier"],
        ", ".join(engines),
        str(model["in_flight"]),
        waiting,
        size(held),
        "; ".join([*notes, *([why] if why else [])]) or "-",
    )


def _room(device: Document) -> str:
    """Who holds what of it."""
    if device["total_bytes"] is None:
        return "not measured yet"
    owners: dict[str, int] = {}
    for each in device["booked"]:
        name = each["owner"] + (" (leaving)" if each["leaving"] else "")
        owners[name] = owners.get(name, 0) + each["bytes"]
    parts = [f"{name} {size(found)}" for name, found in owners.items()]
    if device["outside_bytes"]:
        parts.append(f"others {size(device['outside_bytes'])}")
    held = ", ".join(parts) or "nothing is reserved"
    return f"{size(device['free_bytes'])} free of {size(device['total_bytes'])}   {held}"


# -------------------------------------------------------------------------------------- explain


def sentence(model: Document) -> str:
    """One sentence: the state, why, and what it waits for."""
    text = f"{model['model']} has been {model['state']} for {duration(model['for_ms'])}"
    text += f" ({model['reason']})" if model["reason"] else ""
    return "; ".join([text, *(model[name] for name in ("waits_for", "alarm") if model[name])])


def explained(pool: Document, model: Document) -> list[str]:
    """Why it is in its state, what it waits for, who holds what, and how long that can last."""
    body = [sentence(model), _door(model)]
    if model["pinned"]:
        body.append("it is pinned: it is never evicted or put to sleep")
    if model["in_flight"]:
        is_full = model["tickets"] and model["door"].get("type") == "open"
        full = ", as many as it may have (`max_in_flight`)" if is_full else ""
        body.append(f"requests in its engine: {model['in_flight']}{full}")
    if model["tickets"]:
        oldest = duration(model["oldest_ticket_ms"])
        body.append(f"requests that wait for it: {model['tickets']}, the oldest for {oldest}")
    if model["expected_ms"]:  # 0: it takes longer than ever before
        soon = duration(model["expected_ms"])
        body.append(f"it should be awake in {soon} if each phase takes as long as before")
    on = {*model["bytes"], *(name for sizes in (model["sizes"] or {}).values() for name in sizes)}
    body += [
        f"{each['device']}: {_room(each)}"
        for each in pool["devices"]
        if not on or each["device"] in on
    ]
    if not (model["refused"] or model["recovering"]):  # no wait would make room
        body += _bounds(model["bound_ms"], model["measured_bound_ms"])
    return body


def _door(model: Document) -> str:
    """An open door stays open over a failover, and then names an engine that is dead."""
    door = model["door"]
    match door.get("type"):
        case "open" if model["state"] == "awake":
            return f"requests for it are sent to {door['engine']}, token {door['token']}"
        case "refused":
            return f"requests for it are refused: {door['sentence']} [{door['code']}]"
        case None:
            return "the gateway still follows the previous pool's instructions"
        case _:
            return "requests for it wait until it is awake"


def _bounds(bound_ms: float | None, measured_ms: float | None) -> list[str]:
    """The useful one first, and the guarantee behind it. The guarantee alone would say hours where
    a load takes a second, so it is left to --json until everything was measured."""
    if bound_ms is None:
        why = "a model on its devices never cuts off requests (`cut: never`)"
        return [f"the longest wait has no limit: {why}"]
    if measured_ms is None:
        why = "not every model on its devices has been loaded once"
        return [f"the longest wait cannot be estimated yet: {why}"]
    return [
        f"a request waits at most {duration(measured_ms)} if each phase takes as long as before,",
        f"and at most {duration(bound_ms)} in any case: a load or wake may take a minute or more",
    ]
