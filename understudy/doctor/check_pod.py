"""Checks of one pod: its directory, lock server, engines and pool.

The surprising one is `shared`: parts with different directories under the same path all start, each
alone, without an error. The network namespace that a pod's containers share reveals them: the
kernel lists every Unix socket in it by its path.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from plumbing.pod.paths import LOCKSERVER_SOCKET
from plumbing.service import procfs
from pool.pool_file import digests
from understudy.doctor.pod import ExaminedPod, Finding, failed, passed, process, skipped, warned
from understudy.host import descriptors

ONE_VOLUME = (
    "mount one volume into every container, with the same --dir inside it; on a host, start every"
    " part with the same --dir"
)
CLOSED = "the directory belongs to another user and cannot be read"
ABSENT = "the directory does not exist yet"
UNIX_LISTENS = 1 << 16  # __SO_ACCEPTCON, the flag of a listening socket (linux/net.h)

# --- the directory


def directory(pod: ExaminedPod) -> Finding:
    """Ours alone, or not created yet."""
    path, our_uid = pod.path, os.geteuid()
    try:
        found = os.lstat(path)
    except OSError:
        above = os.path.dirname(path)
        if os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK):
            return passed(f"{path} does not exist yet; the first part creates it")
        return failed(
            f"{path} does not exist and cannot be created",
            f"mkdir -p -m 700 {path}, as a user who may, or choose another --dir",
        )
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a directory"
        return failed(f"{path} is {kind}", "remove it, or choose another --dir")
    if found.st_uid != our_uid:
        return failed(
            f"{path} belongs to uid {found.st_uid}; this process is uid {our_uid}",
            "run every part, and this command, as the owner, or choose another --dir",
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        return failed(
            f"{path} has mode {mode:04o}, so other users could create sockets in it",
            f"chmod 700 {path}",
        )
    return passed(f"{path} is private (uid {our_uid}, mode {mode:04o})")


def listeners(path: str) -> Iterator[tuple[str, int | None]]:
    """The name and the process of each listener on a path in the directory `path`, in this network
    namespace (man 5 proc)."""
    found: dict[str, str] = {}  # name by inode
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
        for line in table:
            fields = line.rstrip("\n").split(maxsplit=7)
            is_here = len(fields) == 8 and os.path.dirname(fields[7]) == path
            if is_here and int(fields[3], 16) & UNIX_LISTENS:
                found[f"socket:[{fields[6]}]"] = os.path.basename(fields[7])
    owners: dict[str, int] = {}
    for pid in procfs.pids() if found else ():
        for _, target in descriptors(pid):
            if target in found:
                owners.setdefault(target, pid)
    yield from ((name, owners.get(target)) for target, name in found.items())


def identity(path: str) -> str:
    """The directory that `path` leads to."""
    try:
        found = os.stat(path)
    except OSError:
        return "nothing"
    return f"device {found.st_dev} inode {found.st_ino}"


def shared(pod: ExaminedPod) -> Finding:
    """All parts with this path have the same directory."""
    if pod.is_closed:
        return skipped(CLOSED)
    here, ours, astray = {each.name for each in pod.answered()}, identity(pod.path), []
    for name, pid in listeners(pod.path):
        theirs = ours if pid is None else identity(f"/proc/{pid}/root{pod.path}")
        if theirs not in (ours, "nothing"):
            astray.append(
                f"{process(pid)} has {name} in another directory with the same path: {theirs}"
                f" there, {ours} here"
            )
        elif name not in here:
            what = f"{process(pid)} listens on {pod.path}/{name}"
            why = "that path leads to no listener here" if pid is None else ""
            astray.append(f"{what}, but {why or 'the file was removed or replaced'}")
    if astray:
        return failed("; ".join(astray), ONE_VOLUME)
    lost = [
        str((each.get("engine") or {}).get("id"))
        for each in pod.view["engines"]
        if (each.get("lock") or {}).get("connected") is False
    ]
    if lost and "error" not in pod.view["lockserver"]:
        return failed(
            f"{', '.join(lost)} cannot reach the lock server, which is running here",
            f"check LOCKSERVER_SOCKET and --dir of these engines; {ONE_VOLUME}",
        )
    if here:
        return passed(f"all {len(here)} listening sockets are in this directory")
    if not os.path.isdir(pod.path):
        return skipped(ABSENT)
    kind, is_mounted = _mount_of(pod.path)
    if kind == "overlay" and not is_mounted:
        return warned(f"{pod.path} is on the file system of this container alone", ONE_VOLUME)
    return skipped("no part of a pod is running here")


def _mount_of(path: str) -> tuple[str, bool]:
    """The type of the file system that `path` is on, and whether it is another one than /."""
    kinds: dict[str, str] = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
        for line in table:
            before, _, after = line.partition(" - ")
            kinds[before.split()[4]] = after.split()[0]  # a later mount hides an earlier one
    above = next((str(it) for it in (Path(path), *Path(path).parents) if str(it) in kinds), "/")
    return kinds.get(above, ""), above != "/"


def one_lockserver(pod: ExaminedPod) -> Finding:
    """Two lock servers could both grant the lock."""
    servers = [process(pid) for name, pid in listeners(pod.path) if name == LOCKSERVER_SOCKET]
    if len(servers) > 1:
        return failed(
            f"{len(servers)} lock servers listen on {pod.path}/{LOCKSERVER_SOCKET}: "
            f"{', '.join(servers)}; only one of them is reachable",
            "stop all of them, then start one; engines keep serving meanwhile. Never remove"
            " lockserver.lock or lockserver.json under a running server",
        )
    return passed(*servers) if servers else skipped("no lock server is running here")


def flock(pod: ExaminedPod) -> Finding:
    """Fencing, socket guards and state files rely on flock."""
    if pod.is_closed or not os.path.isdir(pod.path):
        return skipped(CLOSED if pod.is_closed else ABSENT)
    kind, problem = _mount_of(pod.path)[0] or "unknown", ""
    try:
        with tempfile.TemporaryFile(dir=pod.path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(f"/proc/self/fd/{file.fileno()}", "rb+") as other:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                problem = "two descriptors held one exclusive lock at once"
    except BlockingIOError:
        return passed(f"locks exclude each other on {pod.path} ({kind})")
    except OSError as error:
        problem = os.strerror(error.errno or 0)
    return failed(
        f"flock does not work on {pod.path} ({kind}): {problem}",
        "put --dir on a local file system (tmpfs, ext4, xfs): without flock nothing proves that"
        " an engine is dead",
    )


# --- the engines


def engines(pod: ExaminedPod) -> Finding:
    """Their own reports: settings that cost something, or a self-test that failed."""
    answered = [each for each in pod.view["engines"] if "error" not in each]
    found = [f"{it['engine']['id']}: {why}" for it in answered for why in it.get("problems") or ()]
    if found:
        return warned("; ".join(found), "see `engine status`")
    return passed("no engine reports a problem") if answered else skipped("no engine answers")


# --- a pool; a pod without a pool file has nothing to check here


def pool_file(pod: ExaminedPod) -> Finding:
    """What runs is what the file says."""
    path, file, document = pod.pool_path, pod.pool_file, pod.view.get("pool") or {}
    if not path:
        found = "set UNDERSTUDY_POOL to the pool file" if document else "this pod has no pool file"
        return skipped(found)
    if isinstance(file, str):
        return failed(file, f"correct {path}; running parts are not affected")
    says, runs = digests(file), (document.get("file") or {}).get("digests") or {}
    names = dict.fromkeys((*says, *runs)) if runs else {}
    whole = "settings of the whole pool (devices, margin, queue, …)"
    if changed := [each or whole for each in names if says.get(each) != runs.get(each)]:
        return warned(
            f"{path} has changed since the pool was started: {', '.join(changed)}",
            "restart the pool, the gateway and these models' engines; or use `understudy pool set`",
        )
    devices = document.get("devices") or ()
    numbers = [each for each in file.devices if each.isdecimal()]
    if numbers and not any(each["device"].startswith("HOST-") for each in devices):
        return warned(
            f"{path} names devices by number: {', '.join(numbers)}; after a reboot, or in"
            " another container, a number can mean another GPU",
            "write their names, GPU-<uuid>, from `nvidia-smi -L`",
        )
    count = sum(map(len, (document.get("changed") or {}).values()))
    extra = f"; {count} settings were changed by `understudy pool set`" if count else ""
    return passed(f"{path}: {len(file.models)} models, as they run{extra}")
