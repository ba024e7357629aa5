"""Checks of the kernel, limits, ports, memory, packages and GPUs. Pure.

Without a driver the checks of GPUs are skipped: a lock server's container has none, and host memory
needs none.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.backends.vllm.versions import OVERRIDE_FLAG, check_version, supported_range
from plumbing.errors import UsageError
from plumbing.pod.models import device_of
from plumbing.service.process import FDS_ADVISED
from plumbing.text import size
from understudy.doctor.facts import (
    ENGINE,
    GMS,
    Finding,
    HeldMemory,
    PodFacts,
    Port,
    failed,
    passed,
    skipped,
    warned,
)
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
SHARE_PIDS = "share the PID namespace of the pod's containers (shareProcessNamespace)"
ALLOCATING = "allocating"  # of a writer's session: it waits for a slab, else for a moment only
NO_GPU = "no GPU is visible; see the NVIDIA driver check"

# --- the kernel


def peer_pidfd(facts: PodFacts) -> Finding:
    """Needed to see deaths across PID namespaces, and to be safe from recycled pids."""
    machine, fix = facts.machine, "use Linux 6.5 or newer"
    if machine.has_peer_pidfd:
        return passed(f"supported by kernel {machine.release}")
    blind = [
        str(each["engine"])
        for each in facts.view["lockserver"].get("supervisors", ())
        if each.get("connected") and each.get("pidfd_source") == "none"
    ]
    found = f"kernel {machine.release} has no SO_PEERPIDFD"
    if blind:
        who = ", ".join(blind)
        return failed(
            f"{found}, and the lock server cannot see the processes of {who}",
            f"{fix}, or {SHARE_PIDS}",
        )
    if not machine.has_pidfd_open:
        return failed(f"{found} and no pidfd_open", fix)
    return warned(f"{found}: all parts must share a PID namespace", f"{fix}, or {SHARE_PIDS}")


def pidfd_open(facts: PodFacts) -> Finding:
    """A supervisor watches its backend's processes by pidfd."""
    if facts.machine.has_pidfd_open:
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

    def below(least: int) -> str:
        low = [it for it in facts.limits if it.hard_limit < least]
        return "; ".join(f"{it.process} may open {it.hard_limit} descriptors" for it in low)

    if short := below(FDS_MIN):
        found = f"{short}: the memory service and an engine need at least {FDS_MIN}"
        return failed(found, f"{fix} to {FDS_ADVISED} or more")
    full = [each for each in facts.limits if each.count > FDS_USED_SHARE_MAX * each.limit]
    if full:
        return warned(
            "; ".join(f"{each.process} has {each.count} of {each.limit} open" for each in full),
            f"{fix}; if it keeps growing, collect a support bundle and report it",
        )
    if short := below(FDS_ADVISED):
        return warned(f"{short}: {FDS_ADVISED} recommended", f"{fix} to {FDS_ADVISED}")
    least = min((each.hard_limit for each in facts.limits), default=0)
    return passed(f"the limit is at least {least}; processes checked: {len(facts.limits)}")


def clock_source(facts: PodFacts) -> Finding:
    """Deadlines and heartbeats read the clock constantly."""
    source = facts.machine.clock_source
    if source is None:
        return skipped("the kernel does not report its clock source")
    if source in SLOW_CLOCKS:
        return warned(
            f"the clock source is {source}, which is slow to read",
            "find out why the kernel rejected tsc (dmesg | grep -i tsc), and boot with another",
        )
    return passed(source)


# --- memory, files, ports, packages


def shared_memory(facts: PodFacts) -> Finding:
    """Ranks of one engine communicate through /dev/shm."""
    if facts.is_hidden(ENGINE):
        return skipped("engines have another container's /dev/shm; run doctor there")
    found = facts.machine.shm_bytes
    if found is None:
        return warned("/dev/shm cannot be read", "mount a tmpfs there")
    wanted = SHM_VLLM_BYTES if "vllm" in facts.packages else SHM_MIN_BYTES
    if found < wanted:
        return warned(
            f"/dev/shm has {size(found)}; {size(wanted)} recommended",
            "mount an emptyDir with medium Memory there (docker: --shm-size)",
        )
    return passed(size(found))


def _host_devices(facts: PodFacts) -> list[Document]:
    found = [device for part in facts.view["gms"] for device in devices(part)]
    return [each for each in found if str(each.get("device_uuid")).startswith("HOST-")]


def huge_pages(facts: PodFacts) -> Finding:
    """An engine that dies unmaps its host memory page by page, and the next one waits for that."""
    machine = facts.machine
    if not _host_devices(facts):
        return skipped("no host-memory device is served")
    if machine.has_huge_slabs:
        return passed("the memory service's memory gets huge pages")
    return warned(
        f"kernel {machine.release} gives the memory service's memory small pages, so the fence of a"
        " dead engine takes 0.1 to 0.2 s more for each GiB that it used; shmem_enabled is"
        f" {machine.shared_huge_pages or 'missing: it has no transparent huge pages'}",
        "on the host, `echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`, or use"
        " Linux 6.1 or newer, built with them",
    )


def host_memory(facts: PodFacts) -> Finding:
    """Host-memory devices must fit into this machine's memory."""
    sizes = {
        device_of(str(each["device_uuid"])): int(each.get("capacity_bytes") or 0)
        for each in _host_devices(facts)
    }
    promised, has = sum(sizes.values()), facts.machine
    if not promised:
        return skipped("no host-memory device is served")
    if facts.is_hidden(GMS):
        return skipped("the memory service has another container's limit; run doctor there")
    found = f"devices of {size(promised)}; {has.memory_limit} is {size(has.memory_bytes)}"
    if promised > has.memory_bytes:
        return warned(
            f"{found}: the kernel may kill processes while weights load",
            "give `gms serve` a smaller --device-bytes, or the machine more memory",
        )
    return passed(found)


def termination_log(facts: PodFacts) -> Finding:
    """Where `kubectl describe pod` reads why a container exited."""
    path, problem = facts.machine.termination_log, facts.machine.termination_log_problem
    if path is None:
        return skipped("there is none: this is not a Kubernetes container")
    if problem:
        return warned(
            f"{path} is not writable: {problem}",
            "run the container as the owner of the file, or set --termination-log",
        )
    return passed(f"{path} is writable")


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
    return passed(f"{', '.join(str(it.number) for it in facts.ports)}: free, or used by the pod")


def _is_strange(port: Port, facts: PodFacts) -> bool:
    """Whether another process has the port of a part that is not running: a part that runs has
    bound its ports, whatever their numbers."""
    if not port.is_taken or (port.owner is not None and port.owner.pid in facts.pids):
        return False
    names = {"locks": "lockserver", "load": "gateway", "models": "pool"}
    for part in parts_of(facts.view):
        keys = [name for key, name in names.items() if key in part]
        name = str(part["engine"].get("id")) if "engine" in part else (keys or ["gms"])[0]
        if "error" not in part and name == port.part:
            return False
    return True


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


# --- GPUs, and who holds their memory


def driver(facts: PodFacts) -> Finding:
    """NVML answers."""
    found = facts.gpus
    if found.problem is not None:
        fix = "look at `nvidia-smi` and `dmesg`; the node may need a reboot"
        return failed(found.problem, fix) if found.is_broken else skipped(found.problem)
    if not found.listed:
        return warned(
            f"the driver ({found.driver_version}) lists no GPU",
            "give this container a GPU, with a resource claim or the container runtime's --gpus",
        )
    return passed(f"driver {found.driver_version}; GPUs: {len(found.listed)}")


def device_uuid(facts: PodFacts) -> Finding:
    """Devices that the pod serves, or is configured to serve, are visible here."""
    wanted = dict.fromkeys(facts.gpus_served(), "the memory service serves it")
    for variable, uuids in facts.named.items():
        wanted |= dict.fromkeys(uuids, f"{variable} names it")
    if facts.gpus.problem is not None:
        return skipped(NO_GPU)
    listed = [uuid for gpu in facts.gpus.listed for uuid in (gpu.uuid, *gpu.instances)]
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


def persistence_mode(facts: PodFacts) -> Finding:
    """Without it the driver resets a device when its last user exits."""
    off = [gpu.uuid for gpu in facts.gpus.listed if gpu.is_persistent is False]
    if off:
        return warned(
            f"persistence mode is off on {', '.join(off)}: the driver resets the device when its "
            "last process exits, and the next start waits for seconds",
            "on the host, run `nvidia-smi -pm 1` or nvidia-persistenced",
        )
    return _well(facts, f"not disabled; GPUs: {len(facts.gpus.listed)}")


def mig_mode(facts: PodFacts) -> Finding:
    """A GPU in MIG mode is usable only through its instances."""
    split = [gpu for gpu in facts.gpus.listed if gpu.is_mig]
    empty = [gpu.uuid for gpu in split if not gpu.instances]
    if empty:
        return failed(
            f"{', '.join(empty)} is in MIG mode, and no instance of it is visible here",
            "create instances (`nvidia-smi mig -cgi … -C`), or disable MIG (`nvidia-smi -mig 0`)",
        )
    named = ", ".join(f"{gpu.uuid} ({len(gpu.instances)} instances)" for gpu in split)
    return _well(facts, f"in MIG mode: {named}" if named else "no GPU is in MIG mode")


def sharing_mode(facts: PodFacts) -> Finding:
    """Several processes of a pod open the device at once."""
    closed = [gpu for gpu in facts.gpus.listed if gpu.compute_mode not in (None, "default")]
    if closed:
        return failed(
            ", ".join(f"{gpu.uuid} has compute mode {gpu.compute_mode}" for gpu in closed)
            + ": a second engine cannot open the device",
            "on the host, run `nvidia-smi -c 0`",
        )
    if facts.mps is not None and facts.gpus.listed:
        return warned(
            f"the Multi-Process Service is in use ({facts.mps}): a fault in one client kills all "
            "of them, the standby along with the active engine",
            "run the pod without MPS: unset CUDA_MPS_PIPE_DIRECTORY, stop the daemon",
        )
    return _well(facts, "compute mode is default, no Multi-Process Service found")


def memory_outside(facts: PodFacts) -> Finding:
    """Device memory in use outside the pod, which a takeover may lack."""
    if facts.slabs:
        return failed(
            f"processes outside the pod hold its weights: {_held(facts.slabs)}",
            "find out what they are (an engine that lost its supervisor?) and kill them; the "
            "memory is freed when the last one exits",
        )
    ours = facts.gpus_served() or [uuid for uuids in facts.named.values() for uuid in uuids]
    strangers = [
        (gpu, hold)
        for gpu in facts.gpus.listed
        for hold in gpu.holds
        if hold.process.pid not in facts.pids
    ]
    if not strangers:
        if facts.gpus.problem is not None and not facts.pids:
            return skipped(NO_GPU)
        return passed("no process outside the pod holds memory of its devices")
    if facts.is_hidden():
        return skipped(
            "parts of the pod run in PID namespaces that are not visible here, so their processes "
            f"cannot be told apart from others: {_held(hold for _, hold in strangers)}"
        )
    found = "; ".join(f"{_held([hold])} uses memory of {gpu.uuid}" for gpu, hold in strangers)
    listed = [uuid for gpu, _ in strangers for uuid in (gpu.uuid, *gpu.instances)]
    judge = failed if any(_matches(each, listed) for each in ours) else warned
    return judge(found, "stop what is not needed, or give the pod a device of its own")


def kv_memory(facts: PodFacts) -> Finding:
    """Each device's KV memory has a server, and no engine waits for it."""
    found = [
        (str(each.get("device_uuid")), each, each.get("kv") or {}) for each in facts.view["gms"]
    ]
    for name, _, kv in found:
        for waiter in kv.get("waiting") or ():
            return warned(
                f"{waiter['engine']} waits for the KV memory of {name}: {waiter['message']}",
                "resume (`kill -CONT`) or kill the process that it names, or free memory",
            )
    wrong = [
        f"{name}: {why}" for name, _, kv in found if (why := kv.get("reason") or kv.get("problem"))
    ]
    if wrong:
        return warned(
            f"the KV memory has no working server ({'; '.join(wrong)}); engines that wake wait for"
            " it",
            "read the log of `gms serve`, which restarts it",
        )
    idle = []
    for name, device, kv in found:
        if kv.get("state") == "idle":
            idle.append(f"; {size(kv.get('pool_bytes'))} of {name} are idle")
            if any(it.get("state") == ALLOCATING for it in device.get("sessions") or ()):
                return warned(
                    f"{size(kv.get('pool_bytes'))} of KV memory of {name} are idle, and an engine"
                    " waits for memory of that device",
                    f"`gms drop-kv --device {name}` frees it",
                )
    return passed(f"no engine waits for KV memory{''.join(idle)}")


def _well(facts: PodFacts, found: str) -> Finding:
    """`found` passes, unless no GPU is visible."""
    return passed(found) if facts.gpus.listed else skipped(NO_GPU)


def _matches(wanted: str, listed: list[str]) -> bool:
    """A prefix of a UUID is enough, as for CUDA."""
    return any(uuid.lower().startswith(wanted.lower()) for uuid in listed)


def _held(holds: Iterable[HeldMemory]) -> str:
    return ", ".join(f"{each.process} ({size(each.size_bytes)})" for each in holds)
