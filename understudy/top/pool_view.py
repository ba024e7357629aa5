"""What `understudy top` shows of a pool: its switches, its models' states, what is booked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from plumbing.part.format import duration, since, size, table
from pool.core.states import ModelState
from understudy.status.memory_view import Document
from understudy.status.pool_view import models_of

SWITCHES_SHOWN = 5
BAR_CELLS = 30
PHASES = ("wait", "drain", "release", "raise")
# Those in which a model stays; the others are short, and are together in `moving`.
STAYS = (ModelState.COLD, ModelState.OFFLOADED, ModelState.WARM, ModelState.AWAKE)
OTHERS = (ModelState.PENDING, ModelState.FAILED)
# The marks of the owners in a bar, in the order in which they are named behind it.
MARKS = "#=+*%@&$"


def switches(events: Sequence[Mapping[str, Any]], now: datetime) -> list[str]:
    """The last switches, newest first, with what each of their phases took."""
    found = [each for each in events if each.get("type") == "pool.switch"]
    rows = []
    for record in reversed(found[-SWITCHES_SHOWN:]):
        data = record.get("data") or {}
        rows.append(
            (
                f"{since(record.get('ts'), now)} ago",
                str(data.get("model")),
                ", ".join(data.get("victims") or ()) or "-",
                *(duration(float(data.get(f"{phase}_ms") or 0)) for phase in PHASES),
            )
        )
    return table([("when", "to", "in place of", *PHASES), *rows]) if rows else []


def times_of_models(
    pool: Document, events: Sequence[Mapping[str, Any]], now: datetime
) -> list[str]:
    """How long each model was in each state, since the oldest event that is kept."""
    models = models_of(pool)
    began = {each["model"]: _moment(each["since"]) for each in models}
    spent = {name: dict.fromkeys((*STAYS, *OTHERS, None), timedelta()) for name in began}
    for each in models:
        _add(spent[each["model"]], each["state"], began[each["model"]], now)
    ends = dict(began)
    for record in reversed(events):
        data = record.get("data") or {}
        name = data.get("model")
        if record.get("type") != "pool.model" or name not in ends:
            continue
        at = _moment(record.get("ts"))
        if at is None:
            continue
        later = ends[name]
        if later is not None and at < later:
            _add(spent[name], str(data.get("to")), at, later)
        ends[name] = at if later is None else min(at, later)
    header = ("model", *(state.value for state in (*STAYS, *OTHERS)), "moving")
    rows = [
        (name, *(_text(found[state]) for state in (*STAYS, *OTHERS, None)))
        for name, found in spent.items()
    ]
    return table([header, *rows]) if rows else []


def _add(
    spent: dict[ModelState | None, timedelta], state: str, start: datetime | None, end: datetime
) -> None:
    known = next((each for each in (*STAYS, *OTHERS) if each == state), None)
    if start is not None:
        spent[known] += max(timedelta(), end - start)


def _text(spent: timedelta) -> str:
    return duration(spent.total_seconds() * 1000) if spent else "-"


def _moment(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def booked_bars(pool: Document) -> list[str]:
    """A bar for each device, a mark for each owner: `o` others, `-` the margin, `.` free."""
    rows: list[tuple[str, ...]] = []
    for device in pool.get("devices") or ():
        total = device["total_bytes"]
        if not total:
            continue
        owners: dict[str, int] = {}
        for each in device["booked"]:
            owners[each["owner"]] = owners.get(each["owner"], 0) + each["bytes"]
        parts = [
            (MARKS[number % len(MARKS)], name, found)
            for number, (name, found) in enumerate(sorted(owners.items()))
        ]
        parts += [
            (mark, name, device[f"{key}_bytes"])
            for mark, name, key in (("o", "others", "outside"), ("-", "margin", "margin"))
            if device[f"{key}_bytes"]
        ]
        cells = "".join(mark * max(1, round(BAR_CELLS * held / total)) for mark, _, held in parts)
        names = ", ".join(f"{mark} {name} {size(held)}" for mark, name, held in parts)
        bar = f"[{cells[:BAR_CELLS]:.<{BAR_CELLS}}]"
        rows.append((device["device"], bar, f"{size(device['free_bytes'])} free", names or "-"))
    return table(rows) if rows else []
