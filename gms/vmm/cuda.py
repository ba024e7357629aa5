"""The memory of a GPU: CUDA's virtual memory management, shared by POSIX descriptors.

    physical memory   cuMemCreate, or cuMemImport… of a descriptor     cuMemRelease, close
    addresses         cuMemAddressReserve                              cuMemAddressFree
    a mapping         cuMemMap, then cuMemSetAccess                    cuMemUnmap

Physical memory is freed when the last handle, descriptor and mapping anywhere is gone, and nothing
forces that. A descriptor carries neither its size nor any right. All that is documented of sizes is
a bound: a map must not reach beyond the end of the allocation. Whether one of less than all is
refused is not documented, and nothing here relies on it. Any process with the descriptor may map it
writable, so read-only is each client's own rule.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from gms.vmm.cuda_driver import Driver
from gms.vmm.interface import Allocation, Reservation
from plumbing.errors import UnderstudyError, UsageError
from plumbing.wire.fds import OwnedFd

# Handles above about 4 GiB have tripped the driver's memory scrubber on some machines.
ALLOCATION_BYTES_MAX = 2 << 30

# The driver's errors for a wrong descriptor or size.
NOT_A_SLAB = (
    "CUDA_ERROR_INVALID_VALUE",
    "CUDA_ERROR_INVALID_HANDLE",
    "CUDA_ERROR_INVALID_DEVICE",
)


class CudaAllocation:
    """A handle, and the one descriptor by which it is lent; both keep the memory alive."""

    __slots__ = ("_fd", "_handle", "_is_sealed", "_memory", "size_bytes")

    def __init__(self, memory: CudaMemory, handle: Any, fd: OwnedFd, size_bytes: int) -> None:
        """Takes `handle` and `fd`."""
        self.size_bytes = size_bytes
        self._memory, self._handle, self._fd = memory, handle, fd
        self._is_sealed = False

    @property
    def handle(self) -> Any:
        """Lend the handle."""
        assert self._handle is not None, "this memory was released"
        return self._handle

    def fileno(self) -> int:
        """Lend the descriptor."""
        return self._fd.fileno()

    def export(self, *, writable: bool) -> OwnedFd:
        assert not (writable and self._is_sealed), "sealed memory is not exported writable"
        return self._fd.duplicate()

    def seal(self) -> None:
        """The driver has no seal; from here on we export it to readers only."""
        self._is_sealed = True

    def check(self, name: str, *, is_sealed: bool = True) -> None:
        """Its size only: the driver knows no names and cannot identify a handle."""
        reservation = self._memory.reserve(self.size_bytes + self._memory.granularity_bytes)
        try:
            reservation.probe(self)
        finally:
            reservation.free()

    def release(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._fd.close)
            handle, self._handle = self._handle, None
            if handle is not None:
                self._memory.driver.call("MemRelease", handle)


class CudaReservation(Reservation):
    """Addresses of the device, in which memory is mapped from the start without holes."""

    def __init__(self, memory: CudaMemory, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self._memory, self._call = memory, memory.driver.call
        self.address = int(self._call("MemAddressReserve", size_bytes, 0, 0, 0))
        self._mapped: list[int] = []  # sizes, side by side from the start

    def map(self, offset_bytes: int, allocations: Sequence[Allocation], *, writable: bool) -> None:
        cuda = [each for each in allocations if isinstance(each, CudaAllocation)]
        assert len(cuda) == len(allocations), "addresses of a device take memory of a device only"
        size_bytes = sum(each.size_bytes for each in cuda)
        self.check_next(offset_bytes, size_bytes, writable=writable)
        start = at = self.address + offset_bytes
        with contextlib.ExitStack() as stack:
            for each in cuda:
                self._map(at, each)
                stack.callback(self._call, "MemUnmap", at, each.size_bytes)
                at += each.size_bytes
            self._set_access(start, size_bytes, writable=writable)
            stack.pop_all()
        self._mapped += [each.size_bytes for each in cuda]
        self.mapped_bytes, self.is_writable = offset_bytes + size_bytes, writable

    def probe(self, allocation: CudaAllocation) -> None:
        """Check the size of `allocation` by the documented bound of a map: its size can be mapped,
        one granule more cannot. Without access, which a server without a context may not be able
        to set. Takes one granule more of addresses than the allocation has.
        """
        self._map(self.address, allocation)
        self._call("MemUnmap", self.address, allocation.size_bytes)
        beyond_bytes = allocation.size_bytes + self._memory.granularity_bytes
        try:
            self._call("MemMap", self.address, beyond_bytes, 0, allocation.handle, 0)
        except UnderstudyError as error:
            if error.details.get("driver_error") in NOT_A_SLAB:
                return
            raise
        self._call("MemUnmap", self.address, beyond_bytes)
        raise UnderstudyError(
            "gms.bad_slab", f"a slab was refused: it has more than {allocation.size_bytes} bytes"
        )

    def make_read_only(self) -> None:
        self._set_access(self.address, self.mapped_bytes, writable=False)
        self.is_writable = False

    def unmap(self) -> None:
        # One by one: the driver need not accept as a whole a range that was mapped in parts.
        at = self.address
        with contextlib.ExitStack() as stack:
            for size_bytes in self._mapped:
                stack.callback(self._call, "MemUnmap", at, size_bytes)
                at += size_bytes
            self._mapped, self.mapped_bytes = [], 0

    def free(self) -> None:
        if self.address:
            with contextlib.ExitStack() as stack:
                stack.callback(self._call, "MemAddressFree", self.address, self.size_bytes)
                stack.callback(setattr, self, "address", 0)
                self.unmap()

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        self.check_mapped(offset_bytes, size_bytes)
        found = bytearray(size_bytes)
        if size_bytes:
            self._call("MemcpyDtoH", found, self.address + offset_bytes, size_bytes)
        return bytes(found)

    def write(self, offset_bytes: int, data: bytes | memoryview) -> None:
        flat = memoryview(data).cast("B")
        self.check_mapped(offset_bytes, len(flat))
        if flat:
            self._call("MemcpyHtoD", self.address + offset_bytes, flat, len(flat))
            # From pageable memory it may return before the last part is copied.
            self._call("CtxSynchronize")

    def clear(self) -> None:
        if self._mapped:
            self._call("MemsetD32", self.address, 0, self.mapped_bytes // 4)
            self._call("CtxSynchronize")

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        raise UnderstudyError(
            "gms.not_host_memory",
            f"the memory of {self._memory.driver.uuid} has only device addresses; copy with read "
            "and write, or create tensors at its addresses",
        )

    def _map(self, address: int, allocation: CudaAllocation) -> None:
        try:
            self._call("MemMap", address, allocation.size_bytes, 0, allocation.handle, 0)
        except UnderstudyError as error:
            raise _bad_slab(
                error, f"{allocation.size_bytes} bytes of it cannot be mapped"
            ) from error

    def _set_access(self, address: int, size_bytes: int, *, writable: bool) -> None:
        if size_bytes:
            access = self._memory.access(writable=writable)
            self._call("MemSetAccess", address, size_bytes, [access], 1)


class CudaMemory:
    """The `cuda` kind of memory, of the one device called `device_uuid`."""

    kind = "cuda"
    allocation_bytes_max: int | None = ALLOCATION_BYTES_MAX

    def __init__(self, device_uuid: str, *, context: bool = False) -> None:
        """`context`: create one before a call needs it."""
        self.driver = Driver(device_uuid)
        if context:
            self.driver.use_context()
        api = self.driver.api
        self._fd_type = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._prop = api.CUmemAllocationProp()
        self._prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._prop.requestedHandleTypes = self._fd_type
        self._prop.location = self._here()
        least = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._check_suitable()
        call = self.driver.call
        self.granularity_bytes = int(call("MemGetAllocationGranularity", self._prop, least))
        self.capacity_bytes = int(call("DeviceTotalMem", self.driver.ordinal))
        self._version = self.driver.version()

    def create(self, size_bytes: int, name: str) -> CudaAllocation:
        assert size_bytes > 0
        assert size_bytes % self.granularity_bytes == 0
        handle = self.driver.call("MemCreate", size_bytes, self._prop, 0)
        try:
            fd = int(self.driver.call("MemExportToShareableHandle", handle, self._fd_type, 0))
            os.set_inheritable(fd, False)  # the driver does not promise it
        except BaseException:
            self.driver.call("MemRelease", handle)
            raise
        return CudaAllocation(self, handle, OwnedFd(fd), size_bytes)

    def adopt(self, fd: OwnedFd, size_bytes: int) -> CudaAllocation:
        try:
            handle = self.driver.call("MemImportFromShareableHandle", fd.fileno(), self._fd_type)
        except UnderstudyError as error:
            fd.close()
            raise _bad_slab(error, "it is not memory of this device") from error
        return CudaAllocation(self, handle, fd, size_bytes)

    def reserve(self, size_bytes: int) -> CudaReservation:
        return CudaReservation(self, size_bytes)

    def facts(self) -> dict[str, Any]:
        """Makes no driver call, so it may run on a loop."""
        return {
            "cuda_version": self._version,
            "granularity_bytes": self.granularity_bytes,
            "has_context": self.driver.has_context,
        }

    def access(self, *, writable: bool) -> Any:
        """The driver's description of an access: this device, read-only or read-write."""
        flags = self.driver.api.CUmemAccess_flags
        read, write = flags.CU_MEM_ACCESS_FLAGS_PROT_READ, flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        description = self.driver.api.CUmemAccessDesc()
        description.location = self._here()
        description.flags = write if writable else read
        return description

    def _here(self) -> Any:
        location = self.driver.api.CUmemLocation()
        location.type = self.driver.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self.driver.ordinal
        return location

    def _check_suitable(self) -> None:
        attributes = self.driver.api.CUdevice_attribute
        for what in ("VIRTUAL_MEMORY_MANAGEMENT", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"):
            attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{what}_SUPPORTED")
            if not self.driver.call("DeviceGetAttribute", attribute, self.driver.ordinal):
                raise UsageError(
                    "gms.device_unsuitable",
                    f"{self.driver.uuid} does not support {what}, without which memory cannot be "
                    "shared between processes",
                )


def _bad_slab(error: UnderstudyError, why: str) -> UnderstudyError:
    """`error`, as the sender's fault if the driver rejected the arguments."""
    if error.details.get("driver_error") not in NOT_A_SLAB:
        return error
    return UnderstudyError(
        "gms.bad_slab", f"a slab was refused: {why} ({error.message})", **error.details
    )
