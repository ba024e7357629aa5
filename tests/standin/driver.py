"""The driver API as the stand-in's own tests call it: by name, a code's name beside the answer."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as api

POSIX_FD = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
READ = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
WRITE = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
STEP = 2 << 20  # the granularity

OK = "CUDA_SUCCESS"
INVALID = "CUDA_ERROR_INVALID_VALUE"


def code(name: str, *args: Any) -> str:
    """The name of the code that `cu<name>` answers with."""
    return str(getattr(api, f"cu{name}")(*args)[0].name)


def call(name: str, *args: Any) -> Any:
    """What `cu<name>` answers, which has to succeed."""
    error, *values = getattr(api, f"cu{name}")(*args)
    assert error.name == OK, f"cu{name}: {error.name}"
    return values[0] if len(values) == 1 else values


def location(device: int = 0) -> Any:
    found = api.CUmemLocation()
    found.type, found.id = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device
    return found


def prop(device: int = 0) -> Any:
    found = api.CUmemAllocationProp()
    found.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    found.requestedHandleTypes, found.location = POSIX_FD, location(device)
    return found


def access(flags: Any, device: int = 0) -> list[Any]:
    found = api.CUmemAccessDesc()
    found.location, found.flags = location(device), flags
    return [found]


def create(size: int = STEP, device: int = 0) -> Any:
    return call("MemCreate", size, prop(device), 0)


def reserve(size: int = STEP) -> int:
    return int(call("MemAddressReserve", size, 0, 0, 0))


def export(handle: Any) -> int:
    return int(call("MemExportToShareableHandle", handle, POSIX_FD, 0))


def device_id(device: int) -> str:
    """The UUID of a device, in hex; of a MIG instance, its own and not its GPU's."""
    # cuda-python 13 has one name for the newer of two calls, 12 has two.
    name = "DeviceGetUuid_v2" if hasattr(api, "cuDeviceGetUuid_v2") else "DeviceGetUuid"
    return bytes(call(name, device).bytes).hex()
