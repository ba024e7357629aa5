"""Checks of a pool: whether it decides, whether it runs its file, and whether its models can share
their devices. Pure. A pod without a pool file has nothing to check here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from plumbing.part.format import duration, size
from pool.core.states import HOST
from pool.core.victims import IDLE_MS_MAX
from pool.settings import ModelSettings, PoolFile
from understudy.doctor.facts import GMS, PodFacts
from understudy.doctor.findings import Finding, HealthCheck, failed, passed, skipped, warned
from understudy.status.pool_view import AWAKE, FAILED, NOTHING_SWITCHES, models_of

Models = Mapping[str, Mapping[str, Any]]  # of the pool's status, by name

NO_POOL = "this pod has no pool file"
NO_FILE = "the pool file cannot be read here; see the check of the pool file"
NOT_RUNNING = "no pool answers, so sizes and devices are not known"


def pool(facts: PodFacts) -> Finding:
    """It decides which models are awake."""
    found = facts.view.get("pool")
    if found is None:
        return skipped(NO_POOL)
    if "error" in found:
        return failed(
            f"no pool answers, so {NOTHING_SWITCHES}: {found['error']}",
            "start it: `pool serve --file FILE` with the same --dir; requests for models that are"
            " not awake wait for it",
        )
    if found["problems"]:
        return warned("; ".join(found["problems"]), "see `understudy pool status`")
    if found["recovering"]:
        names = [each["model"] for each in models_of(found) if each["recovering"]]
        return warned(
            f"it has not heard all engines of {', '.join(names)} since its start",
            "start or resume these engines' supervisors; see `understudy pool explain`",
        )
    bad = [each for each in models_of(found) if each["state"] == FAILED]
    if bad:
        return failed(
            "; ".join(f"{each['model']} has failed: {each['fault']}" for each in bad),
            f"remove the cause, then `understudy pool reset {bad[0]['model']}`",
        )
    awake = sum(each["state"] == AWAKE for each in models_of(found))
    return passed(f"{awake} of {len(models_of(found))} models are awake")


def pool_file(facts: PodFacts) -> Finding:
    """What runs is what the file says."""
    document = facts.view.get("pool")
    if document is None and facts.pool_file is None:
        return skipped(NO_POOL)
    if facts.pool_file is None:
        return skipped("it is not known here where the pool file is: set UNDERSTUDY_POOL")
    path, file = facts.pool_file.path, facts.pool_file.file
    if file is None:
        return failed(str(facts.pool_file.problem), f"correct {path}; what runs goes on meanwhile")
    differing = _differing(document, facts.pool_file.digests)
    if differing:
        return warned(
            f"{path} has changed since the pool was started: {', '.join(differing)}",
            "restart the pod's pool and gateway, and the engines of these models; or set what"
            " `understudy pool set` can",
        )
    numbers = [each for each in file.devices if each.isdecimal()]
    is_host = document is not None and any(
        each["device"].startswith("HOST-") for each in document.get("devices") or ()
    )
    if numbers and not is_host:
        return warned(
            f"{path} names devices by number: {', '.join(numbers)}; after a reboot, or in another"
            " container, a number can mean another GPU",
            "write their names, GPU-<uuid>, from `nvidia-smi -L`",
        )
    changed = sum(map(len, ((document or {}).get("changed") or {}).values()))
    extra = f"; {changed} settings were changed by `understudy pool set`" if changed else ""
    return passed(f"{path}: {len(file.models)} models, as they run{extra}")


def pool_sizes(facts: PodFacts) -> Finding:
    """A guess may be too small, and then a wake fails; or too large, and nothing fits beside it."""
    document = facts.view.get("pool")
    if document is None or "error" in document:
        return skipped(NO_POOL if document is None else NOT_RUNNING)
    unknown = [each["model"] for each in models_of(document) if each["sizes"] is None]
    guessed = [each["model"] for each in models_of(document) if each["sizes"] and each["estimated"]]
    parts = []
    if unknown:
        parts.append(
            f"nobody knows how large {_list(unknown)} {_is(unknown)}, so all devices of"
            f" {'it' if len(unknown) == 1 else 'each'} are kept for it"
        )
    if guessed:
        parts.append(f"the size of {_list(guessed)} is estimated")
    if parts:
        first = (unknown + guessed)[0]
        return warned(
            "; ".join(parts),
            f"load it once, and it is measured: `understudy pool load {first}`; or write `memory:`"
            " in the pool file",
        )
    return passed(f"all {len(models_of(document))} models have been measured")


def pool_fit(facts: PodFacts) -> Finding:
    """Each model can be awake, also beside those that never yield, and copies have a place."""
    document = facts.view.get("pool")
    if document is None or "error" in document:
        return skipped(NO_POOL if document is None else NOT_RUNNING)
    rooms = {
        each["device"]: each["total_bytes"] - each["margin_bytes"] - each["outside_bytes"]
        for each in document["devices"]
        if each["total_bytes"] is not None and each["device"] != HOST
    }
    known = {each["model"]: each for each in models_of(document) if each["sizes"]}
    return (
        _too_large(known, rooms)
        or _beside_pinned(known, rooms)
        or _copies(facts, known)
        or passed("each model can be awake")
    )


def pool_waits(facts: PodFacts) -> Finding:
    """How long turns may last, by the file's own settings: a queue that gives up earlier makes
    requests fail whose turn would come."""
    if facts.view.get("pool") is None and facts.pool_file is None:
        return skipped(NO_POOL)
    file = facts.pool_file.file if facts.pool_file is not None else None
    if file is None:
        return skipped(NO_FILE)
    endless = [name for name, each in file.models.items() if math.isinf(each.drain_timeout.cut)]
    if endless:
        return warned(
            f"{_list(endless)} never {'cuts' if len(endless) == 1 else 'cut'} what cannot be"
            " parked (`cut: never`): others on the same devices may wait without a bound",
            "set `drain_timeout: {cut: 30s}`, unless that is meant",
        )
    waits = {name: _turns_s(file, name) for name in file.models}
    longest = max(waits, key=lambda name: waits[name])
    if waits[longest] > file.queue.wait:
        sharing = _sharing(file, longest)
        slowest = max(sharing, key=lambda name: file.models[name].min_runtime)
        return warned(
            f"a request for {longest} may wait for {duration(waits[longest] * 1000)} for the turns"
            f" of others alone, and `queue: wait` ends it after"
            f" {duration(file.queue.wait * 1000)}; the longest turn is that of {slowest}"
            f" (min_runtime {duration(file.models[slowest].min_runtime * 1000)})",
            "shorten min_runtime or drain_timeout, or let requests wait longer",
        )
    return passed(f"the turns of others last {duration(waits[longest] * 1000)} at most")


# -------------------------------------------------------------------------------------- parts


def _differing(document: Mapping[str, Any] | None, digests: Mapping[str, str]) -> list[str]:
    """Of which models, or of what else, the file says something other than what runs."""
    runs = ((document or {}).get("file") or {}).get("digests") or {}
    names = dict.fromkeys((*digests, *runs)) if runs else {}
    words = {"": "what is not about one model (devices, margin, queue, …)"}
    return [words.get(name, name) for name in names if digests.get(name) != runs.get(name)]


def _awake(model: Mapping[str, Any]) -> dict[str, int]:
    """What its first engine needs to be awake, by device."""
    kinds = model["sizes"].values()
    devices = sorted({device for kind in kinds for device in kind})
    return {device: sum(kind.get(device, 0) for kind in kinds) for device in devices}


def _too_large(known: Models, rooms: Mapping[str, int]) -> Finding | None:
    for name, model in known.items():
        for device, needed in _awake(model).items():
            if needed > rooms.get(device, math.inf):
                return failed(
                    f"{name} needs {size(needed)} of {device}, which has"
                    f" {size(max(0, rooms[device]))} beside the margin and what others use:"
                    " it can never be awake",
                    "give it less KV memory, more devices (tensor_parallel), or another device",
                )
    return None


def _beside_pinned(known: Models, rooms: Mapping[str, int]) -> Finding | None:
    """Whether the others can be awake, and rest, beside models that never yield."""
    pinned = [name for name, model in known.items() if model["pinned"]]
    others = [name for name in known if name not in pinned]
    fix = f"unpin one: `understudy pool unpin {pinned[0]}`" if pinned else ""
    for device, room in rooms.items():
        held = sum(_awake(known[name]).get(device, 0) for name in pinned)
        who = f"the pinned {_list(pinned)} {'needs' if len(pinned) == 1 else 'need'} {size(held)}"
        where = f"{size(room)} of {device}"
        if held > room:
            return failed(f"{who} of the {where}: they can never be awake together", fix)
        for name in others if held else ():
            needed = _awake(known[name]).get(device, 0)
            if needed > room - held:
                return failed(
                    f"{who} of the {where}: {name}, which needs {size(needed)}, can never be awake",
                    f"{fix}; until then requests for {name} get a 503",
                )
        bases = sum(known[name]["sizes"]["base"].get(device, 0) for name in others)
        if held and held + bases > room:
            return warned(
                f"{who}, and the processes of the others at rest {size(bases)}, of the {where}:"
                " models are unloaded to make room, and loaded from disk for the next request",
                fix,
            )
    return None


def _copies(facts: PodFacts, known: Models) -> Finding | None:
    """Whether weights have room in host memory, where models are to be offloaded."""
    file = facts.pool_file.file if facts.pool_file is not None else None
    if file is None:
        return None
    offloading = [name for name, each in file.models.items() if _offloads(each)]
    if offloading and not file.host_memory:
        return warned(
            f"{_list(offloading)} should rest offloaded, and the pool file has no `host_memory` for"
            " the copies of weights: they are unloaded instead",
            "set `host_memory:` to the size of these models' weights",
        )
    if file.host_memory > facts.machine.memory_bytes > 0 and not facts.is_hidden(GMS):
        return failed(
            f"host_memory is {size(int(file.host_memory))}; {facts.machine.memory_limit} is"
            f" {size(facts.machine.memory_bytes)}",
            "lower host_memory, or raise the limit of the container",
        )
    needed = sum(sum(each["sizes"]["weights"].values()) for each in known.values())
    if file.host_memory and needed > file.host_memory:
        return warned(
            f"the copies of all models' weights need {size(needed)}, and host_memory is"
            f" {size(int(file.host_memory))}: those that come last are unloaded in place of"
            " offloaded",
            "raise host_memory",
        )
    return None


def _offloads(model: ModelSettings) -> bool:
    return model.rest == "offloaded" or math.isfinite(model.offload_after)


def _turns_s(file: PoolFile, name: str) -> float:
    """The part of the bound that settings decide: what does not depend on the machine."""
    others = [file.models[each] for each in _sharing(file, name) if each != name]
    turns = sum(each.min_runtime + each.drain_timeout.park for each in others if not each.pinned)
    first = max(file.models[name].max_wait, IDLE_MS_MAX / 1000)
    return float(first + file.models[name].drain_timeout.park + turns)


def _sharing(file: PoolFile, name: str) -> list[str]:
    """All models that share devices with it, also through others, and itself."""
    found, devices = [name], set(file.models[name].devices)
    rest = [each for each in file.models if each != name]
    while near := [each for each in rest if devices & set(file.models[each].devices)]:
        found += near
        devices.update(*(file.models[each].devices for each in near))
        rest = [each for each in rest if each not in near]
    return found


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


CHECKS = (
    HealthCheck("pool", "pool", pool),
    HealthCheck("pool_file", "pool file", pool_file),
    HealthCheck("pool_sizes", "models' sizes", pool_sizes),
    HealthCheck("pool_fit", "models' memory", pool_fit),
    HealthCheck("pool_waits", "models' turns", pool_waits),
)
