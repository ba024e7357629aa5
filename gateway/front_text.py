"""A front's status document as text: for `gateway status`, and for the status of its directory.

Pure. Owns words and lines, no facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from plumbing.text import counted, duration, since, table

Document = Mapping[str, Any]

HEADER = ("pod", "address", "state", "for", "engines", "in flight", "waiting", "streams", "heard")
PODS_MAX = 8  # of fifteen lines; those that are not ready come first
MODELS_MAX = 2
READY = "ready"


def pods_line(front: Document) -> str:
    """`3 of 4 pods ready, 1 silent`"""
    states = [str(each["state"]) for each in front["pods"]]
    others = [f"{states.count(each)} {each}" for each in sorted({*states} - {READY})]
    return ", ".join([f"{states.count(READY)} of {len(states)} pods ready", *others])


def pods_table(front: Document, now: datetime) -> list[str]:
    """A row for each pod, or for the first `PODS_MAX`."""
    pods = sorted(front["pods"], key=lambda each: each["state"] == READY)
    if not pods:
        return []
    shown = pods if len(pods) <= PODS_MAX else pods[: PODS_MAX - 1]
    out = table([HEADER, *(_row(each, now) for each in shown)])
    left = len(pods) - len(shown)
    return [*out, f"and {left} more: gateway status --json"] if left else out


def _row(pod: Document, now: datetime) -> tuple[str, ...]:
    models = pod["models"].items()
    serving = [model["engine"] or model["tier"] or "none" for _, model in models]
    more = f", {len(serving) - MODELS_MAX} more" if len(serving) > MODELS_MAX else ""
    left_ms, heard_ms = pod["leaving_ms"], pod["heard_for_ms"]
    state = pod["state"] + (f" ({duration(left_ms)})" if left_ms is not None else "")
    return (
        pod["name"] or "-",
        pod["address"],
        state if pod["resumes"] else f"{state}, no resumes",
        since(pod["since"], now),
        ", ".join(serving[:MODELS_MAX]) + more or "-",
        *(str(sum(model[kind] for _, model in models)) for kind in ("in_flight", "waiting")),
        str(pod["streams"]),
        "never" if heard_ms is None else f"{duration(heard_ms)} ago",
    )


def history(front: Document) -> str:
    """`1 pod lost (1 gone); 12 streams moved (8 leaving, 4 silent)`"""
    lost = _counts("pod", "lost", front["losses"])
    return f"{lost}; {_counts('stream', 'moved', front['moves'])}"


def _counts(noun: str, verb: str, counts: Mapping[str, int]) -> str:
    named = ", ".join(f"{count} {cause}" for cause, count in counts.items() if count)
    return f"{counted(sum(counts.values()), noun)} {verb}" + (f" ({named})" if named else "")
