"""The pool in a pod's view: its document in, lines and faults out.

Pure. A pod without a pool file has no pool, and its view says so with None. In a pool any number of
engines may be active, resting or not started, and models without a shadow have no standby: what is
amiss is what the pool says of its models, not how many engines there are.
"""

from __future__ import annotations

from typing import Any

from plumbing.text import duration, size
from pool import status_text
from understudy.status.memory_view import Document

AWAKE, FAILED, COLD = "awake", "failed", "cold"
MODELS_SHOWN = 20  # what fits on a screen; `understudy pool status` shows all
WAITING_SHOWN = 5
NOTHING_SWITCHES = "awake models are still served, but no model switches"


def has_pool(lockserver: Document, pool: Document, *, has_socket: bool) -> bool:
    """Whether the pod has one, or should: the lock server was started with models. Locks do not say
    so: it keeps those that an earlier pod in this directory held last."""
    return "error" not in pool or has_socket or bool(lockserver.get("models"))


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
