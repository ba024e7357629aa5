"""`gms drop-kv`: free the memory of a KV pool that no engine uses.

Asks for the status first, with a short deadline, as `gms drop` does. Then it waits until the memory
is free: whoever drops it needs the memory for something else.
"""

from __future__ import annotations

import time
from typing import Any

from gms import kv_messages as msg
from gms import names
from gms.operate.upkeep import ANSWER_TIMEOUT_S, the_device
from plumbing.errors import DegradedError, UnderstudyError, WaitTimeoutError
from plumbing.text import size
from plumbing.wire.blocking import BlockingClient

POLL_S = 0.02
FREED, ALREADY_EMPTY = "freed", "already_empty"


def drop_kv(directory: str, device: str | None, timeout_s: float) -> dict[str, Any]:
    """`{schema, devices: [{device_uuid, result, pool, pool_bytes}]}`. `result` is `freed`, or
    `already_empty`: there is no KV memory; then `pool` is null.

    Raises:
        UsageError: no such device, or several and none named; UnreachableError: its server does not
        answer; DegradedError: `gms.kv_recovering`; RemoteError: `gms.kv_held`, …; WaitTimeoutError:
        `gms.kv_releasing`.
    """
    name = the_device(directory, device)
    try:
        path = names.kv_socket_path(directory, name)
        with BlockingClient(path, msg.CATALOGUE, connect_timeout_s=ANSWER_TIMEOUT_S) as client:
            dropped = _drop(client, timeout_s)
    except UnderstudyError as error:
        error.message = f"{name}: {error.message}"
        raise
    return {"schema": 1, "devices": [{"device_uuid": name, **dropped}]}


def render_dropped(device: dict[str, Any]) -> str:
    """One line about what `drop_kv` did on a device."""
    name = f"gms  {device['device_uuid']}"
    if device["result"] == ALREADY_EMPTY:
        return f"{name}  there is no KV memory"
    return f"{name}  KV pool {device['pool'][:8]} was freed: {size(device['pool_bytes'])}"


def _drop(client: BlockingClient, timeout_s: float) -> dict[str, Any]:
    status = _status(client)
    if status["state"] == "recovering":
        pids = ", ".join(f"pid {pid}" for pid in status["mapped_by"])
        raise DegradedError(
            "gms.kv_recovering",
            "the KV memory of the previous server has not been handed back yet; it is mapped by"
            f" {pids or 'processes not visible here'}: retry later, or stop them, which frees it",
        )
    if status["pool"] is None:
        return {"result": ALREADY_EMPTY, "pool": None, "pool_bytes": 0}
    pool, pool_bytes = status["pool"], status["pool_bytes"]
    if status["state"] not in ("discarded", "releasing"):  # else it is on its way already
        answer = client.request(msg.DropPoolMsg(), timeout_s=ANSWER_TIMEOUT_S).message
        assert isinstance(answer, msg.PoolDroppedMsg)
        pool, pool_bytes = answer.pool, answer.pool_bytes
    end_s = time.monotonic() + timeout_s
    while (status := _status(client))["pool"] == pool:
        if time.monotonic() > end_s:
            pids = ", ".join(f"pid {pid}" for pid in status["mapped_by"])
            why = f"it is still mapped by {pids}" if pids else "its memory is still being freed"
            raise WaitTimeoutError(
                "gms.kv_releasing",
                f"KV pool {pool[:8]} has been dropped, but after {timeout_s:g} s {why}; it is"
                " freed without this command once it can be: see `gms status`",
            )
        time.sleep(POLL_S)
    return {"result": FREED, "pool": pool, "pool_bytes": pool_bytes}


def _status(client: BlockingClient) -> dict[str, Any]:
    answer = client.request(msg.StatusMsg(), timeout_s=ANSWER_TIMEOUT_S).message
    assert isinstance(answer, msg.StatusReplyMsg)
    return answer.document
