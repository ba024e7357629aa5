"""The operator's commands: `gms verify`, `gms drop` and `gms drop-kv`.

Each requests the status first, with a short deadline: a stopped server must not carry out much
later what its operator has given up on. `verify` reads the memory itself, as one more reader; on a
GPU that takes a CUDA context. `drop-kv` frees a KV region that no engine uses, and waits until the
memory is free, because its operator needs the memory for something else.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from gms import messages as msg
from gms import names
from gms.client import Reader, open_session
from gms.status import ask, devices_in, held_by, status_of
from plumbing.errors import (
    DegradedError,
    UnderstudyError,
    UnreachableError,
    UsageError,
    WaitTimeoutError,
)
from plumbing.text import size

ANSWER_TIMEOUT_S = 5.0
ATTACH_WAIT_MS = 5000
POLL_S = 0.02

EMPTY, INTACT, PENDING, RECOVERING = "empty", "intact", "pending", "recovering"
UNREACHABLE, FAILED, ALTERED = "unreachable", "failed", "altered"
# The results for one device, the gravest last, and the exit code if none is graver.
EXIT_CODES = {
    EMPTY: 0,
    INTACT: 0,
    PENDING: 4,
    RECOVERING: 4,
    UNREACHABLE: 3,
    FAILED: 1,
    ALTERED: 1,
}
FREED, ALREADY_EMPTY = "freed", "already_empty"


def verify(directory: str, device: str | None) -> dict[str, Any]:
    """Compare the bytes of every device's committed epoch, or of one, with the writer's digest.

    `{schema, result, devices: [{device_uuid, result, epoch, expected, found, reader, error}]}`. A
    device's result is `intact`, `altered`, `pending` (no digest to compare with yet), `empty`
    (nothing is committed), `recovering`, `unreachable` or `failed`; the document's is the gravest.
    What does not apply is null; `error` is `{code, message, details}`.
    """
    checked = [_result(directory, name) for name in _chosen(directory, device)]
    gravest = max((item["result"] for item in checked), key=list(EXIT_CODES).index)
    return {"schema": 1, "result": gravest, "devices": checked}


def render(document: dict[str, Any]) -> str:
    """What one of these commands found or did, with one line for each device."""
    return "\n".join(f"gms  {_line(device)}" for device in document["devices"])


def _line(device: dict[str, Any]) -> str:
    result, epoch = device.get("result"), str(device.get("epoch"))[:8]
    if "readers" in device:
        said = f"epoch {epoch} is out of service"
        if device["readers"]:
            said += f"; its memory is freed when {', '.join(device['readers'])} leave"
    elif result == FREED:
        said = f"KV pool {device['pool'][:8]} was freed: {size(device['pool_bytes'])}"
    elif device.get("error") is not None:  # whose message begins with the name
        return f"{device['error']['message']} [{device['error']['code']}]"
    else:
        said = {
            ALREADY_EMPTY: "there is no KV memory",
            EMPTY: "nothing is committed",
            RECOVERING: "recovering: the committed epoch has not been handed back yet",
            PENDING: f"epoch {epoch} has no digest yet to compare with",
        }.get(str(result), f"epoch {epoch} is {result}, verified by {device.get('reader')}")
    return f"{device['device_uuid']}  {said}"


def drop(
    directory: str, device: str | None, *, epoch: str | None, even_if_mapped: bool
) -> dict[str, Any]:
    """Take what is committed out of service: a `DropDocument`."""
    name = the_device(directory, device)
    with _naming(name):
        status = status_of(directory, name, ANSWER_TIMEOUT_S)
        if status["state"] == "recovering":
            raise DegradedError(
                "gms.recovering",
                "the committed epoch has not been handed back yet; it is mapped by "
                f"{held_by(status['unowned'])}: retry later, or stop them, which frees it",
            )
        request = msg.DropMsg(epoch, even_if_mapped)
        answer = ask(directory, name, request, msg.DroppedMsg, ANSWER_TIMEOUT_S)
    dropped = {"device_uuid": name, "epoch": answer.region, "readers": list(answer.readers)}
    return {"schema": 1, "devices": [dropped]}


def the_device(directory: str, device: str | None) -> str:
    """`device`, or the only one there is."""
    found = _chosen(directory, device)
    if device is None:  # host copies are meant only by their names
        found = [each for each in found if not names.is_offload(each)] or found
    if len(found) > 1:
        raise UsageError(
            "gms.which_device", f"there are {', '.join(found)}; choose one with --device"
        )
    return found[0]


def _result(directory: str, device: str) -> dict[str, Any]:
    """What became of one device: an error, too, is a result."""
    nothing = dict.fromkeys(("epoch", "expected", "found", "reader", "error"))
    try:
        with _naming(device):
            found = _verify(directory, device)
    except (UnreachableError, WaitTimeoutError) as error:
        found = {"result": UNREACHABLE, "error": error.to_dict()}
    except UnderstudyError as error:
        found = {"result": FAILED, "error": error.to_dict()}
    return {"device_uuid": device, **nothing, **found}


def _verify(directory: str, device: str) -> dict[str, Any]:
    status = status_of(directory, device, ANSWER_TIMEOUT_S)
    if status["state"] != "committed":
        return {"result": RECOVERING if status["state"] == "recovering" else EMPTY}
    if status["digest"] == PENDING:
        return {"result": PENDING, "epoch": status["epoch"]}
    me = msg.AttachMsg("gms-verify", f"gms-verify-{os.getpid()}", "ro", wait_ms=ATTACH_WAIT_MS)
    session = open_session(directory, device, me)
    assert isinstance(session, Reader)  # it asked for `ro`
    with session:
        status = status_of(directory, device, ANSWER_TIMEOUT_S)
        if status["epoch"] != session.epoch:
            raise UnderstudyError(
                "gms.stale_epoch", "another epoch was committed meanwhile; verify again"
            )
        found = session.digest()
    result, by = INTACT if found == status["digest"] else ALTERED, f"gms verify (pid {os.getpid()})"
    digests = {"expected": status["digest"], "found": found, "reader": by}
    return {"result": result, "epoch": session.epoch, **digests}


def _chosen(directory: str, device: str | None) -> list[str]:
    found = devices_in(directory)
    if device is None:
        return found
    if device not in found:
        raise UsageError(
            "gms.bad_device", f"unknown device {device!r}; this service has {', '.join(found)}"
        )
    return [device]


@contextlib.contextmanager
def _naming(device: str) -> Iterator[None]:
    """Errors name the device: a server writes `this device`, and a silent one nothing."""
    try:
        yield
    except UnderstudyError as error:
        error.message = f"{device}: {error.message}"
        raise


def drop_kv(directory: str, device: str | None, timeout_s: float) -> dict[str, Any]:
    """`{schema, devices: [{device_uuid, result, pool, pool_bytes}]}`. `result` is `freed`, or
    `already_empty`: there is no KV memory; then `pool` is null.
    """
    name = the_device(directory, device)
    with _naming(name):
        dropped = _drop_pool(directory, name, timeout_s)
    return {"schema": 1, "devices": [{"device_uuid": name, **dropped}]}


def _drop_pool(directory: str, device: str, timeout_s: float) -> dict[str, Any]:
    status = status_of(directory, device, ANSWER_TIMEOUT_S)["kv"]
    if status["state"] == "recovering":
        raise DegradedError(
            "gms.kv_recovering",
            "the KV memory of the previous server has not been handed back yet; it is mapped by"
            f" {_pids(status) or 'processes not visible here'}: retry later, or stop them, which"
            " frees it",
        )
    if status["pool"] is None:
        return {"result": ALREADY_EMPTY, "pool": None, "pool_bytes": 0}
    pool, pool_bytes = status["pool"], status["pool_bytes"]
    if status["state"] not in ("discarded", "releasing"):  # else it is on its way already
        drop = msg.DropMsg(is_kv=True)
        answer = ask(directory, device, drop, msg.DroppedMsg, ANSWER_TIMEOUT_S)
        pool, pool_bytes = answer.region, answer.size_bytes
    end_s = time.monotonic() + timeout_s
    while (status := status_of(directory, device, ANSWER_TIMEOUT_S)["kv"])["pool"] == pool:
        if time.monotonic() > end_s:
            pids = _pids(status)
            why = f"it is still mapped by {pids}" if pids else "its memory is still being freed"
            raise WaitTimeoutError(
                "gms.kv_releasing",
                f"KV pool {pool[:8]} has been dropped, but after {timeout_s:g} s {why}; it is"
                " freed without this command once it can be: see `gms status`",
            )
        time.sleep(POLL_S)
    return {"result": FREED, "pool": pool, "pool_bytes": pool_bytes}


def _pids(status: dict[str, Any]) -> str:
    return ", ".join(f"pid {pid}" for pid in status["mapped_by"])
