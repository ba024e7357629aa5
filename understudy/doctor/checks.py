"""The checks of `understudy doctor`, in the order of the report, and the report itself.

A check looks for what no part can say of itself. It is one function in `CHECKS`, whose name is the
check's stable id, and docs/reference.md lists it in the same order. A check that raises is a bug
and ends the command: a missing result must not look like a pass.

The surprising one is `shared`: parts with different directories under the same path all start, each
alone, without an error. The network namespace that a pod's containers share reveals them: the
kernel lists every Unix socket in it by its path.

Without a driver the checks of GPUs are skipped: a lock server's container has none, and host memory
needs none.
"""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import to_builtins

from gms.client import look_for_mps
from plumbing.service import procfs
from plumbing.text import size
from plumbing.wire.peer import SO_PEERPIDFD
from pool.pool_file import digests
from understudy.doctor.pod import (
    ENGINE,
    ExaminedPod,
    Finding,
    failed,
    passed,
    process,
    skipped,
    warned,
)
from understudy.host import descriptors
from understudy.schema import CheckResult, CheckStatus, DoctorDocument

ONE_VOLUME = (
    "mount one volume into every container, with the same --dir inside it; on a host, start every"
    " part with the same --dir, and never remove a running part's files"
)
UNIX_LISTENS = 1 << 16  # __SO_ACCEPTCON, the flag of a listening socket (linux/net.h)
SHM = "/dev/shm"
SHM_MIN_BYTES = 65_536_000  # podman's default for a container; docker's is 64 MiB
SHM_VLLM_BYTES = 1 << 30  # ranks of vLLM communicate through it
NO_GPU = "no GPU is visible; see the NVIDIA driver check"


# --- the directory and its parts


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
    """All parts with this path have the same directory, and each name in it has one listener: two
    lock servers could both grant the lock."""
    ours, astray, heard = identity(pod.path), [], [*listeners(pod.path)]
    counts = Counter(name for name, _ in heard)
    for name, pid in heard:
        theirs = ours if pid is None else identity(f"/proc/{pid}/root{pod.path}")
        if theirs not in (ours, "nothing"):
            astray.append(
                f"{process(pid)} has {name} in another directory with the same path: {theirs}"
                f" there, {ours} here"
            )
        elif name not in pod.sockets:
            what = f"{process(pid)} listens on {pod.path}/{name}"
            why = "that path leads to no listener here" if pid is None else ""
            astray.append(f"{what}, but {why or 'the file was removed or replaced'}")
        elif counts[name] > 1:
            astray.append(f"{process(pid)} is one of {counts[name]} that listen on {name}")
    if astray:
        return failed("; ".join(astray), ONE_VOLUME)
    if not pod.sockets:
        return skipped("no part of a pod is running here")
    return passed(f"all {len(pod.sockets)} listening sockets are in this directory")


def flock(pod: ExaminedPod) -> Finding:
    """Fencing, socket guards and state files rely on flock."""
    if not os.path.isdir(pod.path):
        return skipped("the directory does not exist yet")
    try:
        with tempfile.TemporaryFile(dir=pod.path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(f"/proc/self/fd/{file.fileno()}", "rb+") as other:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                problem = "two descriptors held one exclusive lock at once"
    except BlockingIOError:
        return passed(f"locks exclude each other on {pod.path}")
    except OSError as error:
        problem = os.strerror(error.errno or 0)
    return failed(
        f"flock does not work on {pod.path}: {problem}",
        "put --dir on a local file system (tmpfs, ext4, xfs): without flock nothing proves that"
        " an engine is dead",
    )


def engines(pod: ExaminedPod) -> Finding:
    """Their own reports: settings that cost something, or a self-test that failed."""
    answered = [each for each in pod.view["engines"] if "error" not in each]
    found = [f"{it['engine']['id']}: {why}" for it in answered for why in it.get("problems") or ()]
    if found:
        return warned("; ".join(found), "see `engine status`")
    return passed("no engine reports a problem") if answered else skipped("no engine answers")


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
    return passed(f"{path}: {len(file.models)} models, as they run")


# --- the machine


def has_peer_pidfd() -> bool:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            return False
    return True


def peer_pidfd(pod: ExaminedPod) -> Finding:
    """Needed to see deaths across PID namespaces, and to be safe from recycled pids."""
    kernel = f"kernel {platform.release()}"
    if has_peer_pidfd():
        return passed(f"supported by {kernel}")
    return warned(
        f"{kernel} has no SO_PEERPIDFD: all parts must share a PID namespace",
        "use Linux 6.5 or newer, or share the PID namespace of the pod's containers"
        " (shareProcessNamespace)",
    )


def shared_memory(pod: ExaminedPod) -> Finding:
    """Ranks of one engine communicate through /dev/shm."""
    if pod.is_hidden(ENGINE):
        return skipped("engines have another container's /dev/shm; run doctor there")
    try:
        shm = os.statvfs(SHM)
    except OSError:
        return warned(f"{SHM} cannot be read", "mount a tmpfs there")
    found = shm.f_frsize * shm.f_blocks
    wanted = SHM_VLLM_BYTES if pod.has_vllm else SHM_MIN_BYTES
    if found < wanted:
        return warned(
            f"{SHM} has {size(found)}; {size(wanted)} recommended",
            "mount an emptyDir with medium Memory there (docker: --shm-size)",
        )
    return passed(size(found))


# --- GPUs, and who holds their memory


def driver(pod: ExaminedPod) -> Finding:
    """NVML answers."""
    problem = pod.gpus.get("problem")
    if problem is not None:
        fix = "look at `nvidia-smi` and `dmesg`; the node may need a reboot"
        return failed(problem, fix) if pod.gpus["is_broken"] else skipped(problem)
    version = pod.gpus["driver_version"]
    if not pod.listed:
        return warned(
            f"the driver ({version}) lists no GPU",
            "give this container a GPU, with a resource claim or the container runtime's --gpus",
        )
    return passed(f"driver {version}; GPUs: {len(pod.listed)}")


def device_uuid(pod: ExaminedPod) -> Finding:
    """Devices that the pod serves are visible here."""
    if pod.gpus.get("problem") is not None:
        return skipped(NO_GPU)
    listed = [uuid for gpu in pod.listed for uuid in (gpu["uuid"], *gpu["instances"])]
    seen = f"the driver lists {', '.join(listed) or 'none'}"
    served = pod.gpus_served()
    if wrong := [uuid for uuid in served if not _matches(uuid, listed)]:
        return failed(
            f"the memory service serves {', '.join(wrong)}; {seen}",
            "give every container the same devices (one resource claim), with UUIDs from "
            "`nvidia-smi -L`",
        )
    return passed(", ".join(served) or f"no device is served; {seen}")


def mig_mode(pod: ExaminedPod) -> Finding:
    """A GPU in MIG mode is usable only through its instances."""
    split = [gpu for gpu in pod.listed if gpu["is_mig"]]
    empty = [gpu["uuid"] for gpu in split if not gpu["instances"]]
    if empty:
        return failed(
            f"{', '.join(empty)} is in MIG mode, and no instance of it is visible here",
            "create instances (`nvidia-smi mig -cgi … -C`), or disable MIG (`nvidia-smi -mig 0`)",
        )
    named = ", ".join(f"{gpu['uuid']} ({len(gpu['instances'])} instances)" for gpu in split)
    return _well(pod, f"in MIG mode: {named}" if named else "no GPU is in MIG mode")


def sharing_mode(pod: ExaminedPod) -> Finding:
    """Several processes of a pod open the device at once."""
    closed = [gpu for gpu in pod.listed if gpu["compute_mode"] not in (None, "default")]
    if closed:
        return failed(
            ", ".join(f"{gpu['uuid']} has compute mode {gpu['compute_mode']}" for gpu in closed)
            + ": a second engine cannot open the device",
            "on the host, run `nvidia-smi -c 0`",
        )
    if pod.listed and (mps := look_for_mps(pod.environ)) is not None:
        return warned(
            f"the Multi-Process Service is in use ({mps}): a fault in one client kills all "
            "of them, the standby along with the active engine",
            "run the pod without MPS: unset CUDA_MPS_PIPE_DIRECTORY, stop the daemon",
        )
    return _well(pod, "compute mode is default, no Multi-Process Service found")


def memory_outside(pod: ExaminedPod) -> Finding:
    """Device memory in use outside the pod, which a takeover may lack."""
    strangers = [
        (gpu, f"{process(each['pid'])} ({size(each['used_bytes'])})")
        for gpu in pod.listed
        for each in gpu["processes"]
        if each["pid"] not in pod.pids
    ]
    if not strangers:
        return _well(pod, "no process outside the pod holds memory of its devices")
    if pod.is_hidden():
        return skipped(
            "parts of the pod run in PID namespaces that are not visible here, so their processes "
            f"cannot be told apart from others: {', '.join(who for _, who in strangers)}"
        )
    found = "; ".join(f"{who} uses memory of {gpu['uuid']}" for gpu, who in strangers)
    listed = [uuid for gpu, _ in strangers for uuid in (gpu["uuid"], *gpu["instances"])]
    is_ours = any(_matches(each, listed) for each in pod.gpus_served())
    judge = failed if is_ours else warned
    return judge(found, "stop what is not needed, or give the pod a device of its own")


def _well(pod: ExaminedPod, found: str) -> Finding:
    """`found` passes, unless no GPU is visible."""
    return passed(found) if pod.listed else skipped(NO_GPU)


def _matches(wanted: str, listed: list[str]) -> bool:
    """A prefix of a UUID is enough, as for CUDA."""
    return any(uuid.lower().startswith(wanted.lower()) for uuid in listed)


# --- the report

CHECKS: dict[str, Callable[[ExaminedPod], Finding]] = {
    "shared directory": shared,
    "file locks": flock,
    "engines' own reports": engines,
    "pool file": pool_file,
    "peer pidfd (SO_PEERPIDFD)": peer_pidfd,
    "/dev/shm size": shared_memory,
    "NVIDIA driver": driver,
    "devices by UUID": device_uuid,
    "MIG mode": mig_mode,
    "compute mode and MPS": sharing_mode,
    "memory held outside the pod": memory_outside,
}
COUNTED: dict[CheckStatus, str] = {
    "fail": "failed",
    "warn": "warnings",
    "pass": "passed",
    "skip": "skipped",
}


def examine(pod: ExaminedPod) -> list[CheckResult]:
    """The result of every check."""
    results = []
    for title, judge in CHECKS.items():
        status, found, fix = judge(pod)
        results.append(CheckResult(judge.__name__, title, status, found, fix or None))
    return results


def is_well(results: Sequence[CheckResult], *, is_strict: bool) -> bool:
    """Whether nothing failed; with `is_strict`, there are no warnings either."""
    return not any(
        each.status in (("fail", "warn") if is_strict else ("fail",)) for each in results
    )


def document(directory: str, results: Sequence[CheckResult]) -> dict[str, Any]:
    """The document of `understudy doctor --json`; its keys only ever grow."""
    counts = Counter(each.status for each in results)
    worst: CheckStatus = "fail" if counts["fail"] else "warn" if counts["warn"] else "pass"
    shown = {status: counts[status] for status in COUNTED}
    return dict(to_builtins(DoctorDocument(1, directory, worst, shown, list(results), [])))


def lines(results: Sequence[CheckResult]) -> list[str]:
    """The report as text, most serious first, each finding with its fix; the counts last."""
    width = max(len(each.title) for each in results)
    counts, out = Counter(each.status for each in results), []
    for each in sorted(results, key=lambda each: [*COUNTED].index(each.status)):
        out.append(f"{each.status:<5} {each.title:<{width}}  {each.found}")
        out += [f"{'':<6}{'':<{width}}  → {each.fix}"] if each.fix else []
    words = COUNTED | ({"warn": "warning"} if counts["warn"] == 1 else {})
    return [*out, ", ".join(f"{counts[it]} {words[it]}" for it in COUNTED if counts[it])]
