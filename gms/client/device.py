"""Which kind of memory a device has, by its name, and whether this machine's processes share a
context.

With NVIDIA's Multi-Process Service a context belongs to the service and not to the process that
requested it: a fault in one client ends all of them, and what a killed client had launched may go
on writing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from gms.vmm.host import HostMemory
from gms.vmm.interface import DeviceMemory
from plumbing.pod.models import device_of
from plumbing.service import procfs


def memory_for(device: str) -> DeviceMemory:
    """The memory of `device`: a GPU's for `GPU-…` and `MIG-…`, the host's for `HOST-…`; of a place,
    that of its device.

    Raises:
        UsageError: `gms.no_cuda`, `gms.device_not_visible`, …: never a fallback to the other kind.
        UnderstudyError: `gms.driver_failed`.
    """
    if not device.startswith(("GPU-", "MIG-")):
        return HostMemory()
    from gms.vmm.cuda import CudaMemory  # which loads cuda-python

    return CudaMemory(device_of(device))


MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
MPS_DAEMON = "nvidia-cuda-mps"  # prefix of its processes' names


def look_for_mps(environ: Mapping[str, str]) -> str | None:
    """Evidence of the service: its pipe directory is set, or its daemon runs."""
    pipes = environ.get(MPS_PIPE)
    if pipes and os.path.isdir(pipes):
        return f"{MPS_PIPE} is {pipes}"
    daemons = [pid for pid in procfs.pids() if procfs.name(pid).startswith(MPS_DAEMON)]
    return f"pid {daemons[0]} is {procfs.name(daemons[0])}" if daemons else None
