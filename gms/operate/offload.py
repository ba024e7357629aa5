"""`gms offload`: free weights that no engine maps and of which host memory has a copy."""

from __future__ import annotations

from typing import Any

from gms import messages as msg
from gms import names
from gms.operate.upkeep import ANSWER_TIMEOUT_S, the_device
from plumbing.errors import UnderstudyError
from plumbing.text import size
from plumbing.wire.blocking import BlockingClient


def offload(directory: str, device: str | None, timeout_s: float) -> dict[str, Any]:
    """`{schema, devices: [{device_uuid, copy, freed_bytes}]}`, once the memory is proven free.

    Raises:
        UsageError: no such device, or several and none named; WaitTimeoutError: not free in time;
        RemoteError: `gms.epoch_mapped`, `gms.no_copy`, `gms.nothing_committed`, `gms.writer`.
    """
    name = the_device(directory, device)
    path = names.socket_path(directory, name)
    try:
        with BlockingClient(path, msg.CATALOGUE, connect_timeout_s=ANSWER_TIMEOUT_S) as client:
            answer = client.request(msg.OffloadMsg(), timeout_s=timeout_s).message
    except UnderstudyError as error:
        error.message = f"{name}: {error.message}"
        raise
    assert isinstance(answer, msg.OffloadedMsg)
    freed = {"device_uuid": name, "copy": answer.copy, "freed_bytes": answer.size_bytes}
    return {"schema": 1, "devices": [freed]}


def render(document: dict[str, Any]) -> str:
    """The result, with one line for each device."""
    return "\n".join(
        f"gms  {each['device_uuid']}  {size(each['freed_bytes'])} of weights are offloaded; the "
        f"copy in host memory is epoch {each['copy'][:8]}"
        for each in document["devices"]
    )
