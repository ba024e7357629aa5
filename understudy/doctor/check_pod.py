"""Checks of one pod: its directory, gateway, engines and pool. Pure.

The surprising one is `shared`: parts with different directories under the same path all start, each
alone, without an error. The network namespace that a pod's containers share reveals them: the
kernel lists every Unix socket in it by its path.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from plumbing.pod.paths import (
    GATEWAY_SOCKET,
    HTTP_SUFFIX,
    LOCKSERVER_SOCKET,
    LONGEST_COMMON_NAME,
    gms_socket,
)
from plumbing.text import duration, size
from plumbing.wire.limits import SOCKET_PATH_BYTES_MAX
from pool.core.states import HOST
from pool.core.who_yields import IDLE_MS_MAX
from pool.settings import PoolFile
from understudy.doctor.facts import (
    GMS,
    Finding,
    PodFacts,
    SocketListener,
    failed,
    passed,
    skipped,
    warned,
)
from understudy.status.gateway_view import gateway_faults, needs_gateway
from understudy.status.pool_view import AWAKE, FAILED, models_of, pool_faults

ONE_VOLUME = (
    "mount one volume into every container, with the same --dir inside it; on a host, start every"
    " part with the same --dir"
)
CLOSED = "the directory belongs to another user and cannot be read"
NO_POOL, NOT_RUNNING = "this pod has no pool file", "no pool answers, so sizes are not known"

# --- the directory


def directory(facts: PodFacts) -> Finding:
    """Ours alone, or not created yet."""
    found = facts.directory
    if found.kind == "missing":
        if found.can_be_made:
            return passed(f"{found.path} does not exist yet; the first part creates it")
        return failed(
            f"{found.path} does not exist and cannot be created",
            f"mkdir -p -m 700 {found.path}, as a user who may, or choose another --dir",
        )
    if found.kind != "directory":
        return failed(f"{found.path} is {found.kind}", "remove it, or choose another --dir")
    if found.owner_uid != found.our_uid:
        return failed(
            f"{found.path} belongs to uid {found.owner_uid}; this process is uid {found.our_uid}",
            "run every part, and this command, as the owner, or choose another --dir",
        )
    if found.mode & 0o077:
        return failed(
            f"{found.path} has mode {found.mode:04o}, so other users could create sockets in it",
            f"chmod 700 {found.path}",
        )
    return passed(f"{found.path} is private (uid {found.our_uid}, mode {found.mode:04o})")


def path_length(facts: PodFacts) -> Finding:
    """A socket's path has a limit of 107 bytes, and a GPU's UUID is long."""
    listed = [
        u for gpu in facts.gpus.listed for u in (gpu.instances if gpu.is_mig else (gpu.uuid,))
    ]
    names = [LONGEST_COMMON_NAME, *(each.name for each in facts.sockets)]
    longest = max((*names, *(gms_socket("", it) for it in facts.served or listed)), key=len)
    length = len(os.fsencode(f"{facts.directory.path}/{longest}"))
    found = f"the longest socket path, to {longest}, is {length} of {SOCKET_PATH_BYTES_MAX} bytes"
    if length > SOCKET_PATH_BYTES_MAX:
        spare = SOCKET_PATH_BYTES_MAX - len(longest) - 1
        return failed(found, f"choose a --dir of at most {spare} bytes")
    return passed(found)


def shared(facts: PodFacts) -> Finding:
    """All parts with this path have the same directory."""
    if _is_closed(facts):
        return skipped(CLOSED)
    here = {each.name for each in facts.answered()}
    ours = facts.directory.identity
    astray = [
        it for it in facts.listeners if it.name not in here or it.directory not in (None, ours)
    ]
    if astray:
        return failed("; ".join(_elsewhere(each, facts) for each in astray), ONE_VOLUME)
    lost = [
        str((each.get("engine") or {}).get("id"))
        for each in facts.view["engines"]
        if (each.get("lock") or {}).get("connected") is False
    ]
    if lost and "error" not in facts.view["lockserver"]:
        return failed(
            f"{', '.join(lost)} cannot reach the lock server, which is running here",
            f"check LOCKSERVER_SOCKET and --dir of these engines; {ONE_VOLUME}",
        )
    if here:
        return passed(f"all {len(here)} listening sockets are in this directory")
    if facts.directory.kind == "missing":
        return skipped("the directory does not exist yet")
    if facts.directory.filesystem == "overlay" and not facts.directory.is_mounted:
        return warned(
            f"{facts.directory.path} is on the file system of this container alone", ONE_VOLUME
        )
    return skipped("no part of a pod is running here")


def one_lockserver(facts: PodFacts) -> Finding:
    """Two lock servers could both grant the lock."""
    servers = [each for each in facts.listeners if each.name == LOCKSERVER_SOCKET]
    if len(servers) > 1:
        return failed(
            f"{len(servers)} lock servers listen on {facts.directory.path}/{LOCKSERVER_SOCKET}: "
            f"{', '.join(map(str, servers))}; only one of them is reachable",
            "stop all of them, then start one; engines keep serving meanwhile. Never remove"
            " lockserver.lock or lockserver.json under a running server",
        )
    return passed(str(*servers)) if servers else skipped("no lock server is running here")


def flock(facts: PodFacts) -> Finding:
    """Fencing, socket guards and state files rely on flock."""
    found, kind = facts.directory, facts.directory.filesystem or "unknown"
    if found.kind != "directory" or _is_closed(facts):
        return skipped(CLOSED if _is_closed(facts) else "the directory does not exist yet")
    if found.flock_problem is not None:
        return failed(
            f"flock does not work on {found.path} ({kind}): {found.flock_problem}",
            "put --dir on a local file system (tmpfs, ext4, xfs): without flock nothing proves that"
            " an engine is dead",
        )
    return passed(f"locks exclude each other on {found.path} ({kind})")


def stale_sockets(facts: PodFacts) -> Finding:
    """Killed parts leave them behind until their next start."""
    stale = [each.name for each in facts.sockets if not each.is_answered]
    if stale:
        paths = " ".join(f"{facts.directory.path}/{name}" for name in stale)
        return warned(
            f"no process listens on {', '.join(stale)}: their owners were killed and not restarted",
            f"restart these parts, or, if none of them is starting, rm {paths}",
        )
    return passed(f"none ({len(facts.sockets)} sockets, each with a listener)")


def _is_closed(facts: PodFacts) -> bool:
    """Whether the directory is closed to us, so that unreachable sockets prove nothing."""
    found = facts.directory
    return found.kind == "directory" and found.our_uid not in (0, found.owner_uid)


def _elsewhere(listener: SocketListener, facts: PodFacts) -> str:
    path = f"{facts.directory.path}/{listener.name}"
    ours, theirs = facts.directory.identity, listener.directory
    if theirs is None:
        return f"{listener} listens on {path}, but that path leads to no listener here"
    if theirs != ours:
        here = f"device {ours[0]} inode {ours[1]}" if ours else "nothing"
        return (
            f"{listener} has {listener.name} in another directory with the same path: device "
            f"{theirs[0]} inode {theirs[1]} there, {here} here"
        )
    return f"{listener} listens on {path}, but the file was removed or replaced"


# --- the gateway and the engines


def gateway(facts: PodFacts) -> Finding:
    """Clients reach the engines through it alone, except with a lock over TCP."""
    found, lockserver = facts.view.get("gateway"), facts.view["lockserver"]
    is_up = found is not None and "error" not in found
    if found is None and not needs_gateway(lockserver):
        return skipped("the lock server has no service address, or is down")
    if found is None:
        faults = ["no gateway answers, so requests wait and are refused after 10 s"]
    else:
        faults = gateway_faults(found, lockserver, has_pool=facts.view.get("pool") is not None)
    if not is_up:
        return failed("; ".join(faults), "start one (`gateway serve`, in this --dir), or resume it")
    if found is not None and not found.get("accepting"):
        return failed("; ".join(faults), "see `gateway status`")
    return passed("it accepts connections")


def one_gateway(facts: PodFacts) -> Finding:
    """Two would take turns at the same port."""
    found = [each for each in facts.listeners if each.name == GATEWAY_SOCKET]
    if len(found) > 1:
        return failed(
            f"{len(found)} gateways listen on {facts.directory.path}/{GATEWAY_SOCKET}: "
            + ", ".join(map(str, found)),
            "stop all of them, then start one; new requests wait meanwhile",
        )
    borrowers = facts.view["lockserver"].get("gateways") or ()
    if len(borrowers) > 1:
        pids = ", ".join(str(each.get("pid") or "not visible here") for each in borrowers)
        return warned(
            f"the lock server has lent its socket to {len(borrowers)} gateways: pids {pids}",
            "stop one of them, unless one is replacing the other",
        )
    return passed(str(*found)) if found else skipped("no gateway is running on this directory")


def private_sockets(facts: PodFacts) -> Finding:
    """A client of such a socket can set the headers of the private hop."""
    found = [each for each in facts.sockets if each.name.endswith(HTTP_SUFFIX)]
    names = ", ".join(each.name for each in found)
    if not found:
        return skipped("no engine is active behind a gateway")
    opened = [each for each in found if (each.mode or 0) & 0o077]
    if opened:
        return failed(
            "; ".join(f"{each.name} has mode {each.mode or 0:04o}" for each in opened),
            f"chmod 600 {' '.join(f'{facts.directory.path}/{each.name}' for each in opened)}",
        )
    return passed(f"{names}: private")


def engines(facts: PodFacts) -> Finding:
    """Their own reports: settings that cost something, or a self-test that failed."""
    answered = [each for each in facts.view["engines"] if "error" not in each]
    found = [f"{it['engine']['id']}: {why}" for it in answered for why in it.get("problems") or ()]
    if found:
        return warned("; ".join(found), "see `engine status`")
    return passed("no engine reports a problem") if answered else skipped("no engine answers")


def tls_files(facts: PodFacts) -> Finding:
    """The gateway reads them when it starts, so a bad one is found at the worst moment."""
    if not facts.tls_files:
        return skipped("this environment names no certificate")
    bad = [f"{what}: {problem}" for what, problem in facts.tls_files.items() if problem]
    if bad:
        fix = "make the file readable for the pod's user, and its key private to that user"
        return failed("; ".join(bad), fix)
    return passed(", ".join(facts.tls_files))


# --- a pool; a pod without a pool file has nothing to check here


def pool(facts: PodFacts) -> Finding:
    """It decides which models are awake."""
    found = facts.view.get("pool")
    if found is None:
        return skipped(NO_POOL)
    if "error" in found:
        fix = "start it: `pool serve --file FILE` with the same --dir"
        return failed("; ".join(pool_faults(found)), fix)
    bad = [each["model"] for each in models_of(found) if each["state"] == FAILED]
    if bad:
        fix = f"remove the cause, then `understudy pool reset {bad[0]}`"
        return failed("; ".join(pool_faults(found)), fix)
    if found["problems"] or found["recovering"]:
        return warned("; ".join(pool_faults(found)), "see `understudy pool explain`")
    awake = sum(each["state"] == AWAKE for each in models_of(found))
    return passed(f"{awake} of {len(models_of(found))} models are awake")


def pool_file(facts: PodFacts) -> Finding:
    """What runs is what the file says."""
    found, document = facts.pool_file, facts.view.get("pool") or {}
    if found is None:
        return skipped("set UNDERSTUDY_POOL to the pool file" if document else NO_POOL)
    if found.file is None:
        return failed(str(found.problem), f"correct {found.path}; running parts are not affected")
    runs = (document.get("file") or {}).get("digests") or {}
    names = dict.fromkeys((*found.digests, *runs)) if runs else {}
    changed = [each for each in names if found.digests.get(each) != runs.get(each)]
    if changed:
        words = [
            each or "settings of the whole pool (devices, margin, queue, …)" for each in changed
        ]
        return warned(
            f"{found.path} has changed since the pool was started: {', '.join(words)}",
            "restart the pool, the gateway and these models' engines; or use `understudy pool set`",
        )
    devices = document.get("devices") or ()
    numbers = [each for each in found.file.devices if each.isdecimal()]
    if numbers and not any(each["device"].startswith("HOST-") for each in devices):
        return warned(
            f"{found.path} names devices by number: {', '.join(numbers)}; after a reboot, or in"
            " another container, a number can mean another GPU",
            "write their names, GPU-<uuid>, from `nvidia-smi -L`",
        )
    count = sum(map(len, (document.get("changed") or {}).values()))
    extra = f"; {count} settings were changed by `understudy pool set`" if count else ""
    return passed(f"{found.path}: {len(found.file.models)} models, as they run{extra}")


def pool_sizes(facts: PodFacts) -> Finding:
    """A guess may be too small, and then a wake fails; or too large, and nothing fits beside it."""
    document = facts.view.get("pool")
    if document is None or "error" in document:
        return skipped(NO_POOL if document is None else NOT_RUNNING)
    unknown = [each["model"] for each in models_of(document) if each["sizes"] is None]
    guessed = [each["model"] for each in models_of(document) if each["sizes"] and each["estimated"]]
    parts = [f"the size of {', '.join(unknown)} is unknown, so whole devices are reserved"] * bool(
        unknown
    )
    parts += [f"the size of {', '.join(guessed)} is estimated"] * bool(guessed)
    if parts:
        return warned(
            "; ".join(parts),
            f"load it once, and it is measured: `understudy pool load {(unknown + guessed)[0]}`;"
            " or write `memory:` in the pool file",
        )
    return passed(f"all {len(models_of(document))} models have been measured")


def pool_fit(facts: PodFacts) -> Finding:
    """Each model can be awake, also beside those that never yield, and copies have room."""
    document = facts.view.get("pool")
    if document is None or "error" in document:
        return skipped(NO_POOL if document is None else NOT_RUNNING)
    known = {each["model"]: each for each in models_of(document) if each["sizes"]}
    for device in document["devices"]:
        if device["total_bytes"] is not None and device["device"] != HOST:
            used = device["margin_bytes"] + device["outside_bytes"]
            found = _fit(device["device"], device["total_bytes"] - used, known)
            if found is not None:
                return found
    return _copies(facts, known) or passed("each model can be awake")


def _fit(device: str, room: int, known: Mapping[str, Mapping[str, Any]]) -> Finding | None:
    """Whether each model has room on `device`, alone and beside models that never yield."""
    needs = {n: sum(k.get(device, 0) for k in it["sizes"].values()) for n, it in known.items()}
    where = f"{device}, which has {size(max(0, room))} beside the margin and what others use"
    for name, needed in needs.items():
        if needed > room:
            return failed(
                f"{name} needs {size(needed)} of {where}: it can never be awake",
                "give it less KV memory, more devices (tensor_parallel), or another device",
            )
    pinned = [name for name, model in known.items() if model["pinned"] and needs[name]]
    others = [name for name in known if name not in pinned]
    if not pinned:
        return None
    held, fix = sum(map(needs.__getitem__, pinned)), f"understudy pool unpin {pinned[0]}"
    who = f"the pinned {', '.join(pinned)} need {size(held)} of {where}"
    if held > room:
        return failed(f"{who}: they can never be awake together", fix)
    for name in others:
        if needs[name] > room - held:
            return failed(
                f"{who}: {name}, which needs {size(needs[name])}, can never be awake", fix
            )
    bases = sum(known[name]["sizes"]["base"].get(device, 0) for name in others)
    if held + bases > room:
        return warned(
            f"{who}; the sleeping processes of the others need {size(bases)}: models are unloaded,"
            " and loaded from disk for the next request",
            fix,
        )
    return None


def _copies(facts: PodFacts, known: Mapping[str, Mapping[str, Any]]) -> Finding | None:
    """Whether the copies of offloaded weights have room in host memory."""
    file = facts.pool_file.file if facts.pool_file is not None else None
    if file is None:
        return None
    kept, has = file.host_memory, facts.machine
    offloading = [
        name
        for name, each in file.models.items()
        if each.rest == "offloaded" or math.isfinite(each.offload_after)
    ]
    if offloading and not kept:
        return warned(
            f"{', '.join(offloading)} cannot be offloaded without `host_memory` in the pool file:"
            " they are unloaded instead",
            "set `host_memory:` to the size of these models' weights",
        )
    if kept > has.memory_bytes > 0 and not facts.is_hidden(GMS):
        return failed(
            f"host_memory is {size(int(kept))}; {has.memory_limit} is {size(has.memory_bytes)}",
            "lower host_memory, or raise the limit of the container",
        )
    needed = sum(sum(each["sizes"]["weights"].values()) for each in known.values())
    if kept and needed > kept:
        return warned(
            f"the copies of all models' weights need {size(needed)}, and host_memory is"
            f" {size(int(kept))}: the last models are unloaded instead of offloaded",
            "raise host_memory",
        )
    return None


def pool_waits(facts: PodFacts) -> Finding:
    """Requests fail whose turn would come, if the queue's limit is shorter than the turns."""
    file = facts.pool_file.file if facts.pool_file is not None else None
    if file is None:
        has_pool = facts.view.get("pool") is not None or facts.pool_file is not None
        return skipped("the pool file cannot be read here" if has_pool else NO_POOL)
    endless = [name for name, each in file.models.items() if math.isinf(each.drain_timeout.cut)]
    if endless:
        return warned(
            f"`cut: never` of {', '.join(endless)}: others on the same devices may wait for ever",
            "set `drain_timeout: {cut: 30s}`, unless that is intended",
        )
    waits = {name: _turns_s(file, name) for name in file.models}
    longest = max(waits, key=lambda name: waits[name])
    if waits[longest] > file.queue.wait:
        slowest = max(_sharing(file, longest), key=lambda name: file.models[name].min_runtime)
        return warned(
            f"a request for {longest} may wait for {duration(waits[longest] * 1000)} for the turns"
            f" of others alone, and `queue: wait` ends it after {duration(file.queue.wait * 1000)};"
            f" the longest turn is that of {slowest}"
            f" (min_runtime {duration(file.models[slowest].min_runtime * 1000)})",
            "shorten min_runtime or drain_timeout, or let requests wait longer",
        )
    return passed(f"the turns of others last {duration(waits[longest] * 1000)} at most")


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
