"""The status document as text, at the width of a terminal. Owns words and lines, no facts.

Long lines are folded between words and never inside one, so that names and commands can be copied.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from plumbing.text import duration

Document = dict[str, Any]

COLUMNS_MIN = 60  # narrower, there would be no room beside the labels
INDENT, LABEL = 9, 12
SERVICE = {
    "lent": "for gateways to accept connections",
    "waiting": "no gateway has the socket; connections wait",
    "closed": "no gateway has asked for the socket; clients are refused",
    "waiting_for_hand_back": "waiting for a gateway to hand the socket back",
}
STAGES = {  # of a gateway that does not accept
    "asks": "waits for the socket",
    "yields": "finishes its requests beside its successor",
    "ends": "finishes its requests and exits",
}
TOGETHER = "\u00a0"  # a space at which no line is broken


def text_of(
    document: Document,
    columns: int | None = None,
    idle: Mapping[str, str] | None = None,
) -> str:
    """`document` as text; `columns`: the terminal's unless given. `idle`: a sentence about each
    engine that rests or runs no backend."""
    width = max(COLUMNS_MIN, columns or shutil.get_terminal_size().columns)
    lines = list(_lines(document, idle or {}))
    return "\n".join(folded for label, text in lines for folded in _fold(label, text, width))


def _lines(document: Document, idle: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    server, cold = document["server"], dict(idle)
    where = f"pid {server['pid']}  since {server['since']}" if server["online"] else "offline view"
    yield _head("lockserver", f"{where}  last token {document['token']}  {server['dir']}")
    for name, lock in document["locks"].items():
        yield _head(name, f"{lock['state']:<{LABEL}}{_who(lock)}")
        if lock["holder"] and (why := cold.pop(lock["holder"]["engine"], None)):
            yield _line("rests", why)
        for waiter in lock["waiters"]:
            mark = "  silent: skipped" if waiter["silent"] else ""
            yield _line("waiting", f"{waiter['engine']}  {_since(waiter)}{mark}")
        more = lock["waiters_total"] - len(lock["waiters"])
        if more:
            yield _line("waiting", f"and {more} more")
        for wait in lock["waits"]:
            yield from _wait(wait)
    for engine, sentence in cold.items():
        yield _head("cold", f"{engine} {sentence}")
    if document["tcp"] is not None:
        yield from _tcp(document["tcp"])
    for supervisor in document["supervisors"]:
        if supervisor["lease_left_ms"] is not None:
            left = duration(supervisor["lease_left_ms"])
            where = supervisor["peer"] or "not connected"
            yield _head("lease", f"{supervisor['engine']}  {where}  {left} left")
    for name, service in document["service"].items():
        yield _head("service", f"{name} on {service['address']}: {SERVICE[service['state']]}")
    for gateway in document["gateways"]:
        yield _head("gateway", _gateway(gateway))
    if document.get("problem"):
        yield _head("problem", document["problem"])


def _who(lock: Document) -> str:
    holder = lock["holder"]
    if holder is None:
        return f"no holder  {_since(lock)}"
    pid = f"pid {holder['pid']}  " if holder.get("pid") else ""
    return f"{holder['engine']}  token {holder['token']}  {pid}{_since(lock)}"


def _gateway(gateway: Document) -> str:
    pid = f"pid {gateway['pid']}  " if gateway["pid"] else ""
    accepting = gateway["accepting"]
    does = f"accepts  {_since(accepting)}" if accepting else STAGES[gateway["stage"]]
    return f"{gateway['gateway']}  {pid}{does}"


def _tcp(tcp: Document) -> Iterator[tuple[str, str]]:
    how = "secured" if tcp["secured"] else "this host only"
    yield _head("tcp", f"{tcp['address']}  {how}  {tcp['connections']} connections")
    if tcp["last_refusal"]:
        yield _line("refused", f"{tcp['refused']}, the last was {tcp['last_refusal']}")


def _wait(wait: Document) -> Iterator[tuple[str, str]]:
    yield _line("problem" if wait["is_fault"] else "reason", wait["message"])
    token = f"token {wait['token']}" if wait["token"] else ""
    pid = f"supervisor pid {wait['pid']}" if wait["pid"] else ""
    who = [wait["engine"] or "none", wait["incarnation"] or "", token, pid]
    yield _line("engine", "  ".join(each for each in who if each))
    yield _line("since", _since(wait).removeprefix(f"since{TOGETHER}"))
    for evidence in wait["evidence"]:
        yield _line("evidence", evidence)
    yield _line("to do", wait["fix"])


def _since(timed: Document) -> str:
    return f"since {timed['since']} ({duration(timed['for_ms'])})".replace(" ", TOGETHER)


def _head(label: str, text: str) -> tuple[str, str]:
    return f"{label:<{INDENT}}" if len(label) < INDENT else f"{label}  ", text


def _line(label: str, text: str) -> tuple[str, str]:
    return f"{'':<{INDENT}}{label:<{LABEL}}", text


def _fold(label: str, text: str, width: int) -> list[str]:
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=label,
        subsequent_indent=" " * (INDENT + LABEL),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(TOGETHER, " ") for line in lines]
