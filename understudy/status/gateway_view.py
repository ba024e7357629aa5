"""The gateway in a pod's view: its document in, a line and faults out.

Pure. With a lock over TCP there is no gateway, and the view says so with None. Streams that are
parked are no fault by themselves, because a failover parks them all; one that has been parked for
longer than a failover may take is.
"""

from __future__ import annotations

from typing import Any

from plumbing.text import duration
from understudy.status.memory_view import Document

PARKED_LONG_MS = 10_000  # the time for which new requests wait; a failover takes far less


def has_gateway(lockserver: Document, gateway: Document, *, has_socket: bool) -> bool:
    """Whether the pod has one, or should: what the lock server says counts, then what is there."""
    is_missed = has_socket if "error" in lockserver else needs_gateway(lockserver)
    return "error" not in gateway or is_missed


def needs_gateway(lockserver: Document) -> bool:
    """Whether requests can come in through a gateway only. Without a service address there are
    none, as with a lock over TCP."""
    return bool(lockserver.get("service"))


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
