"""The status document of a pool as text. Owns words and lines, no facts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plumbing.text import duration, size, table

Document = dict[str, Any]
PROBLEMS_MAX = 5


def render(document: Document) -> str:
    return "\n".join(_lines(document))


def _lines(document: Document) -> Iterator[str]:
    if not document["online"]:
        yield f"pool     offline view  {document['dir']}"
        yield from _problems(document)
        return
    state = "  recovering" if document["recovering"] else ""
    yield f"pool     pid {document['pid']}  since {document['since']}  {document['dir']}{state}"
    rows: list[tuple[str, ...]] = [("model", "state", "for", "in flight", "waiting", "memory", "")]
    rows += [_model(each) for each in document["models"]]
    yield from table(rows)
    for device in document["devices"]:
        yield _device(device)
    for lease in document["leases"]:
        how = "granted" if lease["granted"] else "waiting"
        where = f"{size(lease['bytes'])} of {lease['device']}"
        why = f"  {lease['waits_for']}" if lease["waits_for"] else ""
        who = f"  {lease['command']}, pid {lease['pid']}" if lease["command"] else ""
        yield f"lease    {lease['lease']}  {where}  {how}{who}{why}"
    yield from _problems(document)


def _model(model: Document) -> tuple[str, ...]:
    notes = [name for name in ("pinned", "recovering") if model[name]]
    if model["estimated"]:
        notes.append("size estimated" if model["sizes"] else "size unknown")
    why = model["alarm"] or model["fault"] or model["waits_for"]
    if why:
        notes.append(why)
    waiting = str(model["tickets"])
    if model["oldest_ticket_ms"] is not None:
        waiting += f" (oldest {duration(model['oldest_ticket_ms'])})"
    held = sum(sum(kinds.values()) for kinds in model["bytes"].values())
    return (
        model["model"],
        model["state"],
        duration(model["for_ms"]),
        str(model["in_flight"]),
        waiting,
        size(held),
        "; ".join(notes),
    )


def _device(device: Document) -> str:
    name = f"device   {device['device']}"
    if device["total_bytes"] is None:
        return f"{name}  not measured yet"
    parts = [f"{size(device['free_bytes'])} free of {size(device['total_bytes'])}"]
    parts.append(f"{size(device['booked_bytes'])} booked")
    if device["leaving_bytes"]:
        parts.append(f"{size(device['leaving_bytes'])} of it leaving")
    if device["outside_bytes"]:
        parts.append(f"{size(device['outside_bytes'])} used by others")
    return f"{name}  {', '.join(parts)}"


def _problems(document: Document) -> Iterator[str]:
    found = document["problems"]
    for problem in found[:PROBLEMS_MAX]:
        yield f"problem  {problem}"
    if len(found) > PROBLEMS_MAX:
        yield f"problem  and {len(found) - PROBLEMS_MAX} more"
