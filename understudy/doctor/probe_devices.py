"""Probes the GPUs, and finds processes that hold the pod's memory. Thin: see `facts.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from plumbing.service import procfs
from understudy.doctor.facts import GpuFacts, Gpus, HeldMemory, Process
from understudy.host import output_of, slabs_of

NVML_DEADLINE_S = 20.0  # NVML takes seconds to initialise eight GPUs that no process has open
NAMING = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "UNDERSTUDY_GPUS")
SLAB_NAME_DIGITS = 8  # of an epoch's id, in the names of its slabs


async def look_at_gpus() -> Gpus:
    """What NVML reports, or why it does not answer."""
    command = (sys.executable, "-m", "gms.server.devices")
    try:
        code, output, _ = await output_of(*command, timeout_s=NVML_DEADLINE_S)
    except TimeoutError:
        why = f"the driver did not answer in {NVML_DEADLINE_S:g} s"
        return Gpus(problem=why, is_broken=True)
    try:
        document: dict[str, Any] = json.loads(output)
    except ValueError:
        why = f"the process that asked the driver died with code {code}"
        return Gpus(problem=why, is_broken=True)
    if "problem" in document:
        return Gpus(problem=document["problem"], is_broken=document["is_broken"])
    return Gpus(tuple(map(_gpu, document["gpus"])), document["driver_version"])


def _gpu(found: Mapping[str, Any]) -> GpuFacts:
    return GpuFacts(
        uuid=found["uuid"],
        instances=tuple(found["instances"]),
        is_mig=found["is_mig"],
        is_persistent=found["is_persistent"],
        compute_mode=found["compute_mode"],
        holds=tuple(
            HeldMemory(Process(each["pid"], procfs.name(each["pid"])), each["used_bytes"])
            for each in found["processes"]
        ),
    )


def named_devices(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """The UUIDs in the environment, by variable; indices and values like `all` do not count."""
    found = {name: environ.get(name, "").split(",") for name in NAMING}
    uuids = {
        name: [word.strip() for word in words if word.strip().startswith(("GPU-", "MIG-"))]
        for name, words in found.items()
    }
    return {name: words for name, words in uuids.items() if words}


def slabs_outside(
    directory: str, gms: Sequence[Mapping[str, Any]], pids: Collection[int]
) -> list[HeldMemory]:
    """Host memory of this pod's epochs that processes other than `pids` hold."""
    epochs = {path.stem.rpartition("_")[2] for path in Path(directory).glob("gms_*.epoch")}
    epochs |= {str(device["epoch"]) for device in gms if device.get("epoch")}
    digits = {epoch[:SLAB_NAME_DIGITS] for epoch in epochs}
    outside = [pid for pid in procfs.pids() if pid not in pids] if digits else []
    held = [(pid, _slab_bytes(pid, digits)) for pid in outside]
    return [HeldMemory(Process(pid, procfs.name(pid)), found) for pid, found in held if found]


def _slab_bytes(pid: int, epochs: Collection[str]) -> int:
    """The host memory that `pid` holds of `epochs`, which are the first digits of their ids."""
    slabs = slabs_of(pid).values()
    return sum(it.size_bytes for it in slabs if it.name[:SLAB_NAME_DIGITS] in epochs)
