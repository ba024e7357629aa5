"""The status document as text, at the width of a terminal. Owns words and lines, no facts.

Long lines are folded between words and never inside one, so that names and commands can be copied.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from plumbing.text import duration

Document = dict[str, Any]
Row = tuple[str, str, str]  # what it is about, unless that is the row above; a label, if any; text

COLUMNS_MIN = 60  # narrower, there would be no room beside the labels
INDENT, LABEL = 9, 12
SERVICE = {
    "lent": "for gateways to accept connections",
    "waiting": "no gateway has the socket; connections wait",
    "closed": "no gateway has asked for the socket; clients are refused",
    "waiting_for_hand_back": "waiting for a gateway to hand the socket back",
}
STAGES = {
    "asks": "waits for the socket",
    "accepts": "accepts",
    "yields": "finishes its requests beside its successor",
    "ends": "finishes its requests and exits",
}
TOGETHER = "\u00a0"  # a space at which no line is broken


def text_of(document: Document) -> str:
    """`document` as text."""
    width = max(COLUMNS_MIN, shutil.get_terminal_size().columns)
    lines: list[str] = []
    for head, label, text in _rows(document):
        lines += textwrap.wrap(
            text,
            width,
            initial_indent=f"{head + '  ':<{INDENT}}" + (f"{label:<{LABEL}}" if label else ""),
            subsequent_indent=" " * (INDENT + LABEL),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines).replace(TOGETHER, " ")


def _rows(document: Document) -> Iterator[Row]:
    server, tcp = document["server"], document["tcp"]
    where = f"pid {server['pid']}  since {server['since']}" if server["online"] else "offline view"
    yield "lockserver", "", f"{where}  last token {document['token']}  {server['dir']}"
    for name, lock in document["locks"].items():
        yield name, lock["state"], _who(lock)
        for waiter in lock["waiters"]:
            mark = "  silent: skipped" if waiter["silent"] else ""
            yield "", "waiting", f"{waiter['engine']}  {_since(waiter)}{mark}"
        more = lock["waiters_total"] - len(lock["waiters"])
        if more:
            yield "", "waiting", f"and {more} more"
        for wait in lock["waits"]:
            yield from _wait(wait)
    if tcp is not None:
        yield "tcp", "", f"{tcp['address']}  {tcp['connections']} connections"
        if tcp["last_refusal"]:
            yield "", "refused", f"{tcp['refused']}, the last was {tcp['last_refusal']}"
    for supervisor in document["supervisors"]:
        if supervisor["lease_left_ms"] is not None:
            left = duration(supervisor["lease_left_ms"])
            peer = supervisor["peer"] or "not connected"
            yield "lease", "", f"{supervisor['engine']}  {peer}  {left} left"
    for name, service in document["service"].items():
        yield "service", "", f"{name} on {service['address']}: {SERVICE[service['state']]}"
    for gateway in document["gateways"]:
        since = f"  {_since(gateway['accepting'])}" if gateway["accepting"] else ""
        does = f"{_pid('', gateway['pid'])}{STAGES[gateway['stage']]}{since}"
        yield "gateway", "", f"{gateway['gateway']}  {does}"
    if document["problem"]:
        yield "problem", "", document["problem"]


def _who(lock: Document) -> str:
    holder = lock["holder"]
    if holder is None:
        return f"no holder  {_since(lock)}"
    pid = _pid("", holder.get("pid"))
    return f"{holder['engine']}  token {holder['token']}  {pid}{_since(lock)}"


def _wait(wait: Document) -> Iterator[Row]:
    yield "", "problem" if wait["is_fault"] else "reason", wait["message"]
    token = f"token {wait['token']}" if wait["token"] else ""
    who = [wait["engine"] or "none", wait["incarnation"], token, _pid("supervisor ", wait["pid"])]
    yield "", "engine", "  ".join(each for each in who if each)
    yield "", "since", _since(wait).removeprefix(f"since{TOGETHER}")
    for evidence in wait["evidence"]:
        yield "", "evidence", evidence
    yield "", "to do", wait["fix"]


def _pid(whose: str, pid: int | None) -> str:
    return f"{whose}pid {pid}  " if pid else ""


def _since(timed: Document) -> str:
    return f"since {timed['since']} ({duration(timed['for_ms'])})".replace(" ", TOGETHER)
