"""Checks of the kernel, limits, ports, memory and GPUs.

Without a driver the checks of GPUs are skipped: a lock server's container has none, and host memory
needs none.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Iterator

from engine.backends.process_memory import read_room
from gms.client import look_for_mps
from plumbing.pod.models import device_of
from plumbing.service import procfs
from plumbing.service.process import FDS_ADVISED
from plumbing.text import size
from plumbing.wire.peer import SO_PEERPIDFD
from understudy.doctor.pod import (
    ENGINE,
    GMS,
    ExaminedPod,
    Finding,
    Held,
    failed,
    held,
    passed,
    process,
    skipped,
    warned,
)
from understudy.host import fd_count
from understudy.status.view import Document, parts_of

# Two epochs (committed, loading) of 250 slabs each, one more set in flight, and a server's 128
# connections. A receiver at its limit loses descriptors without an error.
FDS_MIN = 1024
FDS_USED_SHARE_MAX = 0.8  # of its limit: the next attach brings up to 250 more
UNLIMITED = 2**31  # in place of RLIM_INFINITY, which is -1: more than any kernel allows
SHM = "/dev/shm"
SHM_MIN_BYTES = 65_536_000  # podman's default for a container; docker's is 64 MiB
SHM_VLLM_BYTES = 1 << 30  # ranks of vLLM communicate through it
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "UNDERSTUDY_GPUS")
SHARE_PIDS = "share the PID namespace of the pod's containers (shareProcessNamespace)"
NO_GPU = "no GPU is visible; see the NVIDIA driver check"

# --- the kernel


def has_pidfd_open() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # ENOSYS on an old kernel, EPERM from a seccomp profile
        return False
    return True


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
    kernel, fix = f"kernel {platform.release()}", "use Linux 6.5 or newer"
    if has_peer_pidfd():
        return passed(f"supported by {kernel}")
    blind = [
        str(each["engine"])
        for each in pod.view["lockserver"].get("supervisors", ())
        if each.get("connected") and each.get("pidfd_source") == "none"
    ]
    if blind:
        who = f"the lock server cannot see the processes of {', '.join(blind)}"
        return failed(f"{kernel} has no SO_PEERPIDFD, and {who}", f"{fix}, or {SHARE_PIDS}")
    if not has_pidfd_open():
        return failed(
            f"{kernel}, or a seccomp profile, refuses SO_PEERPIDFD and pidfd_open, so no process"
            " can be watched",
            f"{fix}, or a profile that allows pidfd_open",
        )
    found = f"{kernel} has no SO_PEERPIDFD: all parts must share a PID namespace"
    return warned(found, f"{fix}, or {SHARE_PIDS}")


def _fd_limits(pod: ExaminedPod) -> Iterator[tuple[str, int, int, int]]:
    """Of this process and of the parts that are visible: who, RLIMIT_NOFILE, soft and hard, and how
    many it has open."""
    for pid in (None, *(each.pid for each in pod.sockets if each.pid is not None)):
        try:
            limits = resource.prlimit(pid or os.getpid(), resource.RLIMIT_NOFILE)
        except OSError:
            continue
        soft, hard = (UNLIMITED if it == resource.RLIM_INFINITY else it for it in limits)
        who = process(pid) if pid else f"pid {os.getpid()} (this command)"
        yield who, soft, hard, fd_count(pid) if pid else 0


def descriptors(pod: ExaminedPod) -> Finding:
    """Slabs are passed and held as descriptors."""
    fix = "raise `ulimit -Hn` (systemd: LimitNOFILE=, containers: the runtime's nofile limit)"
    limits = list(_fd_limits(pod))

    def below(least: int) -> str:
        low = [(who, hard) for who, _, hard, _ in limits if hard < least]
        return "; ".join(f"{who} may open {hard} descriptors" for who, hard in low)

    if short := below(FDS_MIN):
        found = f"{short}: the memory service and an engine need at least {FDS_MIN}"
        return failed(found, f"{fix} to {FDS_ADVISED} or more")
    full = [each for each in limits if each[3] > FDS_USED_SHARE_MAX * each[1]]
    if full:
        return warned(
            "; ".join(f"{who} has {count} of {soft} open" for who, soft, _, count in full),
            f"{fix}; if it keeps growing, collect a support bundle and report it",
        )
    if short := below(FDS_ADVISED):
        return warned(f"{short}: {FDS_ADVISED} recommended", f"{fix} to {FDS_ADVISED}")
    least = min((hard for _, _, hard, _ in limits), default=0)
    return passed(f"the limit is at least {least}; processes checked: {len(limits)}")


# --- memory, files, ports


def shared_memory(pod: ExaminedPod) -> Finding:
    """Ranks of one engine communicate through /dev/shm."""
    if pod.is_hidden(ENGINE):
        return skipped("engines have another container's /dev/shm; run doctor there")
    try:
        shm = os.statvfs(SHM)
    except OSError:
        return warned(f"{SHM} cannot be read", "mount a tmpfs there")
    found, wanted = shm.f_frsize * shm.f_blocks, SHM_MIN_BYTES
    if "vllm" in pod.packages:
        wanted = SHM_VLLM_BYTES
    if found < wanted:
        return warned(
            f"{SHM} has {size(found)}; {size(wanted)} recommended",
            "mount an emptyDir with medium Memory there (docker: --shm-size)",
        )
    return passed(size(found))


def host_memory(pod: ExaminedPod) -> Finding:
    """Host-memory devices must fit into this machine's memory."""
    named = {str(each.get("device_uuid")): each for each in pod.view["gms"]}
    sizes = {
        device_of(name): int(each.get("capacity_bytes") or 0)
        for name, each in named.items()
        if name.startswith("HOST-")
    }
    promised = sum(sizes.values())
    if not promised:
        return skipped("no host-memory device is served")
    if pod.is_hidden(GMS):
        return skipped("the memory service has another container's limit; run doctor there")
    servers = [each.pid for each in pod.sockets if each.name.startswith(GMS) and each.pid]
    room = read_room(process=servers[0] if servers else "self")
    found = f"devices of {size(promised)}; {room.limited_by} is {size(room.limit_bytes)}"
    if promised > room.limit_bytes:
        return warned(
            f"{found}: the kernel may kill processes while weights load",
            "give `gms serve` a smaller --device-bytes, or the machine more memory",
        )
    return passed(found)


def ports(pod: ExaminedPod) -> Finding:
    """A part cannot start if another process has its port. A part that runs has bound its ports,
    whatever their numbers."""
    services = pod.view["lockserver"].get("service") or {}
    problems = [str(each["problem"]) for each in services.values() if each.get("problem")]
    if problems:
        return failed(
            "; ".join(problems), "stop the process that has the port; the lock server then binds it"
        )
    running = _running(pod)
    parts = ["lockserver", "lockserver", "gms", "gateway"]
    parts += [f"engine-{number}" for number in range(len(pod.ports.engines))]
    owners = procfs.tcp_listeners(pod.ports.all())
    strangers = []
    for number, (port, part) in enumerate(zip(pod.ports.all(), parts, strict=True)):
        owner = owners.get(port)
        if port in owners and part not in running and owner not in pod.pids:
            what = f"{'probes' if number else 'requests'} of {part}"
            strangers.append(f"port {port} ({what}) is in use by {process(owner)}")
    if strangers:
        return failed("; ".join(strangers), "stop it, or move all ports with --port-offset")
    return passed(f"{', '.join(map(str, pod.ports.all()))}: free, or used by the pod")


def _running(pod: ExaminedPod) -> set[str]:
    """The parts that answer, by the key that only their documents have."""
    names = {"locks": "lockserver", "load": "gateway", "models": "pool"}
    return {
        str(part["engine"].get("id"))
        if "engine" in part
        else next((name for key, name in names.items() if key in part), "gms")
        for part in parts_of(pod.view)
        if "error" not in part
    }


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


def _named(pod: ExaminedPod) -> dict[str, str]:
    """The devices that the environment names, each with its variable."""
    found = {}
    for name in DEVICE_VARIABLES:
        for each in map(str.strip, pod.environ.get(name, "").split(",")):
            if each.startswith(("GPU-", "MIG-")):
                found[each] = name
    return found


def device_uuid(pod: ExaminedPod) -> Finding:
    """Devices that the pod serves, or is configured to serve, are visible here."""
    wanted = dict.fromkeys(pod.gpus_served(), "the memory service serves it")
    wanted |= {uuid: f"{variable} names it" for uuid, variable in _named(pod).items()}
    if pod.gpus.get("problem") is not None:
        return skipped(NO_GPU)
    listed = [uuid for gpu in pod.listed for uuid in (gpu["uuid"], *gpu["instances"])]
    seen = f"the driver lists {', '.join(listed) or 'none'}"
    wrong = {uuid: why for uuid, why in wanted.items() if not _matches(uuid, listed)}
    if wrong:
        return failed(
            "; ".join(f"{uuid} is not visible here, but {why}" for uuid, why in wrong.items())
            + f"; {seen}",
            "give every container the same devices (one resource claim), with UUIDs from "
            "`nvidia-smi -L`",
        )
    return passed(", ".join(wanted) or f"no device is configured or served; {seen}")


def persistence_mode(pod: ExaminedPod) -> Finding:
    """Without it the driver resets a device when its last user exits."""
    off = [gpu["uuid"] for gpu in pod.listed if gpu["is_persistent"] is False]
    if off:
        return warned(
            f"persistence mode is off on {', '.join(off)}: the driver resets the device when its "
            "last process exits, and the next start waits for seconds",
            "on the host, run `nvidia-smi -pm 1` or nvidia-persistenced",
        )
    return _well(pod, f"not disabled; GPUs: {len(pod.listed)}")


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
    strangers: list[tuple[Document, Held]] = [
        (gpu, (each["pid"], each["used_bytes"]))
        for gpu in pod.listed
        for each in gpu["processes"]
        if each["pid"] not in pod.pids
    ]
    if not strangers:
        if pod.gpus.get("problem") is not None and not pod.pids:
            return skipped(NO_GPU)
        return passed("no process outside the pod holds memory of its devices")
    if pod.is_hidden():
        return skipped(
            "parts of the pod run in PID namespaces that are not visible here, so their processes "
            f"cannot be told apart from others: {held(hold for _, hold in strangers)}"
        )
    found = "; ".join(f"{held([hold])} uses memory of {gpu['uuid']}" for gpu, hold in strangers)
    listed = [uuid for gpu, _ in strangers for uuid in (gpu["uuid"], *gpu["instances"])]
    ours = pod.gpus_served() or _named(pod)
    judge = failed if any(_matches(each, listed) for each in ours) else warned
    return judge(found, "stop what is not needed, or give the pod a device of its own")


def _well(pod: ExaminedPod, found: str) -> Finding:
    """`found` passes, unless no GPU is visible."""
    return passed(found) if pod.listed else skipped(NO_GPU)


def _matches(wanted: str, listed: list[str]) -> bool:
    """A prefix of a UUID is enough, as for CUDA."""
    return any(uuid.lower().startswith(wanted.lower()) for uuid in listed)
