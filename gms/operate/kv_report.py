"""What `gms status` and `gms inspect` collect and show of a device's KV memory."""

from __future__ import annotations

import os
from typing import Any

from gms import kv_messages as msg
from gms import names
from plumbing.errors import UnderstudyError
from plumbing.text import size
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Message

TIMEOUT_S = 5.0


def ask_kv(directory: str, device: str, question: Message) -> dict[str, Any] | None:
    """The document of the device's KV server; None if it has never had one."""
    path = names.kv_socket_path(directory, device)
    if not os.path.exists(path):
        return None
    try:
        with BlockingClient(path, msg.CATALOGUE, connect_timeout_s=TIMEOUT_S) as client:
            answer = client.request(question, timeout_s=TIMEOUT_S).message
        assert isinstance(answer, msg.StatusReplyMsg | msg.InspectReplyMsg)
    except UnderstudyError as error:
        away = {"device_uuid": device, "tag": names.KV, "state": "offline", "online": False}
        return {**away, "reason": error.message}
    return {**answer.document, "online": True}


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
