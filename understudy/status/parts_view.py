"""The gateway, the pool and the memory service in a pod's view: their documents in, lines and
faults out. Pure.

With a lock over TCP there is no gateway, and without a pool file no pool; the view says so with
None. Streams that are parked are no fault by themselves, because a failover parks them all; one
that has been parked for longer than a failover may take is. In a pool any number of engines may be
active, resting or not started, and models without a shadow have no standby: what is amiss is what
the pool says of its models, not how many engines there are.

Three states of memory are faults: memory that has not been handed back after a restart, weights
that are out of service while engines map them, and KV memory without a server. None of them stops
the engine that serves, which looks fine; they affect the next relaunch, or the next failover.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from plumbing.text import duration, since, size
from pool import status_text

Document = Mapping[str, Any]
Engines = Mapping[int, str]  # which engine each pid belongs to

# ------------------------------------------------------------------ the gateway

PARKED_LONG_MS = 10_000  # the time for which new requests wait; a failover takes far less


def is_open(gateway: Document | None, *, is_resting: bool = False) -> bool:
    """Whether requests can come in, through the gateway or without one, and will be answered."""
    if gateway is None:
        return True
    return bool(gateway.get("accepting")) and not (is_resting and _waits_for_operator(gateway))


def _rest_of(gateway: Document | None) -> dict[str, Any]:
    """What the gateway knows of an engine that rests; empty while none does."""
    found = (gateway or {}).get("rest") or {}
    said = found.get("engine") or {}
    return {**found, **said} if said.get("state") == "resting" else {}


def _waits_for_operator(gateway: Document | None) -> bool:
    """Whether an engine rests that no request wakes."""
    rest = _rest_of(gateway)
    return rest.get("wake") == "manual" and rest.get("goal") != "awake"


def rest_line(gateway: Document | None) -> list[str]:
    """Since when the engine rests, who asked for it, and how it wakes; none while it does not."""
    rest = _rest_of(gateway)
    if not rest:
        return []
    by = f"   requested by {rest['goal_by']}" if rest.get("goal_by") else ""
    how = "run `understudy wake`" if _waits_for_operator(gateway) else "a request wakes it"
    return [f"rest   for {duration(rest.get('for_ms') or 0)}{by}   {how}"]


def gateway_lines(gateway: Document | None) -> list[str]:
    """One line, or none without a gateway."""
    if gateway is None:
        return []
    if "error" in gateway:
        return ["gateway down"]
    found = load_of(gateway)
    oldest_ms = found.get("parked_oldest_ms")
    oldest = f" (oldest {duration(oldest_ms)})" if found.get("parked") and oldest_ms else ""
    restarts = gateway.get("restarts")
    return [
        f"gateway {'accepting' if is_open(gateway) else 'not accepting'}   "
        f"{found.get('in_flight', 0)} in flight   {found.get('parked', 0)} parked{oldest}   "
        f"{found.get('replaying', 0)} replaying   "
        f"{f'restarts {restarts}   ' if restarts else ''}pid {gateway.get('pid', '-')}"
    ]


def gateway_faults(
    gateway: Document | None, lockserver: Document, *, has_pool: bool = False
) -> list[str]:
    """What is wrong with it, as sentences. In a pool streams are parked between their turns."""
    if gateway is None:
        return []
    if "error" in gateway:
        return [f"gateway: {gateway['error']}; requests wait, and are refused after 10 s"]
    faults = [str(each) for each in gateway.get("problems") or ()]
    if not is_open(gateway) and not faults:
        faults.append("the gateway does not accept connections")
    if _waits_for_operator(gateway):
        faults.append("the active engine sleeps, and no request wakes it: run `understudy wake`")
    oldest_ms = load_of(gateway).get("parked_oldest_ms") or 0
    if oldest_ms > PARKED_LONG_MS and not has_pool:
        faults.append(f"a request has been parked for {duration(oldest_ms)}")
    return faults


def load_of(gateway: Document) -> dict[str, Any]:
    """The counts of requests that the gateway has now."""
    found = gateway.get("load")
    return dict(found) if isinstance(found, dict) else {}


# ------------------------------------------------------------------ the pool

AWAKE, FAILED, COLD = "awake", "failed", "cold"
MODELS_SHOWN = 20  # what fits on a screen; `understudy pool status` shows all
WAITING_SHOWN = 5
NOTHING_SWITCHES = "awake models are still served, but no model switches"


def models_of(pool: Document | None) -> list[dict[str, Any]]:
    return list((pool or {}).get("models") or ())


def awake_engines(pool: Document | None) -> list[str]:
    """The engines that stand for awake models."""
    found = [each for each in models_of(pool) if each["state"] == AWAKE]
    return [str(each["holder"]["engine"]) for each in found if each.get("holder")]


def lacks_shadow(pool: Document, *, is_expected: bool = False) -> list[str]:
    """The awake models that have a shadow which could not take over now. `is_expected`: though the
    pool wants it to, and has not taken its room for another model."""
    found = []
    for each in models_of(pool):
        shadows = [own for own in each["engines"] if own["shadow"]]
        if is_expected:
            shadows = [own for own in shadows if own["goal"] != COLD]
        is_ready = any(own["state"] == "standby" for own in shadows)
        if each["state"] == AWAKE and shadows and not is_ready:
            found.append(str(each["model"]))
    return found


def pool_faults(pool: Document) -> list[str]:
    """What is wrong with it, as sentences."""
    if "error" in pool:
        return [f"pool: {pool['error']}; {NOTHING_SWITCHES}"]
    faults = [str(each) for each in pool.get("problems") or ()]
    if pool.get("recovering"):
        names = [each["model"] for each in models_of(pool) if each["recovering"]]
        faults.append(f"the pool is recovering: it has not heard all engines of {', '.join(names)}")
    for each in models_of(pool):
        name, waited_ms, bound_ms = each["model"], each["oldest_ticket_ms"], each["bound_ms"]
        if each["state"] == FAILED:
            faults.append(f"model {name} has failed: {each['fault'] or each['reason']}")
        if waited_ms is not None and bound_ms is not None and waited_ms > bound_ms:
            faults.append(
                f"a request for {name} has waited for {duration(waited_ms)}, longer than its bound"
                f" of {duration(bound_ms)}: see `understudy pool explain {name}`"
            )
    missing = lacks_shadow(pool, is_expected=True)
    faults += [f"the shadow of {name} cannot take over now" for name in missing]
    for device in pool.get("devices") or ():
        over = _overbooked(device)
        if over > 0:
            faults.append(
                f"{device['device']}: {size(over)} more in use than fits beside the margin; "
                f"programs outside the pool use {size(device['outside_bytes'])}"
            )
    return faults


def pool_lines(pool: Document) -> list[str]:
    """The models, who waits, and the devices."""
    if "error" in pool:
        return ["pool   down"]
    state = f"pool   {status_text.state_of(pool)}   pid {pool.get('pid', '-')}"
    return [*status_text.lines(pool, MODELS_SHOWN, WAITING_SHOWN), state]


def headline(pool: Document) -> str:
    """For the first line: what the pool serves, in a few words."""
    if "error" in pool:
        return "no pool"
    models = models_of(pool)
    awake = sum(each["state"] == AWAKE for each in models)
    waiting = sum(each["tickets"] for each in models)
    return f"{awake} of {len(models)} models awake, {waiting} waiting"


def _overbooked(device: Document) -> int:
    """How many bytes are in use that should be free."""
    if device["total_bytes"] is None or not device["outside_bytes"]:
        return 0
    used = device["booked_bytes"] + device["outside_bytes"] + device["margin_bytes"]
    return int(used - device["total_bytes"])


# ------------------------------------------------------------------ the memory service


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
