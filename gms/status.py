"""What `gms status` collects from the sockets of a directory, and how it is shown: weights and KV
memory.

It works with a server down: the journal then shows what was committed, marked as an offline view.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gms import messages as msg
from gms import names
from gms.server import journal
from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.pod.models import device_of
from plumbing.pod.paths import gms_journal, gms_socket, read_device_names
from plumbing.text import counted, size
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Message

TIMEOUT_S = 5.0

_SERVER_FILE = re.compile(rf"gms_({names.PLACE_PATTERN})_{names.WEIGHTS}\.(sock|json)")

AnswerT = TypeVar("AnswerT", bound=Message)


def ask(
    directory: str, device: str, question: Message, answer: type[AnswerT], timeout_s: float
) -> AnswerT:
    """The answer of the device's server, on a connection of its own. Blocking."""
    path = gms_socket(directory, device)
    with BlockingClient(path, msg.CATALOGUE, connect_timeout_s=timeout_s) as client:
        found = client.request(question, timeout_s=timeout_s).message
    if not isinstance(found, answer):
        raise msg.unexpected_answer(found.TYPE, question.TYPE)
    return found


def status_of(directory: str, device: str, timeout_s: float) -> dict[str, Any]:
    """The server's status document; raises as `ask`."""
    answer = msg.StatusReplyMsg
    return ask(directory, device, msg.StatusMsg(), answer, timeout_s).document


def collect(directory: str) -> dict[str, Any]:
    """One document for each of `devices_in`."""
    found = devices_in(directory)
    with ThreadPoolExecutor(len(found)) as threads:  # one that hangs must not delay the others
        devices = list(threads.map(lambda each: _ask(directory, each), found))
    return {"schema": 1, "online": all(d["online"] for d in devices), "devices": devices}


def devices_in(directory: str) -> list[str]:
    """Every device that has a socket in `directory`, or should have one. While no server has one,
    those that had a server: the last one may have served others."""
    try:
        listed = [match for match in map(_SERVER_FILE.fullmatch, os.listdir(directory)) if match]
        found = {match[1] for match in listed if match[2] == "sock"}
        if served := set(map(device_of, found)):
            found |= set(read_device_names(directory)) - served
        found = found or {match[1] for match in listed}
    except OSError as error:
        raise UnreachableError(
            "gms.no_devices", f"cannot read {directory}: {error.strerror}; check --dir"
        ) from error
    if not found:
        raise UnreachableError(
            "gms.no_devices",
            f"no memory service in {directory}; start one with `gms serve --dir {directory}`",
        )
    return sorted(found)


def render(document: dict[str, Any]) -> str:
    """The document as text."""
    return "\n".join(line for device in document["devices"] for line in _lines(device))


def _lines(device: dict[str, Any]) -> Iterator[str]:
    name = f"gms  {device['device_uuid']}"
    if not device["online"]:
        was = f"epoch {device['epoch'][:8]} was committed" if device["epoch"] else "was empty"
        yield f"{name}  offline view: {was}"
        return
    driver, sessions = device["driver"], device["sessions"]
    kind = f"{device['memory']} memory"
    if driver:
        context = "with a context" if driver["has_context"] else "no context"
        kind = f"{device['memory']} {driver['cuda_version']} memory ({context})"
    yield (
        f"{name}  {device['state']}, {kind}, committed {size(device['committed_bytes'])}, "
        f"staging {size(device['staging_bytes'])} of {size(device['capacity_bytes'])}, "
        f"{counted(len(sessions), 'session')}, {len(device['waiting'])} waiting"
    )
    yield from render_kv(device.get("kv"))
    for each in sessions:
        shown = f"  {each['engine']:12} {each['mode']:4} since {each['since']}"
        if each.get("total_bytes"):
            shown += f", {100 * each['done_bytes'] / each['total_bytes']:.0f} % loaded"
        yield shown
    yield from (_waiter(each, each["mode"]) for each in device["waiting"])
    if device["superseded_bytes"]:
        yield f"  superseded {size(device['superseded_bytes'])}, until its readers exit"
    for epoch in device["unowned"]:
        # A server that has just started does not know yet how large what it found is.
        known = f" {size(epoch['size_bytes'])}," if epoch["size_bytes"] else ""
        by = f"mapped by {held_by([epoch])}"
        yield f"  epoch {epoch['epoch'][:8]} is {epoch['phase']},{known} {by}"
    if device["problem"]:
        yield f"  problem: {device['problem']}"


def _waiter(waiter: dict[str, Any], what: str) -> str:
    until = f"until {waiter['deadline']}: {waiter['message']}"
    return f"  {waiter['engine']:12} waits for {what} {until}"


def held_by(epochs: Iterable[dict[str, Any]]) -> str:
    """`pid 17, pid 18`: the processes that hold the unowned `epochs`."""
    pids = dict.fromkeys(pid for epoch in epochs for pid in epoch["holders"])
    return ", ".join(f"pid {pid}" for pid in pids) or "processes not visible here"


def _ask(directory: str, device: str) -> dict[str, Any]:
    try:
        return status_of(directory, device, TIMEOUT_S)
    except UnderstudyError as error:
        record = journal.peek(gms_journal(directory, device))
        return {
            "device_uuid": device,
            "tag": names.WEIGHTS,
            "online": False,
            "state": "offline",
            "reason": error.message,
            "epoch": record.epoch if record else None,
            "committed_bytes": record.size_bytes if record else 0,
        }


def render_kv(kv: dict[str, Any] | None) -> list[str]:
    """Lines about it: none while there is no KV memory and no engine wants any."""
    if kv is None:
        return []
    if "pool" not in kv:
        return [f"  kv           {kv['state']}: {kv['problem']}"]
    lines = []
    if kv["pool"] is not None:
        holder = kv["holder"]
        lent = "lent" if kv["state"] == "lent" else "last lent"
        whose = f", {lent} to {holder['engine']} (token {holder['token']})" if holder else ""
        written = "" if kv["is_written"] else ", nothing written yet"
        lines.append(
            f"  kv           {kv['state']}, pool {kv['pool'][:8]} {size(kv['pool_bytes'])}"
            f"{whose}{written}"
        )
        if kv["discarded"]:
            lines.append(f"               discarded: {kv['discarded']}")
    lines += [_waiter(each, "kv") for each in kv["waiting"]]
    if kv["problem"]:
        lines.append(f"  problem: {kv['problem']}")
    return lines
