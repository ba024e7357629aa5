"""What `gms status` collects from the sockets of a directory, and how it is shown: weights and KV
memory.

It works with a server down: the journal then shows what was committed, marked as an offline view.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gms import names
from gms.questions import status_of
from gms.server import journal
from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.service.files import read_json
from plumbing.text import size

TIMEOUT_S = 5.0

_SERVER_FILE = re.compile(rf"gms_({names.PLACE_PATTERN})_{names.WEIGHTS}\.(sock|json)")
_ENGINE_STATE = re.compile(r"engine_.+\.json")


def collect(directory: str) -> dict[str, Any]:
    """One document for every device that has, or had, a server in `directory`."""
    found = devices_in(directory)
    with ThreadPoolExecutor(len(found)) as threads:  # one that hangs must not delay the others
        devices = list(threads.map(lambda each: _ask(directory, each), found))
    return {"schema": 1, "online": all(d["online"] for d in devices), "devices": devices}


def devices_in(directory: str) -> list[str]:
    """Every device that has, or had, a server in `directory`."""
    try:
        listed = map(_SERVER_FILE.fullmatch, os.listdir(directory))
        found = sorted({match[1] for match in listed if match})
    except OSError as error:
        raise UnreachableError(
            "gms.no_devices", f"cannot read {directory}: {error.strerror}; check --dir"
        ) from error
    if not found:
        raise UnreachableError(
            "gms.no_devices",
            f"no memory service in {directory}; start one with `gms serve --dir {directory}`",
        )
    return found


def render(document: dict[str, Any]) -> str:
    """The document as text."""
    lines = []
    for device in document["devices"]:
        lines.append(_headline(device))
        if not device["online"]:
            continue
        lines += render_kv(device.get("kv"))
        lines += [_session(session) for session in device["sessions"]]
        lines += [_waiter(waiter) for waiter in device["waiting"]]
        if device["superseded_bytes"]:
            lines.append(_superseded(device))
        for epoch in device["unowned"]:
            # A server that has just started does not know yet how large what it found is.
            known = f" {size(epoch['size_bytes'])}," if epoch["size_bytes"] else ""
            lines.append(
                f"  epoch {epoch['epoch'][:8]} is {epoch['phase']},{known}"
                f" mapped by {held_by([epoch])}"
            )
        if device["problem"]:
            lines.append(f"  problem: {device['problem']}")
    return "\n".join(lines)


def name_holders(directory: str, device: dict[str, Any]) -> None:
    """Add the engine, where known, to each pid that holds an unowned epoch.

    From the device's own sessions, and from the engines' state files: a stopped process, the one
    that operators look for, has no session with a restarted server.
    """
    if not any(epoch["holders"] for epoch in device["unowned"]):
        return
    engines = _engines_on_file(directory)
    engines |= {each["pid"]: each["engine"] for each in device["sessions"] + device["waiting"]}
    for epoch in device["unowned"]:
        known = [pid for pid in epoch["holders"] if pid in engines]
        epoch["holder_engines"] = {str(pid): engines[pid] for pid in known}


def held_by(epochs: Iterable[dict[str, Any]]) -> str:
    """`pid 17 (engine-0), pid 18`: the processes that hold the unowned `epochs`."""
    engines: dict[str, str | None] = {}
    for epoch in epochs:
        known = epoch.get("holder_engines", {})
        engines |= {str(pid): known.get(str(pid)) for pid in epoch["holders"]}
    named = [f"pid {pid} ({engine})" if engine else f"pid {pid}" for pid, engine in engines.items()]
    return ", ".join(named) or "processes not visible here"


def _ask(directory: str, device: str) -> dict[str, Any]:
    try:
        document = status_of(directory, device, TIMEOUT_S)
        name_holders(directory, document)
        return {**document, "online": True, "kv": look_at_kv(directory, device)}
    except UnderstudyError as error:
        record = journal.peek(names.journal_path(directory, device))
        return {
            "device_uuid": device,
            "tag": names.WEIGHTS,
            "online": False,
            "state": "offline",
            "reason": error.message,
            "epoch": record.epoch if record else None,
            "committed_bytes": record.size_bytes if record else 0,
        }


def _engines_on_file(directory: str) -> dict[int, str]:
    """The engine of each pid, from the engines' state files."""
    engines: dict[int, str] = {}
    for name in filter(_ENGINE_STATE.fullmatch, os.listdir(directory)):
        try:
            document = read_json(os.path.join(directory, name)) or {}
            engine, pids = document["engine"], document["backend"]["pids"]
            engines |= dict.fromkeys((engine["pid"], *pids.values()), engine["id"])
        except (UnderstudyError, OSError, KeyError, TypeError, AttributeError):
            continue  # not ours to judge: the pid stays without a name
    return engines


def _headline(device: dict[str, Any]) -> str:
    name = f"gms  {device['device_uuid']}"
    if not device["online"]:
        was = f"epoch {device['epoch'][:8]} was committed" if device["epoch"] else "was empty"
        return f"{name}  offline view: {was}"
    committed, sessions = size(device["committed_bytes"]), len(device["sessions"])
    return (
        f"{name}  {device['state']}, {_memory(device)}, committed {committed}, "
        f"staging {size(device['staging_bytes'])} of {size(device['capacity_bytes'])}, "
        f"{sessions} session{'s' * (sessions != 1)}, {len(device['waiting'])} waiting"
        f"{_restarts(device)}"
    )


def _restarts(device: dict[str, Any]) -> str:
    count = device.get("restarts_total")
    return f", restarts {count} (last {device['since']})" if count else ""


def _superseded(device: dict[str, Any]) -> str:
    """The readers of superseded epochs, and a warning if nothing else is in service."""
    shown = device["epoch"]  # what is committed, or being loaded
    readers = dict.fromkeys(
        each["engine"]
        for each in device["sessions"]
        if each["mode"] == "ro" and each["epoch"] not in (shown, None)
    )
    mapped = f", mapped by {', '.join(readers)}" if readers else ""
    line = f"  superseded {size(device['superseded_bytes'])}{mapped}"
    if not device["committed_bytes"] and device["state"] != "recovering":
        line += "; nothing is in service: the next relaunch loads a second copy"
    return line


def _memory(device: dict[str, Any]) -> str:
    """The kind of memory, and the facts about its driver."""
    driver = device["driver"]
    if not driver:
        return f"{device['memory']} memory"
    context = "with a context" if driver["has_context"] else "no context"
    return f"{device['memory']} {driver['cuda_version']} memory ({context})"


def _session(session: dict[str, Any]) -> str:
    shown = f"  {session['engine']:12} {session['mode']:4} since {session['since']}"
    if session.get("total_bytes"):
        shown += f", {100 * session['done_bytes'] / session['total_bytes']:.0f} % loaded"
    return shown


def _waiter(waiter: dict[str, Any]) -> str:
    return (
        f"  {waiter['engine']:12} waits for {waiter['mode']} until {waiter['deadline']}: "
        f"{waiter['message']}"
    )


def look_at_kv(directory: str, device: str) -> dict[str, Any] | None:
    """The document of the device's KV memory; None if it was never served."""
    if not os.path.exists(names.socket_path(directory, device, names.KV)):
        return None
    try:
        document = status_of(directory, device, TIMEOUT_S, names.KV)
    except UnderstudyError as error:
        away = {"device_uuid": device, "tag": names.KV, "state": "offline", "online": False}
        return {**away, "reason": error.message}
    return {**document, "online": True}


def render_kv(kv: dict[str, Any] | None) -> list[str]:
    """Lines about it: none while there is no KV memory and nobody wants any."""
    if kv is None:
        return []
    if "pool" not in kv:
        return [f"  kv           {kv['state']}: {kv.get('reason') or kv.get('problem')}"]
    lines = []
    if kv["pool"] is not None:
        holder = kv["holder"]
        whose = f", lent to {holder['engine']} (token {holder['token']})" if holder else ""
        whose = whose if kv["state"] == "lent" else whose.replace("lent to", "last lent to")
        written = "" if kv["is_written"] else ", nothing written yet"
        lines.append(
            f"  kv           {kv['state']}, pool {kv['pool'][:8]} {size(kv['pool_bytes'])}"
            f"{whose}{written}"
        )
        if kv["discarded"]:
            lines.append(f"               discarded: {kv['discarded']}")
    lines += [
        f"  {each['engine']:12} waits for kv until {each['deadline']}: {each['message']}"
        for each in kv["waiting"]
    ]
    if kv["problem"]:
        lines.append(f"  problem: {kv['problem']}")
    return lines
