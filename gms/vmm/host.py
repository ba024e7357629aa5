"""Host memory in place of a GPU's: memfds, mapped at fixed addresses, sealed when committed; in
huge pages where the kernel gives them.

ctypes and not `mmap.mmap`, which keeps a duplicate of each descriptor and cannot choose an address.
The surprising thing (measured): F_SEAL_WRITE is refused while any mapping lives that was made from
a writable descriptor, even one that `mprotect` made read-only. So a committing writer maps each
slab over itself from a new read-only descriptor (man 2 fcntl, File Sealing).

Most kernels give shared memory pages of 4 KiB only. A process that dies unmaps its memory page by
page, and no engine is granted the lock before: 60 to 170 ms for each GiB with pages of 4 KiB, a few
with pages of 2 MiB. Page faults ask `/sys/kernel/mm/transparent_hugepage/shmem_enabled`, which is
`never` by default. MADV_COLLAPSE (Linux 6.1) needs neither that nor a privilege. It works on every
2 MiB of a file of which at least one page is there: where it fails, one page of each is touched,
and it is tried again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable, Sequence
from typing import Any

from gms.vmm.interface import Allocation, Reservation
from plumbing.errors import UnderstudyError
from plumbing.wire.fds import OwnedFd

# man 2 mmap; the mmap module has these too, but not MAP_FIXED and MAP_NORESERVE on 3.11.
PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 0x1, 0x2, 0x10, 0x20, 0x4000
MAP_FAILED = ctypes.c_void_p(-1).value

# man 2 memfd_create and ftruncate: the kernel's errors when no memory is left.
OUT_OF_MEMORY = (errno.ENOMEM, errno.ENOSPC)

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

    def __init__(self, fd: OwnedFd, size_bytes: int) -> None:
        """Takes `fd`."""
        self.size_bytes = size_bytes
        self._fd = fd
        self._is_writable: bool | None = None  # asked of the kernel when it first matters

    @property
    def is_writable(self) -> bool:
        """Whether it is held by a descriptor that can write."""
        if self._is_writable is None:
            mode = fcntl.fcntl(self._fd.fileno(), fcntl.F_GETFL) & os.O_ACCMODE
            self._is_writable = mode == os.O_RDWR
        return self._is_writable

    def fileno(self) -> int:
        """Lend the descriptor."""
        return self._fd.fileno()

    def export(self, *, writable: bool) -> OwnedFd:
        if writable == self.is_writable:
            return self._fd.duplicate()
        assert not writable, "read-only memory cannot be exported writable"
        return _reopen_read_only(self._fd)

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
                "writer and its children must map its slabs read-only before the commit",
            ) from error
        self._keep(read_only)

    def check(self, name: str, *, is_sealed: bool = True) -> None:
        try:
            found = os.fstat(self._fd.fileno())
            seals = fcntl.fcntl(self._fd.fileno(), fcntl.F_GET_SEALS)
            # man 5 proc: `/memfd:NAME (deleted)`, the name for which it was made.
            target = os.readlink(f"/proc/self/fd/{self._fd.fileno()}")
        except OSError as error:  # EINVAL: a file that cannot have seals
            raise _bad_slab(f"it is not memory that can be sealed ({error.strerror})") from error
        if found.st_size != self.size_bytes:
            raise _bad_slab(f"it should have {self.size_bytes} bytes and has {found.st_size}")
        if is_sealed and seals & ALL_SEALS != ALL_SEALS:
            raise _bad_slab("it is not sealed, so a process could still write to it")
        if not is_sealed and (seals & ALL_SEALS != SIZE_SEALS or not self.is_writable):
            raise _bad_slab("it cannot be written, or its size could change")
        called = target.removeprefix("/memfd:").removesuffix(" (deleted)")
        if called != name:
            raise _bad_slab(f"it should be {name} and is {called}")

    def drop_write(self) -> None:
        """Hold it by a read-only descriptor from now on (for a writer that is about to commit)."""
        if self.is_writable:
            self._keep(_reopen_read_only(self._fd))

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Copy `data` there, completely."""
        try:
            while data:
                written = os.pwrite(self._fd.fileno(), data, offset_bytes)
                data, offset_bytes = data[written:], offset_bytes + written
        except OSError as error:
            raise driver_failed(f"write {len(data)} bytes of a slab", error) from error

    def release(self) -> None:
        self._fd.close()

    def _keep(self, fd: OwnedFd) -> None:
        self._fd.close()
        self._fd, self._is_writable = fd, False


class HostReservation(Reservation):
    """Addresses that nothing may touch (PROT_NONE) until something is mapped there."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        # A huge page on both sides stays closed, so that the kernel never merges the range with
        # another mapping, and an overrun is caught.
        self._reserved_bytes = size_bytes + 3 * HUGE_BYTES
        self._reserved_at = _reserve_at(None, self._reserved_bytes)
        self.address = -(-self._reserved_at // HUGE_BYTES) * HUGE_BYTES + HUGE_BYTES
        self._mapped: list[HostAllocation] = []

    def map(self, offset_bytes: int, allocations: Sequence[Allocation], *, writable: bool) -> None:
        host = [each for each in allocations if isinstance(each, HostAllocation)]
        assert len(host) == len(allocations), "host addresses take host memory only"
        size_bytes = sum(each.size_bytes for each in host)
        self.check_next(offset_bytes, size_bytes, writable=writable)
        self._place(offset_bytes, host, writable=writable)
        self._mapped += host
        self.mapped_bytes, self.is_writable = offset_bytes + size_bytes, writable

    def make_read_only(self) -> None:
        for allocation in self._mapped:
            allocation.drop_write()
        self._place(0, self._mapped, writable=False)
        self.is_writable = False

    def unmap(self) -> None:
        if self.mapped_bytes:
            _reserve_at(self.address, self.mapped_bytes)
            self._mapped, self.mapped_bytes = [], 0

    def free(self) -> None:
        if self.address:
            _libc.munmap(self._reserved_at, self._reserved_bytes)
            self.address = self.mapped_bytes = 0
            self._mapped = []

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        return bytes(self.view(offset_bytes, size_bytes))

    def write(self, offset_bytes: int, data: bytes | memoryview) -> None:
        flat = memoryview(data).cast("B")
        self.check_mapped(offset_bytes, len(flat))
        assert self.is_writable, "this range is mapped read-only"
        # Through the files, which takes two thirds of the time of the mapping, where each new page
        # is a fault, and lets other threads run.
        for allocation in self._mapped:
            part = flat[: max(0, allocation.size_bytes - offset_bytes)]
            if offset_bytes < allocation.size_bytes:
                allocation.write(offset_bytes, part)
                flat = flat[len(part) :]
            offset_bytes = max(0, offset_bytes - allocation.size_bytes)

    def clear(self) -> None:
        if self.mapped_bytes:
            ctypes.memset(self.address, 0, self.mapped_bytes)

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        self.check_mapped(offset_bytes, size_bytes)
        if not size_bytes:
            return memoryview(b"")
        # A view of the bare address: it neither copies nor keeps the mapping alive.
        buffer = (ctypes.c_ubyte * size_bytes).from_address(self.address + offset_bytes)
        view = memoryview(buffer).cast("B")
        return view if self.is_writable else view.toreadonly()

    def _place(
        self, offset_bytes: int, allocations: Sequence[HostAllocation], *, writable: bool
    ) -> None:
        protection = PROT_READ | PROT_WRITE if writable else PROT_READ
        flags = MAP_SHARED | MAP_FIXED
        start = at = self.address + offset_bytes
        try:
            for allocation in allocations:
                _mmap(at, allocation.size_bytes, protection, flags, allocation.fileno())
                prefer(at, allocation.size_bytes)
                at += allocation.size_bytes
        except UnderstudyError:
            if at > start:
                _reserve_at(start, at - start)
            raise


class HostMemory:
    """The `host` kind of memory."""

    kind = "host"
    granularity_bytes = os.sysconf("SC_PAGE_SIZE")

    def __init__(self, allocation_bytes_max: int | None = None) -> None:
        """The kernel does not limit the size of a memfd; tests and benches may."""
        self.allocation_bytes_max = allocation_bytes_max

    def create(self, size_bytes: int, name: str) -> HostAllocation:
        assert size_bytes > 0
        assert size_bytes % self.granularity_bytes == 0
        try:
            fd = OwnedFd(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        except OSError as error:
            raise _not_created(size_bytes, error) from error
        try:
            os.ftruncate(fd.fileno(), size_bytes)
            fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SIZE_SEALS)
        except OSError as error:
            fd.close()
            raise _not_created(size_bytes, error) from error
        return HostAllocation(fd, size_bytes)

    def adopt(self, fd: OwnedFd, size_bytes: int) -> HostAllocation:
        try:
            found = os.fstat(fd.fileno())
        except OSError as error:
            fd.close()
            raise driver_failed("inspect a slab", error) from error
        if not stat.S_ISREG(found.st_mode) or found.st_size != size_bytes:
            fd.close()
            raise _bad_slab(f"{size_bytes} bytes were announced and {found.st_size} came")
        return HostAllocation(fd, size_bytes)

    def reserve(self, size_bytes: int) -> HostReservation:
        return HostReservation(size_bytes)

    def facts(self) -> dict[str, Any]:
        return {}


def _bad_slab(why: str) -> UnderstudyError:
    return UnderstudyError("gms.bad_slab", f"a slab was refused: {why}")


def _not_created(size_bytes: int, error: OSError) -> UnderstudyError:
    failed = driver_failed(f"create a slab of {size_bytes} bytes", error)
    if error.errno not in OUT_OF_MEMORY:
        return failed
    return UnderstudyError("gms.device_full", failed.message, **failed.details)


def driver_failed(what: str, error: OSError) -> UnderstudyError:
    """The one error for a system call on memory that failed."""
    return UnderstudyError(
        "gms.driver_failed",
        f"could not {what}: {error.strerror or error}",
        errno=errno.errorcode.get(error.errno or 0, str(error.errno)),
        disk=False,  # although the kernel says ENOSPC of memory, too
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


# What the mapping, its place in the file and its size must be a multiple of.
HUGE_BYTES = 2 << 20
# Between two looks at whether to go on: 5 ms, or 150 ms in a virtual machine whose host has yet to
# find the memory.
STEP_BYTES = 32 * HUGE_BYTES
# How long a process uses a mapping before it is filled: a takeover takes a fraction of a second,
# and then come the requests that have waited for it. Filling new memory takes a core meanwhile.
AFTER_S = 2.0

# <asm-generic/mman-common.h>; the mmap module lacks both.
MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def prefer(address: int, size_bytes: int) -> None:
    """Let page faults take huge pages there, where the administrator leaves that to programs."""
    _advise(address, size_bytes, mmap.MADV_HUGEPAGE)


def fill(address: int, size_bytes: int, may_go_on: Callable[[], bool] = lambda: True) -> int:
    """Put memory behind a writable shared mapping now, in huge pages; its content stays.

    Returns how many bytes are in huge pages now: less than all where the kernel has no such pages
    left, or does not know the call. Then page faults do the rest, as ever.
    """
    first = -(-address // HUGE_BYTES) * HUGE_BYTES
    last = (address + size_bytes) // HUGE_BYTES * HUGE_BYTES
    done = first
    while done < last and may_go_on():
        step_bytes = min(STEP_BYTES, last - done)
        is_huge = _collapse(done, step_bytes)
        if not is_huge and not (_touch(done, step_bytes) and _collapse(done, step_bytes)):
            break
        done += step_bytes
    return max(0, done - first)


class Filling:
    """Fills a mapping on a thread, beside a process that uses it already and whose first requests
    come first."""

    def __init__(
        self,
        address: int,
        size_bytes: int,
        on_end: Callable[[int], None],
        *,
        has_room: Callable[[], bool] = lambda: True,
        after_s: float = AFTER_S,
    ) -> None:
        """On the thread, `has_room` is asked first whether this process may have all of it, and
        `on_end` is told how many bytes are in huge pages."""
        self._stopped = threading.Event()

        def run() -> None:
            may_fill = not self._stopped.wait(after_s) and has_room()
            on_end(fill(address, size_bytes, lambda: may_fill and not self._stopped.is_set()))

        self._thread = threading.Thread(target=run, name="huge-pages", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started: the faults do it all
            self._thread.start()

    def stop(self) -> None:
        """Before the memory is unmapped; waits for the step that is under way."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()


def _touch(address: int, size_bytes: int) -> bool:
    """One page of every huge page; nothing is written."""
    return all(
        _advise(at, mmap.PAGESIZE, MADV_POPULATE_WRITE)
        for at in range(address, address + size_bytes, HUGE_BYTES)
    )


def _collapse(address: int, size_bytes: int) -> bool:
    """Where there is a page of every huge page; the content stays."""
    return _advise(address, size_bytes, MADV_COLLAPSE)


def _advise(address: int, size_bytes: int, advice: int) -> bool:
    return not _libc.madvise(address, size_bytes, advice)
