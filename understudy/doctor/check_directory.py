"""Checks of the pod's shared directory: its owner, whether all parts share it, whether locks work.

Pure. The surprising one is `shared`: parts with different directories under the same path all
start, each alone, without an error. The network namespace that a pod's containers share reveals
them: the kernel lists every Unix socket in it by its path.
"""

from __future__ import annotations

import os

from plumbing.part.paths import LOCKSERVER_SOCKET, LONGEST_COMMON_NAME, gms_socket
from plumbing.wire.limits import SOCKET_PATH_BYTES_MAX
from understudy.doctor.facts import PodFacts, SocketListener
from understudy.doctor.findings import Finding, HealthCheck, failed, passed, skipped, warned

ONE_VOLUME = (
    "mount one volume into every container, with the same --dir inside it; on a host, start every"
    " part with the same --dir"
)
CLOSED = "the directory belongs to another user and cannot be read"


def directory(facts: PodFacts) -> Finding:
    """Ours alone, or not created yet."""
    found = facts.directory
    if found.kind == "missing":
        if found.can_be_made:
            return passed(f"{found.path} does not exist yet; the first part creates it")
        return failed(
            f"{found.path} does not exist and cannot be created",
            "create its parent directory, writable for the pod's user, or choose another --dir",
        )
    if found.kind != "directory":
        return failed(
            f"{found.path} is {found.kind}", "remove it, or choose another directory with --dir"
        )
    if found.owner_uid != found.our_uid:
        return failed(
            f"{found.path} belongs to uid {found.owner_uid}, but this process is uid "
            f"{found.our_uid}",
            "run every part, and this command, as the owner of the directory, or choose another "
            "--dir",
        )
    if found.mode & 0o077:
        return failed(
            f"{found.path} has mode {found.mode:04o}, so other users could create sockets in it",
            f"chmod 700 {found.path}, or `understudy doctor --fix`",
        )
    return passed(f"{found.path} is private (uid {found.our_uid}, mode {found.mode:04o})")


def path_length(facts: PodFacts) -> Finding:
    """Socket paths are limited to 107 bytes, and a GPU's UUID is long."""
    listed = [uuid for gpu in facts.gpus.listed for uuid in gpu.devices]
    names = [LONGEST_COMMON_NAME, *(each.name for each in facts.sockets)]
    names += [gms_socket("", device) for device in facts.served or listed]
    longest = max(names, key=len)
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
    astray = [each for each in facts.listeners if _is_elsewhere(each, facts)]
    if astray:
        return failed("; ".join(_elsewhere(each, facts) for each in astray), ONE_VOLUME)
    disconnected = _disconnected_engines(facts)
    if disconnected:
        return failed(
            f"{', '.join(disconnected)} cannot reach the lock server, which is running here",
            f"check LOCKSERVER_SOCKET and --dir of these engines; {ONE_VOLUME}",
        )
    here = facts.answered()
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
            f"{', '.join(map(_who, servers))}; only one of them is reachable",
            "stop all of them, then start one; engines keep serving meanwhile. Never remove"
            " lockserver.lock or lockserver.json under a running server",
        )
    if servers:
        return passed(_who(servers[0]))
    return skipped("no lock server is running on this directory")


def flock(facts: PodFacts) -> Finding:
    """Fencing, socket guards and state files rely on flock."""
    found = facts.directory
    if found.kind != "directory":
        return skipped("the directory does not exist yet")
    if _is_closed(facts):
        return skipped(CLOSED)
    kind = found.filesystem or "unknown"
    if found.flock_problem is not None:
        return failed(
            f"flock does not work on {found.path} ({kind}): {found.flock_problem}",
            "put --dir on a local file system (tmpfs, ext4, xfs): without flock nothing proves that"
            " an engine is dead",
        )
    return passed(f"locks exclude each other on {found.path} ({kind})")


def stale_sockets(facts: PodFacts) -> Finding:
    """Left behind by killed parts, until their next start removes them."""
    stale = [each.name for each in facts.sockets if not each.is_answered]
    if stale:
        return warned(
            f"no process listens on {', '.join(stale)}: their owners were killed and not restarted",
            "restart these parts, or remove the files with `understudy doctor --fix`",
        )
    return passed(f"none ({len(facts.sockets)} sockets, each with a listener)")


def _is_closed(facts: PodFacts) -> bool:
    """Whether the directory is closed to us, so that unreachable sockets prove nothing."""
    found = facts.directory
    return found.kind == "directory" and found.our_uid not in (0, found.owner_uid)


def _is_elsewhere(listener: SocketListener, facts: PodFacts) -> bool:
    if listener.directory is not None and listener.directory != facts.directory.identity:
        return True
    return listener.name not in {each.name for each in facts.answered()}


def _elsewhere(listener: SocketListener, facts: PodFacts) -> str:
    path = f"{facts.directory.path}/{listener.name}"
    ours, theirs = facts.directory.identity, listener.directory
    if theirs is None:
        return f"{_who(listener)} listens on {path}, but that path leads to no listener here"
    if ours is None or theirs != ours:
        here = f"device {ours[0]} inode {ours[1]}" if ours else "nothing"
        return (
            f"{_who(listener)} has {listener.name} in another directory with the same path: device "
            f"{theirs[0]} inode {theirs[1]} there, {here} here"
        )
    return f"{_who(listener)} listens on {path}, but the file was removed or replaced"


def _who(listener: SocketListener) -> str:
    return str(listener.process or "a process that is not visible here")


def _disconnected_engines(facts: PodFacts) -> list[str]:
    if "error" in facts.view["lockserver"]:
        return []
    return [
        str((part.get("engine") or {}).get("id"))
        for part in facts.view["engines"]
        if (part.get("lock") or {}).get("connected") is False
    ]


CHECKS = (
    HealthCheck("directory", "pod directory", directory),
    HealthCheck("path_length", "socket path length", path_length),
    HealthCheck("shared", "shared directory", shared),
    HealthCheck("one_lockserver", "single lock server", one_lockserver),
    HealthCheck("flock", "file locks", flock),
    HealthCheck("stale_sockets", "stale sockets", stale_sockets),
)
