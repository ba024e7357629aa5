"""Host memory in place of a GPU's: memfds, mapped at fixed addresses, sealed when committed.

ctypes and not `mmap.mmap`, which keeps a duplicate of each descriptor and cannot choose an address.
The surprising thing (measured): F_SEAL_WRITE is refused while any mapping lives that was made from
a writable descriptor, even one that `mprotect` made read-only. So a writer that commits maps each
slab over itself from a descriptor opened read-only anew (man 2 fcntl, File Sealing).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat

from gms.vmm.interface import Allocation
from understudy.errors import InvariantError, UnderstudyError
from understudy.wire.fds import OwnedFd

# man 2 mmap; the mmap module has these too, but not MAP_FIXED and MAP_NORESERVE on 3.11.
PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 0x1, 0x2, 0x10, 0x20, 0x4000
MAP_FAILED = ctypes.c_void_p(-1).value

# <linux/fcntl.h>; fcntl has them from Python 3.9 on under the same names.
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
ALL_SEALS = SIZE_SEALS | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class HostAllocation:
    """One memfd, held by one descriptor: read-write until it is sealed, read-only from then on."""

    def __init__(self, fd: OwnedFd, size_bytes: int, *, writable: bool) -> None:
        self.size_bytes = size_bytes
        self._fd = fd
        self.is_writable = writable

    def fileno(self) -> int:
        """Lend the descriptor."""
        return self._fd.fileno()

    def export(self, *, writable: bool) -> OwnedFd:
        if not writable:
            # Sealed memory is held by a read-only descriptor: one system call less per slab.
            return self._fd.duplicate() if not self.is_writable else _reopen_read_only(self._fd)
        if not self.is_writable:
            raise InvariantError("read-only memory cannot be exported writable")
        return self._fd.duplicate()

    def seal(self) -> None:
        if not self.is_writable:
            return
        read_only = _reopen_read_only(self._fd)
        try:
            fcntl.fcntl(self._fd.fileno(), fcntl.F_ADD_SEALS, ALL_SEALS)
        except OSError as error:
            read_only.close()
            if error.errno != errno.EBUSY:
                raise driver_failed("seal a slab", error) from error
            raise UnderstudyError(
                "gms.still_writable",
                "the memory cannot be sealed: some process still has it mapped for writing; a "
                "writer maps its slabs read-only before it commits, and so must its children",
            ) from error
        self._keep(read_only)

    def drop_write(self) -> None:
        """Hold it by a read-only descriptor from now on (for a writer that is about to commit)."""
        if self.is_writable:
            self._keep(_reopen_read_only(self._fd))

    def release(self) -> None:
        self._fd.close()

    def _keep(self, fd: OwnedFd) -> None:
        self._fd.close()
        self._fd = fd
        self.is_writable = False


class HostMapping:
    """A memfd at a fixed address."""

    def __init__(self, allocation: HostAllocation, address: int, *, writable: bool) -> None:
        self.address = address
        self.size_bytes = allocation.size_bytes
        self.is_writable = writable
        self._allocation = allocation
        self._is_mapped = True
        self._map()

    def view(self) -> memoryview:
        if not self._is_mapped:
            raise InvariantError("a view of memory that is not mapped")
        # An object over the bare address: nothing else keeps the mapping alive, nothing copies.
        buffer = (ctypes.c_ubyte * self.size_bytes).from_address(self.address)
        view = memoryview(buffer).cast("B")
        return view if self.is_writable else view.toreadonly()

    def make_read_only(self) -> None:
        self._allocation.drop_write()
        self.is_writable = False
        self._map()

    def unmap(self) -> None:
        if self._is_mapped:
            self._is_mapped = False
            _reserve_at(self.address, self.size_bytes)

    def _map(self) -> None:
        protection = PROT_READ | PROT_WRITE if self.is_writable else PROT_READ
        flags = MAP_SHARED | MAP_FIXED
        _mmap(self.address, self.size_bytes, protection, flags, self._allocation.fileno())


class HostReservation:
    """Addresses that nothing may touch (PROT_NONE) until something is mapped there."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.address = _reserve_at(None, size_bytes)

    def map(self, allocation: Allocation, *, writable: bool) -> HostMapping:
        if not isinstance(allocation, HostAllocation):
            raise InvariantError("host addresses take host memory only")
        if allocation.size_bytes > self.size_bytes:
            raise InvariantError(
                f"{allocation.size_bytes} bytes do not fit a range of {self.size_bytes}"
            )
        return HostMapping(allocation, self.address, writable=writable)

    def free(self) -> None:
        if self.address:
            _libc.munmap(self.address, self.size_bytes)
            self.address = 0


class HostMemory:
    """The `host` kind of memory."""

    kind = "host"
    granularity_bytes = os.sysconf("SC_PAGE_SIZE")

    def create(self, size_bytes: int, name: str) -> HostAllocation:
        if size_bytes <= 0 or size_bytes % self.granularity_bytes:
            raise InvariantError(f"{size_bytes} bytes are no multiple of the granularity")
        try:
            fd = OwnedFd(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        except OSError as error:
            raise driver_failed("create a slab", error) from error
        try:
            os.ftruncate(fd.fileno(), size_bytes)
            fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SIZE_SEALS)
        except OSError as error:
            fd.close()
            raise driver_failed(f"give a slab {size_bytes} bytes", error) from error
        return HostAllocation(fd, size_bytes, writable=True)

    def adopt(self, fd: OwnedFd, size_bytes: int) -> HostAllocation:
        try:
            found = os.fstat(fd.fileno())
            mode = fcntl.fcntl(fd.fileno(), fcntl.F_GETFL) & os.O_ACCMODE
        except OSError as error:
            fd.close()
            raise driver_failed("look at a slab", error) from error
        if not stat.S_ISREG(found.st_mode) or found.st_size != size_bytes:
            fd.close()
            raise UnderstudyError(
                "gms.bad_slab",
                f"a slab of {size_bytes} bytes was announced and {found.st_size} came",
            )
        return HostAllocation(fd, size_bytes, writable=mode == os.O_RDWR)

    def reserve(self, size_bytes: int) -> HostReservation:
        return HostReservation(size_bytes)


def driver_failed(what: str, error: OSError) -> UnderstudyError:
    """The one error for a system call on memory that failed."""
    return UnderstudyError(
        "gms.driver_failed",
        f"could not {what}: {error.strerror or error}",
        errno=errno.errorcode.get(error.errno or 0, str(error.errno)),
    )


def _reopen_read_only(fd: OwnedFd) -> OwnedFd:
    try:
        return OwnedFd(os.open(f"/proc/self/fd/{fd.fileno()}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise driver_failed("open a slab read-only", error) from error


def _reserve_at(address: int | None, size_bytes: int) -> int:
    """Take `size_bytes` of addresses without memory, over whatever is at `address`."""
    flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (MAP_FIXED if address else 0)
    return _mmap(address, size_bytes, PROT_NONE, flags, -1)


def _mmap(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if mapped is None or mapped == MAP_FAILED:
        number = ctypes.get_errno()
        raise driver_failed(f"map {size_bytes} bytes", OSError(number, os.strerror(number)))
    return int(mapped)
