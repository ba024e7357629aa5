"""Checks of the GPUs and of who has their memory. Pure.

Where there is no driver they are skipped with the reason: a lock server's container has none, and
host memory needs none.
"""

from __future__ import annotations

from collections.abc import Iterable

from plumbing.part.format import size
from understudy.doctor.facts import Facts, Gpu, Hold
from understudy.doctor.finding import Check, Finding, failed, passed, skipped, warned

NO_GPU = "there is no GPU to ask; the check of the driver says why"


def driver(facts: Facts) -> Finding:
    """NVML answers."""
    if facts.gpus.problem is not None and facts.gpus.is_broken:
        return failed(
            facts.gpus.problem, "see what `nvidia-smi` and `dmesg` say; the node may need a restart"
        )
    if facts.gpus.problem is not None:
        return skipped(facts.gpus.problem)
    if not facts.gpus.listed:
        return warned(
            f"the driver ({facts.gpus.driver_version}) lists no GPU",
            "give this container a GPU: with a resource claim, or the runtime's --gpus",
        )
    count = len(facts.gpus.listed)
    return passed(f"driver {facts.gpus.driver_version}, {count} GPU{'s' if count > 1 else ''}")


def device_uuid(facts: Facts) -> Finding:
    """What the pod serves and what it was told to serve is a device of this machine."""
    wanted = dict.fromkeys(facts.gpus_served(), "the memory service serves it")
    for variable, uuids in facts.named.items():
        wanted |= dict.fromkeys(uuids, f"{variable} names it")
    if facts.gpus.problem is not None:
        return skipped(NO_GPU)
    listed = [uuid for gpu in facts.gpus.listed for uuid in (gpu.uuid, *gpu.instances)]
    wrong = {uuid: why for uuid, why in wanted.items() if not _matches(uuid, listed)}
    if wrong:
        return failed(
            "; ".join(f"there is no {uuid} here, and {why}" for uuid, why in wrong.items())
            + f"; the driver lists {', '.join(listed) or 'none'}",
            "give every container the same devices (one resource claim), and take the UUIDs from "
            "`nvidia-smi -L`",
        )
    if not wanted:
        return passed(f"no device is named or served; the driver lists {', '.join(listed)}")
    return passed(", ".join(wanted))


def persistence_mode(facts: Facts) -> Finding:
    """Without it the driver tears a device down with its last user, weights and all."""
    found = _known(facts)
    if isinstance(found, Finding):
        return found
    off = [gpu.uuid for gpu in found if gpu.is_persistent is False]
    if off:
        return warned(
            f"persistence mode is off on {', '.join(off)}: when the last process closes the device "
            "it is reset, and the next one waits for seconds",
            "on the host: `nvidia-smi -pm 1`, or run nvidia-persistenced",
        )
    return passed(f"off on none of {len(found)} GPU{'s' if len(found) > 1 else ''}")


def mig_mode(facts: Facts) -> Finding:
    """A GPU in MIG mode computes nothing by itself."""
    found = _known(facts)
    if isinstance(found, Finding):
        return found
    empty = [gpu.uuid for gpu in found if gpu.is_mig and not gpu.instances]
    if empty:
        return failed(
            f"{', '.join(empty)} is in MIG mode and has no instance that is visible here",
            "make instances (`nvidia-smi mig -cgi … -C`), or leave the mode (`nvidia-smi -mig 0`)",
        )
    split = [f"{gpu.uuid} ({len(gpu.instances)} instances)" for gpu in found if gpu.is_mig]
    return passed(f"in MIG mode: {', '.join(split)}" if split else "no GPU is in MIG mode")


def sharing_mode(facts: Facts) -> Finding:
    """Several processes of a pod have the device open, each with a context of its own."""
    found = _known(facts)
    if isinstance(found, Finding):
        return found
    closed = [gpu for gpu in found if gpu.compute_mode not in (None, "default")]
    if closed:
        return failed(
            ", ".join(f"{gpu.uuid} has compute mode {gpu.compute_mode}" for gpu in closed)
            + ": a second engine cannot open the device",
            "on the host: `nvidia-smi -c 0`",
        )
    if facts.mps is not None:
        return warned(
            f"the Multi-Process Service runs here ({facts.mps}): a fault of one client ends all of "
            "them, the standby with the active engine",
            "run the pod's containers without MPS (unset CUDA_MPS_PIPE_DIRECTORY, stop the daemon)",
        )
    return passed("compute mode is default, and no Multi-Process Service is seen")


def memory_outside(facts: Facts) -> Finding:
    """Memory that no part of the pod has, and that a takeover will miss."""
    if facts.slabs:
        return failed(
            f"weights of this pod are held by {_held(facts.slabs)}, outside the pod",
            "look what these processes are (an engine that lost its supervisor?) and end them: the "
            "memory is freed with the last of them",
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
            f"cannot be told from others: {_held(hold for _, hold in strangers)}"
        )
    said = "; ".join(f"{_held([hold])} has memory of {gpu.uuid}" for gpu, hold in strangers)
    mend = "end what is not needed there, or give the pod a device of its own"
    is_ours = [gpu for gpu, _ in strangers if _serves(gpu, devices)]
    return failed(said, mend) if is_ours else warned(said, mend)


def _known(facts: Facts) -> tuple[Gpu, ...] | Finding:
    """The GPUs, or the finding that there is nothing to ask."""
    return facts.gpus.listed or skipped(NO_GPU)


def _matches(wanted: str, listed: list[str]) -> bool:
    """UUIDs may be given by their beginning, as CUDA takes them."""
    return any(uuid.lower().startswith(wanted.lower()) for uuid in listed)


def _serves(gpu: Gpu, devices: list[str]) -> bool:
    return any(_matches(each, [gpu.uuid, *gpu.instances]) for each in devices)


def _held(holds: Iterable[Hold]) -> str:
    return ", ".join(f"{each.process} ({size(each.size_bytes)})" for each in holds)


CHECKS = (
    Check("driver", "NVIDIA driver", driver),
    Check("device_uuid", "devices by UUID", device_uuid),
    Check("persistence_mode", "persistence mode", persistence_mode),
    Check("mig_mode", "MIG mode", mig_mode),
    Check("sharing_mode", "compute mode and MPS", sharing_mode),
    Check("memory_outside", "memory held outside the pod", memory_outside),
)
