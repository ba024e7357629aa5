"""Checks of the directory that a pod's parts meet in: is it ours, is it one, do locks work in it.

Pure. The surprising one is `shared`: parts that were given different directories of the same path
start well, each alone, and nothing says so. What gives them away is the network that a pod's
containers have in common: the kernel lists every Unix socket in it by its path.
"""

from __future__ import annotations

from plumbing.service.paths import LONGEST_COMMON_NAME, SUN_PATH_MAX
from understudy.doctor.facts import Facts, Listener
from understudy.doctor.finding import Check, Finding, failed, passed, skipped, warned

LOCKSERVER = "lockserver.sock"
ONE_VOLUME = (
    "mount one volume into every container and give each the same --dir inside it; on a host,"
    " start every part with the same --dir"
)
CLOSED = "the directory is somebody else's, and closed to us"


def directory(facts: Facts) -> Finding:
    """Ours alone, or still to be made."""
    found = facts.directory
    if found.kind == "missing":
        if found.can_be_made:
            return passed(f"{found.path} is not there yet; the first part makes it")
        return failed(
            f"{found.path} does not exist and cannot be made",
            "make the directory above it, writable for the pod's user, or choose another --dir",
        )
    if found.kind != "directory":
        return failed(
            f"{found.path} is {found.kind}", "remove it, or choose another directory with --dir"
        )
    if found.owner_uid != found.our_uid:
        return failed(
            f"{found.path} belongs to uid {found.owner_uid}, this process is uid {found.our_uid}",
            "run every part, and this command, as the one user whose directory it is, or choose"
            " another --dir",
        )
    if found.mode & 0o077:
        return failed(
            f"{found.path} has mode {found.mode:04o}, so others could put their sockets there",
            f"chmod 700 {found.path}, or `understudy doctor --fix`",
        )
    return passed(f"{found.path} is ours alone (uid {found.our_uid}, mode {found.mode:04o})")


def path_length(facts: Facts) -> Finding:
    """The kernel takes socket paths of 107 bytes, and a GPU's UUID is long."""
    listed = [uuid for gpu in facts.gpus.listed for uuid in gpu.devices]
    names = [LONGEST_COMMON_NAME, *(each.name for each in facts.sockets)]
    names += [f"gms_{device}_weights.sock" for device in facts.served or listed]
    longest = max(names, key=len)
    length = len(f"{facts.directory.path}/{longest}".encode())
    said = f"the longest socket, {longest}, has a path of {length} bytes of {SUN_PATH_MAX}"
    if length > SUN_PATH_MAX:
        spare = SUN_PATH_MAX - len(longest) - 1
        return failed(said, f"choose a --dir of at most {spare} bytes")
    return passed(said)


def shared(facts: Facts) -> Finding:
    """Every part that has this path has this directory."""
    if _is_closed(facts):
        return skipped(CLOSED)
    astray = [each for each in facts.listeners if _is_elsewhere(each, facts)]
    if astray:
        return failed("; ".join(_elsewhere(each, facts) for each in astray), ONE_VOLUME)
    deaf = _deaf_engines(facts)
    if deaf:
        return failed(
            f"{', '.join(deaf)} cannot reach the lock server, which answers here",
            f"look at LOCKSERVER_SOCKET and --dir of these engines; {ONE_VOLUME}",
        )
    here = facts.answered()
    if here:
        return passed(f"{len(here)} sockets are answered here, and none of this path elsewhere")
    if facts.directory.kind == "missing":
        return skipped("there is no directory yet")
    if facts.directory.filesystem == "overlay" and not facts.directory.is_mounted:
        return warned(
            f"{facts.directory.path} is in the file system of this container alone", ONE_VOLUME
        )
    return skipped("no part of a pod runs here that could be compared")


def one_lockserver(facts: Facts) -> Finding:
    """Two could both grant: each would take the other's engines for strangers."""
    servers = [each for each in facts.listeners if each.name == LOCKSERVER]
    if len(servers) > 1:
        return failed(
            f"{len(servers)} lock servers listen on {facts.directory.path}/{LOCKSERVER}: "
            f"{', '.join(map(_who, servers))}; only one of them is reached there",
            "stop all of them, then start one: engines serve on meanwhile, and connect to it; never"
            " remove lockserver.lock or lockserver.json under a server that runs",
        )
    if servers:
        return passed(_who(servers[0]))
    return skipped("no lock server runs on this directory")


def flock(facts: Facts) -> Finding:
    """The fence, the guards and the state files are flocks."""
    found = facts.directory
    if found.kind != "directory":
        return skipped("there is no directory yet")
    if _is_closed(facts):
        return skipped(CLOSED)
    kind = found.filesystem or "unknown"
    if found.flock_problem is not None:
        return failed(
            f"flock does not work on {found.path} ({kind}): {found.flock_problem}",
            "put --dir on a local file system (tmpfs, ext4, xfs): without flock nothing proves that"
            " an engine is dead",
        )
    return passed(f"two descriptors exclude each other on {found.path} ({kind})")


def stale_sockets(facts: Facts) -> Finding:
    """Left by parts that were killed. Their next start removes them; until then they mislead."""
    stale = [each.name for each in facts.sockets if not each.is_answered]
    if stale:
        return warned(
            f"nobody listens on {', '.join(stale)}: their owners were killed and are not back",
            "start these parts again, or `understudy doctor --fix` to remove the files",
        )
    return passed(f"every socket here is answered ({len(facts.sockets)})")


def _is_closed(facts: Facts) -> bool:
    """Then it says nothing that nobody is reached in there."""
    found = facts.directory
    return found.kind == "directory" and found.our_uid not in (0, found.owner_uid)


def _is_elsewhere(listener: Listener, facts: Facts) -> bool:
    if listener.directory is not None and listener.directory != facts.directory.identity:
        return True
    return listener.name not in {each.name for each in facts.answered()}


def _elsewhere(listener: Listener, facts: Facts) -> str:
    path = f"{facts.directory.path}/{listener.name}"
    ours, theirs = facts.directory.identity, listener.directory
    if theirs is None:
        return f"{_who(listener)} listens on {path}, and here nobody is reached by that path"
    if ours is None or theirs != ours:
        here = f"device {ours[0]} inode {ours[1]}" if ours else "nothing"
        return (
            f"{_who(listener)} has {listener.name} in another directory of the same path: there it "
            f"is device {theirs[0]} inode {theirs[1]}, here {here}"
        )
    return f"{_who(listener)} listens on {path}, whose file was removed or replaced under it"


def _who(listener: Listener) -> str:
    return str(listener.process or "a process that is not visible from here")


def _deaf_engines(facts: Facts) -> list[str]:
    if "error" in facts.view["lockserver"]:
        return []
    return [
        str((part.get("engine") or {}).get("id"))
        for part in facts.view["engines"]
        if (part.get("lock") or {}).get("connected") is False
    ]


CHECKS = (
    Check("directory", "directory of the pod", directory),
    Check("path_length", "length of socket paths", path_length),
    Check("shared", "directory is shared", shared),
    Check("one_lockserver", "one lock server", one_lockserver),
    Check("flock", "file locks", flock),
    Check("stale_sockets", "stale sockets", stale_sockets),
)
