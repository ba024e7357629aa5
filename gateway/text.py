"""The status of a gateway as text, at most 15 lines; and what is known of one that does not answer.

The text owns words and lines, no facts. A gateway has nothing on disk but its lock file, since its
state is its connections: of one that does not answer, the process and what follows for clients are
known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.pod.paths import gateway_socket
from plumbing.service import procfs
from plumbing.text import duration, since, size

Document = dict[str, Any]
PROBLEMS_MAX = 5  # of fifteen lines
MODELS_MAX = 4  # in one line


def render(document: Document) -> str:
    return "\n".join(f"{label:<9}{text}" for label, text in _lines(document))


def _lines(document: Document) -> Iterator[tuple[str, str]]:
    if not document["online"]:
        yield "gateway", f"offline view  {document['dir']}"
        yield from _problems(document)
        return
    now = datetime.now(UTC)
    yield "gateway", f"pid {document['pid']}  since {document['since']}  {document['dir']}"
    yield "service", _service(document, now)
    if document["predecessor"] is not None:
        yield "", f"pid {document['predecessor']}, which it replaced, finishes its requests"
    if document["pool"] is None:
        yield "engine", _engine(document)
    else:
        yield "models", models_line(document["pool"]["models"])
    yield "requests", _load(document["load"])
    held = size(document["load"]["memory_bytes"])
    yield "memory", f"{held} of {size(document['memory_bytes_max'])} for journals, bodies, answers"
    yield "totals", _totals(document)
    stop, server = document["stop"], document["lock_server"]
    kind = f"; class {stop['class']}" if stop["class"] else ""
    yield "stop", f"streams get {duration(stop['drain_ms'])}{kind}"
    how, then = ("", "") if server["connected"] else ("not ", "; a takeover waits for it")
    yield "lock", f"server {how}connected for {since(server['since'], now)}{then}"
    yield from _problems(document)


def _service(document: Document, now: datetime) -> str:
    address = document["service"]["address"]
    if document["accepting"]:
        tls = " (TLS)" if document["service"]["tls"] else ""
        return f"accepts on {address}{tls} for {since(document['accepting_since'], now)}"
    if document["stopping"]:
        return f"stopping: does not accept on {address}"
    return f"does not accept on {address}" if address else "no socket yet"


def _engine(document: Document) -> str:
    found, grant, idle = document["upstream"], document["grant"], document["idle"]
    if idle is not None:
        return f"none for {duration(idle['for_ms'])}: {idle['reason']}"
    if grant is None:
        return "none was granted the lock yet"
    text = f"{grant['engine']}  token {grant['token']}  for {duration(grant['for_ms'])}"
    if document["rest"]["door"] == "shut":
        return f"{text}  {_rest(document['rest'])}"
    if found is None:
        return text
    if found["continuation"]:
        text += f"  streams: {found['continuation']}"
    if found["continuation_id"]:
        text += f"  continuation id {found['continuation_id'][:16]}"
    return f"{text}  ({found['problem']})" if found["problem"] else text


def models_line(models: dict[str, Document]) -> str:
    """`chat awake, 2 in flight; coder warm, 1 waiting`"""
    kinds = ("in_flight", "waiting", "parked")
    said = []
    for name, model in list(models.items())[:MODELS_MAX]:
        counts = [f"{model[kind]} {kind.replace('_', ' ')}" for kind in kinds if model[kind]]
        said.append(", ".join([f"{name} {model['state'] or 'unknown'}", *counts]))
    if len(models) > MODELS_MAX:
        said.append(f"{len(models) - MODELS_MAX} more; all: understudy pool status")
    return "; ".join(said)


def _rest(rest: Document) -> str:
    """`resting for 5m00s (gateway); a request wakes it`"""
    said = rest["engine"] or {}
    by = f" ({said['goal_by']})" if said.get("goal_by") else ""
    text = f"{said.get('state', 'resting')} for {duration(said.get('for_ms', 0))}{by}"
    if said.get("goal") == "awake":
        return f"{text}; it is being woken"
    then = "a request wakes it" if rest["wake"] == "on-request" else "wake it: understudy wake"
    return f"{text}; {then}"


def _load(load: Document) -> str:
    oldest = f" (oldest {duration(load['parked_oldest_ms'])})" if load["parked"] else ""
    text = (
        f"{load['in_flight']} in flight, {load['waiting']} waiting for an engine,"
        f" {load['parked']} parked{oldest}, {load['replaying']} replaying"
    )
    return f"{text}, {load['suspects']} suspects" if load["suspects"] else text


def _totals(document: Document) -> str:
    totals = document["totals"]
    endings: dict[str, int] = {}
    for each in totals["requests"]:
        endings[each["ending"]] = endings.get(each["ending"], 0) + each["count"]
    parts = [f"{count} {ending.replace('_', ' ')}" for ending, count in endings.items()]
    parts += [
        f"{totals['pauses']} pauses",
        f"{totals['resumes']} resumed",
        f"{totals['replayed_tokens']} tokens replayed",
    ]
    return ", ".join(parts)


def _problems(document: Document) -> Iterator[tuple[str, str]]:
    problems = document["problems"]
    for problem in problems[:PROBLEMS_MAX]:
        yield "problem", problem
    if len(problems) > PROBLEMS_MAX:
        yield "problem", f"and {len(problems) - PROBLEMS_MAX} more"


MEANWHILE = "new connections wait for 10 s (--hold-ms of the lock server), then they are refused"


def look(directory: str, error: UnderstudyError) -> tuple[Document, UnderstudyError] | None:
    """The document in place of that of the gateway that did not answer with `error`, and why there
    is none; None if no gateway was ever here."""
    guard = f"{gateway_socket(directory).removesuffix('.sock')}.lock"
    try:
        found = os.stat(guard)
    except OSError:
        return None
    pids = [each for each in procfs.holders_of(found.st_dev, found.st_ino) if each != os.getpid()]
    pid, code = (pids[0], "gateway.not_answering") if pids else (None, "gateway.offline")
    if pid is None:
        start = f"start it: gateway serve --dir {directory}"
        what = f"no gateway answers in {directory}; {MEANWHILE}; {start}"
    else:
        halted = procfs.halted(pid)
        fix = "resume it: kill -CONT" if halted == "stopped" else "if it stays so: kill -9"
        what = (
            f"the gateway, pid {pid} ({procfs.name(pid)}, {halted or 'runs'}), does not respond;"
            f" connections wait, and an init replaces it after 3 s; {fix} {pid}"
        )
    document = {"schema": 1, "online": False, "pid": pid, "dir": directory, "accepting": None}
    return {**document, "problems": [what]}, UnreachableError(code, what, cause=error.code)
