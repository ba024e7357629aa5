"""Which kind of memory a device has; its name says so."""

from __future__ import annotations

from gms.vmm.host import HostMemory
from gms.vmm.interface import Memory


def memory_for(device: str) -> Memory:
    """The memory of `device`: a GPU's for `GPU-…` and `MIG-…`, the host's for `HOST-…`.

    Raises:
        UsageError: `gms.no_cuda`, `gms.device_not_visible`, …: never the other kind instead.
        UnderstudyError: `gms.driver_failed`.
    """
    if not device.startswith(("GPU-", "MIG-")):
        return HostMemory()
    from gms.vmm.cuda import CudaMemory  # cuda-python comes with it

    return CudaMemory(device)
