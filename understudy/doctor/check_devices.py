"""Checks of the GPUs and of processes that hold their memory. Pure.

Without a driver they are skipped: a lock server's container has none, and host memory needs none.
"""

from __future__ import annotations

from collections.abc import Iterable

from plumbing.part.format import size
from understudy.doctor.facts import GpuFacts, HeldMemory, PodFacts
from understudy.doctor.findings import Finding, HealthCheck, failed, passed, skipped, warned

ALLOCATING = "allocating"  # of a writer's session: it waits for a slab, else for a moment only
NO_GPU = "no GPU is visible; see the NVIDIA driver check"


def driver(facts: PodFacts) -> Finding:
    """NVML answers."""
    if facts.gpus.problem is not None and facts.gpus.is_broken:
        return failed(
            facts.gpus.problem, "look at `nvidia-smi` and `dmesg`; the node may need a reboot"
        )
    if facts.gpus.problem is not None:
        return skipped(facts.gpus.problem)
    if not facts.gpus.listed:
        return warned(
            f"the driver ({facts.gpus.driver_version}) lists no GPU",
            "give this container a GPU, with a resource claim or the container runtime's --gpus",
        )
    count = len(facts.gpus.listed)
    return passed(f"driver {facts.gpus.driver_version}, {count} GPU{'s' if count > 1 else ''}")


def device_uuid(facts: PodFacts) -> Finding:
    """Devices that the pod serves, or is configured to serve, are visible here."""
    wanted = dict.fromkeys(facts.gpus_served(), "the memory service serves it")
    for variable, uuids in facts.named.items():
        wanted |= dict.fromkeys(uuids, f"{variable} names it")
    if facts.gpus.problem is not None:
        return skipped(NO_GPU)
    listed = [uuid for gpu in facts.gpus.listed for uuid in (gpu.uuid, *gpu.instances)]
    wrong = {uuid: why for uuid, why in wanted.items() if not _matches(uuid, listed)}
    if wrong:
        return failed(
            "; ".join(f"{uuid} is not visible here, but {why}" for uuid, why in wrong.items())
            + f"; the driver lists {', '.join(listed) or 'none'}",
            "give every container the same devices (one resource claim), with UUIDs from "
            "`nvidia-smi -L`",
        )
    if not wanted:
        return passed(f"no device is configured or served; the driver lists {', '.join(listed)}")
    return passed(", ".join(wanted))


def persistence_mode(facts: PodFacts) -> Finding:
    """Without it the driver resets a device when its last user exits."""
    found = _known(facts)
    if isinstance(found, Finding):
        return found
    off = [gpu.uuid for gpu in found if gpu.is_persistent is False]
    if off:
        return warned(
            f"persistence mode is off on {', '.join(off)}: the driver resets the device when its "
            "last process exits, and the next start waits for seconds",
            "on the host, run `nvidia-smi -pm 1` or nvidia-persistenced",
        )
    return passed(f"not disabled on any of {len(found)} GPU{'s' if len(found) > 1 else ''}")


def mig_mode(facts: PodFacts) -> Finding:
    """A GPU in MIG mode is usable only through its instances."""
    found = _known(facts)
    if isinstance(found, Finding):
        return found
    empty = [gpu.uuid for gpu in found if gpu.is_mig and not gpu.instances]
    if empty:
        return failed(
            f"{', '.join(empty)} is in MIG mode, and no instance of it is visible here",
            "create instances (`nvidia-smi mig -cgi … -C`), or disable MIG (`nvidia-smi -mig 0`)",
        )
    split = [f"{gpu.uuid} ({len(gpu.instances)} instances)" for gpu in found if gpu.is_mig]
    return passed(f"in MIG mode: {', '.join(split)}" if split else "no GPU is in MIG mode")


def sharing_mode(facts: PodFacts) -> Finding:
    """Several processes of a pod open the device at once."""
    found = _known(facts)
    if isinstance(found, Finding):
        return found
    closed = [gpu for gpu in found if gpu.compute_mode not in (None, "default")]
    if closed:
        return failed(
            ", ".join(f"{gpu.uuid} has compute mode {gpu.compute_mode}" for gpu in closed)
            + ": a second engine cannot open the device",
            "on the host, run `nvidia-smi -c 0`",
        )
    if facts.mps is not None:
        return warned(
            f"the Multi-Process Service is in use ({facts.mps}): a fault in one client kills all "
            "of them, the standby along with the active engine",
            "run the pod without MPS: unset CUDA_MPS_PIPE_DIRECTORY, stop the daemon",
        )
    return passed("compute mode is default, no Multi-Process Service found")


def memory_outside(facts: PodFacts) -> Finding:
    """Device memory in use outside the pod, which a takeover may lack."""
    if facts.slabs:
        return failed(
            f"processes outside the pod hold its weights: {_held(facts.slabs)}",
            "find out what they are (an engine that lost its supervisor?) and kill them; the "
            "memory is freed when the last one exits",
        )
    devices = facts.gpus_served() or [u for uuids in facts.named.values() for u in uuids]
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
    fix = "stop what is not needed, or give the pod a device of its own"
    is_ours = [gpu for gpu, _ in strangers if _serves(gpu, devices)]
    return failed(found, fix) if is_ours else warned(found, fix)


def kv_memory(facts: PodFacts) -> Finding:
    """Each device's KV memory has a server, and no engine waits for it."""
    found = [(str(each.get("device_uuid")), each.get("kv") or {}) for each in facts.view["gms"]]
    for name, kv in found:
        for waiter in kv.get("waiting") or ():
            return warned(
                f"{waiter['engine']} waits for the KV memory of {name}: {waiter['message']}",
                "resume (`kill -CONT`) or kill the process that it names, or free memory",
            )
    troubles = [(name, kv.get("reason") or kv.get("problem")) for name, kv in found]
    wrong = "; ".join(f"{name}: {trouble}" for name, trouble in troubles if trouble)
    if wrong:
        return warned(
            f"the KV memory has no working server ({wrong}); engines that wake wait for it",
            "read the log of `gms serve`, which restarts it",
        )
    idle = [(name, kv) for name, kv in found if kv.get("state") == "idle"]
    short = {
        str(each.get("device_uuid"))
        for each in facts.view["gms"]
        for session in each.get("sessions") or ()
        if session.get("state") == ALLOCATING
    }
    for name, kv in idle:
        if name in short:
            return warned(
                f"{size(kv.get('pool_bytes'))} of KV memory of {name} are idle, and an engine waits"
                " for memory of that device",
                f"`gms drop-kv --device {name}` frees it",
            )
    kept = "; ".join(f"{size(kv.get('pool_bytes'))} of {name} are idle" for name, kv in idle)
    return passed(f"no engine waits for KV memory{f'; {kept}' if kept else ''}")


def _known(facts: PodFacts) -> tuple[GpuFacts, ...] | Finding:
    """The GPUs, or the finding that none is visible."""
    return facts.gpus.listed or skipped(NO_GPU)


def _matches(wanted: str, listed: list[str]) -> bool:
    """A prefix of a UUID is enough, as for CUDA."""
    return any(uuid.lower().startswith(wanted.lower()) for uuid in listed)


def _serves(gpu: GpuFacts, devices: list[str]) -> bool:
    return any(_matches(each, [gpu.uuid, *gpu.instances]) for each in devices)


def _held(holds: Iterable[HeldMemory]) -> str:
    return ", ".join(f"{each.process} ({size(each.size_bytes)})" for each in holds)


CHECKS = (
    HealthCheck("driver", "NVIDIA driver", driver),
    HealthCheck("device_uuid", "devices by UUID", device_uuid),
    HealthCheck("persistence_mode", "persistence mode", persistence_mode),
    HealthCheck("mig_mode", "MIG mode", mig_mode),
    HealthCheck("sharing_mode", "compute mode and MPS", sharing_mode),
    HealthCheck("memory_outside", "memory held outside the pod", memory_outside),
    HealthCheck("kv_memory", "KV memory", kv_memory),
)
