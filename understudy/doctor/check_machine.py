"""Checks of the kernel, limits, ports, memory and installed packages. Pure."""

from __future__ import annotations

from engine.backends.vllm.versions import OVERRIDE_FLAG, check_version, supported_range
from plumbing.errors import UsageError
from plumbing.part.format import size
from plumbing.part.models import device_of
from plumbing.service.process import FDS_ADVISED
from understudy.doctor.facts import ENGINE, GMS, FdUse, PodFacts, Port
from understudy.doctor.findings import Finding, HealthCheck, failed, passed, skipped, warned
from understudy.status.gateway_view import is_direct
from understudy.status.memory_view import Document, devices
from understudy.status.view import parts_of

# Two epochs (committed, loading) of 250 slabs each, one more set in flight, and a server's 128
# connections. A receiver at its limit loses descriptors without an error.
FDS_MIN = 1024
FDS_USED_SHARE_MAX = 0.8  # of its limit: the next attach brings up to 250 more

# Reading one of these costs a microsecond or more, and an engine reads the clock thousands of times
# a second.
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")

SHM_MIN_BYTES = 65_536_000  # podman's default for a container; docker's is 64 MiB
SHM_VLLM_BYTES = 1 << 30  # ranks of vLLM communicate through it

START_METHOD = "VLLM_WORKER_MULTIPROCESSING_METHOD"


def peer_pidfd(facts: PodFacts) -> Finding:
    """Needed to see deaths across PID namespaces, and to be safe from recycled pids."""
    kernel, fix = facts.kernel, "use Linux 6.5 or newer"
    if kernel.has_peer_pidfd:
        return passed(f"supported by kernel {kernel.release}")
    blind = [
        str(each["engine"])
        for each in facts.view["lockserver"].get("supervisors", ())
        if each.get("connected") and each.get("pidfd_source") == "none"
    ]
    found = f"kernel {kernel.release} has no SO_PEERPIDFD"
    if blind:
        return failed(
            f"{found}, and the lock server cannot see the processes of {', '.join(blind)}",
            f"{fix}, or share the PID namespace of the pod's containers (shareProcessNamespace)",
        )
    if not kernel.has_pidfd_open:
        return failed(f"{found} and no pidfd_open", fix)
    return warned(
        f"{found}: processes are found by pid, which requires that all parts share a PID namespace",
        f"{fix}, or share the PID namespace of the pod's containers (shareProcessNamespace)",
    )


def pidfd_open(facts: PodFacts) -> Finding:
    """A supervisor watches its backend's processes by pidfd."""
    if facts.kernel.has_pidfd_open:
        return passed("supported")
    return failed(
        "pidfd_open is refused, so an engine cannot watch its backend's processes",
        "use Linux 5.3 or newer; in a container, a seccomp profile that allows pidfd_open",
    )


def start_method(facts: PodFacts) -> Finding:
    """Forking a process with threads or an open GPU is unsafe."""
    chosen = facts.environ.get(START_METHOD)
    if chosen in (None, "", "spawn"):
        return passed("backends spawn their processes")
    return warned(
        f"{START_METHOD} is {chosen}: forked workers inherit locks, descriptors and a driver that "
        "does not survive a fork",
        f"unset {START_METHOD}, or set it to spawn, for every engine",
    )


def descriptors(facts: PodFacts) -> Finding:
    """Slabs are passed and held as descriptors."""
    fix = "raise `ulimit -Hn` (systemd: LimitNOFILE=, containers: the runtime's nofile limit)"
    short = [each for each in facts.limits if each.hard_limit < FDS_MIN]
    if short:
        return failed(
            f"{'; '.join(map(_limit, short))}: the memory service and an engine need at least "
            f"{FDS_MIN}",
            f"{fix} to {FDS_ADVISED} or more",
        )
    full = [each for each in facts.limits if each.count > FDS_USED_SHARE_MAX * each.limit]
    if full:
        return warned(
            "; ".join(f"{each.process} has {each.count} of {each.limit} open" for each in full),
            f"{fix}; if it keeps growing, collect a support bundle and report it",
        )
    low = [each for each in facts.limits if each.hard_limit < FDS_ADVISED]
    if low:
        return warned(
            f"{'; '.join(map(_limit, low))}: {FDS_ADVISED} recommended", f"{fix} to {FDS_ADVISED}"
        )
    least = min((each.hard_limit for each in facts.limits), default=0)
    return passed(f"the limit is at least {least}; processes checked: {len(facts.limits)}")


def clock_source(facts: PodFacts) -> Finding:
    """Deadlines and heartbeats read the clock constantly."""
    source = facts.kernel.clock_source
    if source is None:
        return skipped("the kernel does not report its clock source")
    if source in SLOW_CLOCKS:
        return warned(
            f"the clock source is {source}, which is slow to read",
            "find out why the kernel rejected tsc (dmesg | grep -i tsc), and boot with a faster "
            "one",
        )
    return passed(source)


def shared_memory(facts: PodFacts) -> Finding:
    """Ranks of one engine communicate through /dev/shm."""
    if facts.is_hidden(ENGINE):
        return skipped("engines have another container's /dev/shm; run doctor there")
    found, has_vllm = facts.machine.shm_bytes, "vllm" in facts.packages
    if found is None:
        return warned("/dev/shm cannot be read", "mount a tmpfs there")
    wanted = SHM_VLLM_BYTES if has_vllm else SHM_MIN_BYTES
    if found < wanted:
        return warned(
            f"/dev/shm has {size(found)}; {size(wanted)} recommended"
            + (" for vLLM's ranks" if has_vllm else ""),
            "mount an emptyDir with medium Memory there (docker: --shm-size)",
        )
    return passed(size(found))


def _devices(facts: PodFacts) -> list[Document]:
    """What the memory services say of each device."""
    return [device for part in facts.view["gms"] for device in devices(part)]


def host_memory(facts: PodFacts) -> Finding:
    """Host-memory devices must fit into this machine's memory."""
    promised = sum(
        {
            device_of(str(device.get("device_uuid"))): int(device.get("capacity_bytes") or 0)
            for device in _devices(facts)
            if str(device.get("device_uuid")).startswith("HOST-")
        }.values()
    )
    has = facts.machine
    if not promised:
        return skipped("no host-memory device is served")
    if facts.is_hidden(GMS):
        return skipped("the memory service has another container's limit; run doctor there")
    found = f"devices of {size(promised)}; {has.memory_limit} is {size(has.memory_bytes)}"
    if promised > has.memory_bytes:
        return warned(
            f"{found}: loading may get processes killed for lack of memory",
            "give `gms serve` a smaller --device-bytes, or the machine more memory",
        )
    return passed(found)


def huge_pages(facts: PodFacts) -> Finding:
    """An engine that dies unmaps its host memory page by page, and the next one waits for that."""
    if not any(str(each.get("device_uuid")).startswith("HOST-") for each in _devices(facts)):
        return skipped("no host-memory device is served")
    kernel = facts.kernel
    if kernel.has_huge_slabs:
        return passed("the memory service's memory gets huge pages")
    found = (
        f"kernel {kernel.release} gives the memory service's memory small pages, so an engine that"
        " dies is fenced later, by 0.1 to 0.2 s for each GiB that it has used"
    )
    if kernel.shared_huge_pages is None:
        return warned(
            f"{found}; it has no transparent huge pages", "use Linux 6.1 or newer, built with them"
        )
    return warned(
        f"{found}; shmem_enabled is {kernel.shared_huge_pages}",
        "on the host, `echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`, or use"
        " Linux 6.1 or newer",
    )


def termination_log(facts: PodFacts) -> Finding:
    """Where `kubectl describe pod` reads why a container exited."""
    machine = facts.machine
    if not machine.has_termination_log:
        return skipped(
            f"{machine.termination_log} does not exist: this is not a Kubernetes container"
        )
    if machine.termination_log_problem:
        return warned(
            f"{machine.termination_log} is not writable: {machine.termination_log_problem}",
            "run the container as the owner of the file, or set --termination-log",
        )
    return passed(f"{machine.termination_log} is writable")


def ports(facts: PodFacts) -> Finding:
    """A part cannot start if another process has its port."""
    services = facts.view["lockserver"].get("service") or {}
    problems = [str(each["problem"]) for each in services.values() if each.get("problem")]
    if problems:
        return failed(
            "; ".join(problems), "stop the process that has the port; the lock server then binds it"
        )
    strangers = [port for port in facts.ports if _is_strange(port, facts)]
    if strangers:
        flags = dict.fromkeys(each.flag for each in strangers)  # the engines share one
        return failed(
            "; ".join(
                f"port {each.number} ({each.what}) is in use by "
                f"{each.owner or 'a process that is not visible here'}"
                for each in strangers
            ),
            f"stop it, or choose another port with {', '.join(flags)}",
        )
    numbers = ", ".join(str(port.number) for port in facts.ports)
    return passed(f"{numbers}: free, or used by the pod")


def vllm_version(facts: PodFacts) -> Finding:
    """The backend depends on internals of vLLM."""
    found = facts.packages.get("vllm")
    if found is None:
        return skipped("vLLM is not installed here")
    try:
        check_version(allow_any=False, version=found)
    except UsageError:
        return failed(
            f"vLLM {found} is installed, but only {supported_range()} are supported",
            f"install a supported version, or pass {OVERRIDE_FLAG} after checking"
            " `python -m engine.backends.vllm.contracts`",
        )
    return passed(f"vLLM {found} (supported: {supported_range()})")


def _limit(use: FdUse) -> str:
    return f"{use.process} may open {use.hard_limit} descriptors"


def _is_strange(port: Port, facts: PodFacts) -> bool:
    """Whether another process has the port of a part that is not running: a part that runs has
    bound its ports, whatever their numbers."""
    if not port.is_taken or (port.owner is not None and port.owner.pid in facts.pids):
        return False
    if port.part == "gateway" and is_direct(facts.view["lockserver"]):
        return False  # a pod in direct mode does not use it
    up = {_name(part) for part in parts_of(facts.view) if "error" not in part}
    return port.part not in up


def _name(part: Document) -> str:
    """`lockserver`, `gateway`, `pool`, `gms`, or an engine's id."""
    if "engine" in part:
        return str(part["engine"].get("id"))
    if "locks" in part:
        return "lockserver"
    if "models" in part:
        return "pool"
    return "gateway" if "load" in part else "gms"


CHECKS = (
    HealthCheck("peer_pidfd", "peer pidfd (SO_PEERPIDFD)", peer_pidfd),
    HealthCheck("pidfd_open", "pidfd_open", pidfd_open),
    HealthCheck("start_method", "worker start method", start_method),
    HealthCheck("descriptors", "open file descriptors", descriptors),
    HealthCheck("clock_source", "clock source", clock_source),
    HealthCheck("shared_memory", "/dev/shm size", shared_memory),
    HealthCheck("huge_pages", "huge pages", huge_pages),
    HealthCheck("host_memory", "host memory", host_memory),
    HealthCheck("termination_log", "termination log", termination_log),
    HealthCheck("ports", "ports", ports),
    HealthCheck("vllm_version", "vLLM version", vllm_version),
)
