"""The memory service in a pod's view: its devices' documents in, lines and faults out.

Pure. Three states are faults: memory that has not been handed back after a restart, weights that
are out of service while engines map them, and KV memory without a server. None of them stops the
engine that serves, which looks fine; they affect the next relaunch, or the next failover.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from plumbing.text import since, size

Document = Mapping[str, Any]
Engines = Mapping[int, str]  # which engine each pid belongs to


def devices(part: Document) -> Sequence[Document]:
    """A device's server reports itself, the service's supervisor all its devices."""
    found = part.get("devices", [part] if "device_uuid" in part else [])
    return found if isinstance(found, (list, tuple)) else []


def engines_by_pid(engines: Iterable[Document]) -> dict[int, str]:
    """The engine that each process belongs to, from the engines' documents."""
    found: dict[int, str] = {}
    for part in engines:
        engine, backend = part.get("engine") or {}, part.get("backend") or {}
        pids = [engine.get("pid"), *(backend.get("pids") or {}).values()]
        found |= {pid: str(engine.get("id")) for pid in pids if pid}
    return found


def memory_lines(part: Document, now: datetime, engines: Engines) -> list[str]:
    """A line for each device of `part`, and lines for memory besides the committed weights."""
    if "error" in part:
        return [f"gms    {part['name']}   down"]
    return [
        line for device in devices(part) for line in (_line(device, now), *_rest(device, engines))
    ]


def memory_faults(part: Document, engines: Engines) -> list[str]:
    """The faults of the memory, as sentences."""
    if "error" in part:
        return [f"gms {part['name']} down: {part['error']}; engines keep serving, new ones wait"]
    return [fault for device in devices(part) for fault in _faults(device, engines)]


def _faults(device: Document, engines: Engines) -> list[str]:
    kv = device.get("kv") or {}
    if "reason" not in kv:
        return _weights_faults(device, engines)
    away = (
        f"the KV memory of {device.get('device_uuid')} has no server: {kv['reason']}; a waking "
        "engine waits for it, or starts with an empty private cache"
    )
    return [*_weights_faults(device, engines), away]


def _weights_faults(device: Document, engines: Engines) -> list[str]:
    name, state = device.get("device_uuid"), device.get("state")
    if state == "recovering":
        holders = _holders(_unowned(device), device, engines)
        return [f"memory of {name} is recovering: mapped by {holders}"]
    if device.get("superseded_bytes") and not device.get("committed_bytes"):
        loader = "an engine is loading" if state == "staging" else "the next relaunch loads"
        return [
            f"the weights of {name} are out of service but still mapped by {_readers(device)};"
            f" {loader} a second copy"
        ]
    return []


def _line(device: Document, now: datetime) -> str:
    sessions, waiting = device.get("sessions") or [], device.get("waiting") or []
    count = device.get("restarts_total")
    restarts = f"restarts {count}, last {since(device.get('since'), now)} ago   " if count else ""
    return (
        f"gms    {device.get('device_uuid')}   {device.get('state')}   "
        f"{device.get('tag', 'weights')} {size(device.get('committed_bytes'))}   "
        f"{len(sessions)} session{'s' * (len(sessions) != 1)}   {len(waiting)} waiting   "
        f"{restarts}pid {device.get('pid', '-')}"
    )


def _rest(device: Document, engines: Engines) -> list[str]:
    """The KV memory; copies that are out of service, and the processes that map them."""
    lines = _kv(device.get("kv") or {})
    if device.get("superseded_bytes"):
        lines.append(
            f"       superseded {size(device['superseded_bytes'])}, mapped by {_readers(device)}"
        )
    releasing = [each for each in _unowned(device) if each.get("phase") == "releasing"]
    if releasing:
        total_bytes = sum(each.get("size_bytes") or 0 for each in releasing)
        lines.append(
            f"       releasing {size(total_bytes)}, mapped by"
            f" {_holders(releasing, device, engines)}"
        )
    return lines


def _kv(kv: Document) -> list[str]:
    """A line for KV memory that there is, or whose server is away."""
    if "reason" in kv:
        return [f"       kv {kv.get('state')}: {kv['reason']}"]
    if not kv.get("pool"):
        return []
    holder, waiting = kv.get("holder") or {}, kv.get("waiting") or []
    of = f" {holder.get('engine')}" if holder else ""
    if kv.get("state") == "idle":
        of = " (kept for the next engine; `gms drop-kv` frees it)"
    return [
        f"       kv {kv.get('state')}{of} {size(kv.get('pool_bytes'))}   {len(waiting)} waiting   "
        f"pid {kv.get('pid', '-')}"
    ]


def _readers(device: Document) -> str:
    """The engines that map epochs other than the device's current one."""
    names = dict.fromkeys(
        str(each.get("engine"))
        for each in device.get("sessions") or ()
        if each.get("mode") == "ro" and each.get("epoch") not in (None, device.get("epoch"))
    )
    return ", ".join(names) or "unknown engines"


def _unowned(device: Document) -> Sequence[Document]:
    return device.get("unowned") or ()


def _holders(epochs: Iterable[Document], device: Document, engines: Engines) -> str:
    """`pid 17 (engine-0), pid 18`: the processes that hold `epochs`."""
    spoken = [*(device.get("sessions") or ()), *(device.get("waiting") or ())]
    known = {**engines, **{each.get("pid"): each.get("engine") for each in spoken}}
    pids = dict.fromkeys(pid for epoch in epochs for pid in epoch.get("holders") or ())
    named = [f"pid {pid} ({known[pid]})" if pid in known else f"pid {pid}" for pid in pids]
    return ", ".join(named) or "processes not visible here"
