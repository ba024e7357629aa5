"""Which kind of memory a device has, by its name alone."""

from __future__ import annotations

from gms.vmm.host import HostMemory
from gms.vmm.interface import DeviceMemory
from plumbing.pod.models import device_of


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
