"""What operators do to committed weights: verify that they are what was written, drop them."""

from __future__ import annotations

import os
from typing import Any

from gms import messages as msg
from gms import names
from gms.client import Reader, open_session
from gms.core.upkeep import VERIFY_MS
from gms.report import devices_in
from understudy.errors import RemoteError, UnderstudyError, UsageError
from understudy.wire.blocking import BlockingClient

ANSWER_TIMEOUT_S = 5.0
VERIFY_TIMEOUT_S = VERIFY_MS / 1000 + ANSWER_TIMEOUT_S  # the server says so itself before that
ATTACH_WAIT_S = 5.0

# What `verify` says of one device, the gravest last.
INTACT, PENDING, ALTERED = "intact", "pending", "altered"


def verify(directory: str, device: str | None) -> dict[str, Any]:
    """Compare the bytes of every device's committed epoch, or of one, with the writer's digest.

    `{schema, result, devices: [{device_uuid, epoch, result, expected, found, reader}]}`, where a
    result is `intact`, `pending` (no digest yet) or `altered`.

    Raises:
        UnreachableError: no server; UsageError: no such device; RemoteError: nothing committed, …
    """
    checked = [_verify(directory, *found) for found in _chosen(directory, device)]
    order = (INTACT, PENDING, ALTERED)
    gravest = max((item["result"] for item in checked), key=order.index)
    return {"schema": 1, "result": gravest, "devices": checked}


def drop(
    directory: str, device: str | None, *, epoch: str | None, even_if_mapped: bool
) -> dict[str, Any]:
    """Take what is committed out of service: `{schema, devices: [{device_uuid, epoch, readers}]}`.

    Raises:
        UsageError: no such device, or several and none named; RemoteError: `gms.epoch_mapped`, …
    """
    found = _chosen(directory, device)
    if len(found) > 1:
        listed = ", ".join(name for name, _ in found)
        raise UsageError("gms.which_device", f"there are {listed}; say which with --device")
    name, tag = found[0]
    with _client(directory, name, tag) as client:
        answer = client.request(msg.Drop(epoch, even_if_mapped), timeout_s=ANSWER_TIMEOUT_S).message
    assert isinstance(answer, msg.Dropped)
    dropped = {"device_uuid": name, "epoch": answer.epoch, "readers": list(answer.readers)}
    return {"schema": 1, "devices": [dropped]}


def _verify(directory: str, device: str, tag: str) -> dict[str, Any]:
    try:
        with _client(directory, device, tag) as client:
            answer = client.request(msg.Verify(), timeout_s=VERIFY_TIMEOUT_S).message
        assert isinstance(answer, msg.Verified)
        epoch, expected, found, by = answer.epoch, answer.expected, answer.found, answer.reader
    except RemoteError as error:
        if error.code != "gms.no_verifier" or not device.startswith("HOST-"):
            raise  # on a GPU, reading here would take a context's memory from the engines
        epoch, expected, found = _read_here(directory, device, tag)
        by = f"gms verify (pid {os.getpid()})"
    result = PENDING if expected is None else INTACT if found == expected else ALTERED
    return {
        "device_uuid": device,
        "epoch": epoch,
        "result": result,
        "expected": expected,
        "found": found,
        "reader": by,
    }


def _read_here(directory: str, device: str, tag: str) -> tuple[str, str | None, str]:
    """Attach as one more reader, and compute the digest in this process."""
    session = open_session(
        directory,
        device,
        engine="gms-verify",
        incarnation=f"gms-verify-{os.getpid()}",
        mode="ro",
        identity=None,
        wait_s=ATTACH_WAIT_S,
        tag=tag,
    )
    assert isinstance(session, Reader)  # it asked for `ro`
    with session, _client(directory, device, tag) as client:
        answer = client.request(msg.Status(), timeout_s=ANSWER_TIMEOUT_S).message
        assert isinstance(answer, msg.StatusReply)
        if answer.document["epoch"] != session.epoch:
            raise UnderstudyError(
                "gms.stale_epoch", "another epoch was committed meanwhile; verify again"
            )
        found = session.digest()
        assert found is not None  # nobody told it to stop
        digest = answer.document["digest"]
        return session.epoch, None if digest == PENDING else str(digest), found


def _chosen(directory: str, device: str | None) -> list[tuple[str, str]]:
    found = devices_in(directory)
    if device is None:
        return found
    chosen = [(name, tag) for name, tag in found if name == device]
    if not chosen:
        listed = ", ".join(name for name, _ in found)
        raise UsageError("gms.bad_device", f"there is no device {device} here; there are {listed}")
    return chosen


def _client(directory: str, device: str, tag: str) -> BlockingClient:
    path = names.socket_path(directory, device, tag)
    return BlockingClient(path, msg.CATALOGUE, connect_timeout_s=ANSWER_TIMEOUT_S)
