"""Checks of the kernel, its limits, the ports, and what is installed. Pure."""

from __future__ import annotations

from engine.backends.vllm.shim import OVERRIDE_FLAG, check_version, supported_range
from plumbing.errors import UsageError
from plumbing.part.format import size
from plumbing.service.fd_limit import FDS_ADVISED
from understudy.doctor.facts import Facts, FdUse, Port
from understudy.doctor.finding import Check, Finding, failed, passed, skipped, warned
from understudy.status.memory_view import Document, devices

# A committed epoch and one that is loaded, 250 slabs each, with a set of them in flight, and the
# 128 connections that a server takes. A receiver at its limit loses descriptors without an error.
FDS_MIN = 1024
FDS_USED_SHARE_MAX = 0.8  # of its limit: the next attach brings up to 250 more

# Clock sources that are read without leaving the process or trapping for long; the others cost a
# microsecond or more each time, and an engine reads the clock thousands of times a second.
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")

SHM_MIN_BYTES = 65_536_000  # what podman gives a container unless told otherwise; docker 64 MiB
SHM_VLLM_BYTES = 1 << 30  # ranks of vLLM pass their work through it

START_METHOD = "VLLM_WORKER_MULTIPROCESSING_METHOD"


def peer_pidfd(facts: Facts) -> Finding:
    """With it a death is seen across PID namespaces, and no recycled pid can deceive."""
    kernel, mend = facts.kernel, "use Linux 6.5 or newer"
    if kernel.has_peer_pidfd:
        return passed(f"the kernel ({kernel.release}) names the process behind a connection")
    blind = [
        str(each["engine"])
        for each in facts.view["lockserver"].get("supervisors", ())
        if each.get("connected") and each.get("pidfd_source") == "none"
    ]
    said = f"the kernel ({kernel.release}) has no SO_PEERPIDFD"
    if blind:
        return failed(
            f"{said}, and the lock server cannot see the processes of {', '.join(blind)}",
            f"{mend}, or share the PID namespace of the pod's containers (shareProcessNamespace)",
        )
    if not kernel.has_pidfd_open:
        return failed(f"{said} and no pidfd_open", mend)
    return warned(
        f"{said}: processes are found by their pid, which works where all parts share a PID "
        "namespace",
        f"{mend}, or share the PID namespace of the pod's containers (shareProcessNamespace)",
    )


def pidfd_open(facts: Facts) -> Finding:
    """A supervisor watches every process of its backend by pidfd."""
    if facts.kernel.has_pidfd_open:
        return passed("a process can be watched by pidfd")
    return failed(
        "pidfd_open is refused, so an engine cannot watch its backend's processes",
        "use Linux 5.3 or newer; in a container, a seccomp profile that allows pidfd_open",
    )


def start_method(facts: Facts) -> Finding:
    """A fork of a process with threads or a GPU open inherits what it must not have."""
    chosen = facts.environ.get(START_METHOD)
    if chosen in (None, "", "spawn"):
        return passed("backends start their processes anew (spawn)")
    return warned(
        f"{START_METHOD} is {chosen}: forked workers inherit locks, descriptors and a driver that "
        "does not survive it",
        f"unset {START_METHOD}, or set it to spawn, for every engine",
    )


def descriptors(facts: Facts) -> Finding:
    """Slabs travel and are held as descriptors."""
    mend = "raise `ulimit -Hn` (systemd: LimitNOFILE=, containers: the runtime's nofile limit)"
    short = [each for each in facts.limits if each.hard_limit < FDS_MIN]
    if short:
        return failed(
            f"{'; '.join(map(_limit, short))}: {FDS_MIN} are the least that the memory service and "
            "an engine need",
            f"{mend} to {FDS_ADVISED} or more",
        )
    full = [each for each in facts.limits if each.count > FDS_USED_SHARE_MAX * each.limit]
    if full:
        return warned(
            "; ".join(f"{each.process} has {each.count} of {each.limit} open" for each in full),
            f"{mend}; if it grows without end, keep a support bundle and report it",
        )
    low = [each for each in facts.limits if each.hard_limit < FDS_ADVISED]
    if low:
        return warned(
            f"{'; '.join(map(_limit, low))}: {FDS_ADVISED} are advised", f"{mend} to {FDS_ADVISED}"
        )
    least = min((each.hard_limit for each in facts.limits), default=0)
    return passed(f"{least} or more in {len(facts.limits)} processes")


def clock_source(facts: Facts) -> Finding:
    """Deadlines and heartbeats read the clock all the time."""
    source = facts.kernel.clock_source
    if source is None:
        return skipped("the kernel does not say which clock source it uses")
    if source in SLOW_CLOCKS:
        return warned(
            f"the clock source is {source}, which is slow to read",
            "see why the kernel gave tsc up (dmesg | grep -i tsc), and boot with a better one",
        )
    return passed(source)


def shared_memory(facts: Facts) -> Finding:
    """Ranks of one engine speak through /dev/shm."""
    found, has_vllm = facts.machine.shm_bytes, "vllm" in facts.packages
    if found is None:
        return warned("/dev/shm cannot be looked at", "mount a tmpfs there")
    wanted = SHM_VLLM_BYTES if has_vllm else SHM_MIN_BYTES
    if found < wanted:
        return warned(
            f"/dev/shm has {size(found)}; {size(wanted)} are advised"
            + (" for vLLM's ranks" if has_vllm else ""),
            "mount an emptyDir of medium Memory there (docker: --shm-size)",
        )
    return passed(size(found))


def host_memory(facts: Facts) -> Finding:
    """Simulated devices promise memory that this machine has to have."""
    promised = sum(
        int(device.get("capacity_bytes") or 0)
        for part in facts.view["gms"]
        for device in devices(part)
        if str(device.get("device_uuid")).startswith("HOST-")
    )
    has = facts.machine
    if not promised:
        return skipped("no device of host memory is served")
    said = f"devices of {size(promised)}, and {has.memory_limit} is {size(has.memory_bytes)}"
    if promised > has.memory_bytes:
        return warned(
            f"{said}: a load that fits its device may end with processes killed for memory",
            "give `gms serve` a smaller --device-bytes, or the machine more memory",
        )
    return passed(said)


def termination_log(facts: Facts) -> Finding:
    """Where `kubectl describe pod` reads why a container ended."""
    machine = facts.machine
    if not machine.has_termination_log:
        return skipped(f"{machine.termination_log} is not there: not a container of Kubernetes")
    if machine.termination_log_problem:
        return warned(
            f"{machine.termination_log} cannot be written: {machine.termination_log_problem}",
            "run the container as the user that the file belongs to, or set --termination-log",
        )
    return passed(f"{machine.termination_log} can be written")


def ports(facts: Facts) -> Finding:
    """A port that a stranger has keeps its part from starting."""
    services = facts.view["lockserver"].get("service") or {}
    problems = [str(each["problem"]) for each in services.values() if each.get("problem")]
    if problems:
        return failed("; ".join(problems), "stop who has the port; the lock server takes it then")
    strangers = [port for port in facts.ports if _is_strange(port, facts)]
    if strangers:
        flags = dict.fromkeys(each.flag for each in strangers)  # two engines have one
        return failed(
            "; ".join(
                f"port {each.number} ({each.what}) is in use by "
                f"{each.owner or 'a process that is not visible from here'}"
                for each in strangers
            ),
            f"stop it, or choose another port with {', '.join(flags)}",
        )
    numbers = ", ".join(str(port.number) for port in facts.ports)
    return passed(f"{numbers} are free or the pod's own")


def vllm_version(facts: Facts) -> Finding:
    """Other versions may have moved what this backend uses."""
    found = facts.packages.get("vllm")
    if found is None:
        return skipped("vLLM is not installed here")
    try:
        check_version(allow_any=False, version=found)
    except UsageError:
        return failed(
            f"vLLM {found} is installed, and {supported_range()} are supported",
            f"install a supported one, or pass {OVERRIDE_FLAG} if you have read what"
            " `python -m engine.backends.vllm.contracts` says about it",
        )
    return passed(f"vLLM {found}, of {supported_range()}")


def _limit(use: FdUse) -> str:
    return f"{use.process} may open {use.hard_limit} descriptors"


def _is_strange(port: Port, facts: Facts) -> bool:
    """A part that is up has bound what it needs, on whatever port it was told to."""
    if not port.is_taken or (port.owner is not None and port.owner.pid in facts.pids):
        return False
    parts = [facts.view["lockserver"], *facts.view["gms"], *facts.view["engines"]]
    up = {_name(part) for part in parts if "error" not in part}
    return port.part not in up


def _name(part: Document) -> str:
    """`lockserver`, `gms`, or an engine's id."""
    if "engine" in part:
        return str(part["engine"].get("id"))
    return "lockserver" if "locks" in part else "gms"


CHECKS = (
    Check("peer_pidfd", "pidfd of a peer (SO_PEERPIDFD)", peer_pidfd),
    Check("pidfd_open", "pidfd of a process", pidfd_open),
    Check("start_method", "start of worker processes", start_method),
    Check("descriptors", "open file descriptors", descriptors),
    Check("clock_source", "clock source", clock_source),
    Check("shared_memory", "size of /dev/shm", shared_memory),
    Check("host_memory", "host memory", host_memory),
    Check("termination_log", "termination log", termination_log),
    Check("ports", "ports", ports),
    Check("vllm_version", "version of vLLM", vllm_version),
)
