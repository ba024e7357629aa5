"""Physical memory and ranges of addresses: one interface, implementations that behave alike.

    Allocation    physical memory      undone by `release`, which frees if it was the last holder
    Reservation   a range of addresses undone by `free`; its mappings, by `unmap`

Each undo is harmless to repeat. An epoch is one reservation in which its allocations lie side by
side, so that a tensor has one offset and may span allocations; an allocation must outlive its
mapping. Sizes travel with descriptors, which do not carry them; `check` compares.
The server only creates, exports, seals, checks and releases; only clients reserve and map.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from plumbing.wire.fds import OwnedFd, close_all


class Allocation(Protocol):
    """Physical memory; `size_bytes` is a multiple of the granularity."""

    size_bytes: int

    def fileno(self) -> int:
        """Lend the descriptor by which it is held."""

    def export(self, *, writable: bool) -> OwnedFd:
        """A descriptor for another process, which the caller owns.

        Raises:
            AssertionError: writable, of memory that is sealed or was imported read-only.
        """

    def seal(self) -> None:
        """Make it read-only for every process, permanently.

        On the host success proves that no process can write; on CUDA there is nothing to do, and
        read-only access is the clients' own rule.

        Raises:
            UnderstudyError: `gms.still_writable`, a process has a writable mapping.
        """

    def check(self, name: str, *, is_sealed: bool = True) -> None:
        """Check memory from another process: its size is right, it was created as `name`, and no
        process can write it, or (not `is_sealed`) every holder can.

        The name guards against mistakes, not against forgery, and on the host only: a CUDA handle
        does not identify itself.

        Raises:
            UnderstudyError: `gms.bad_slab`.
        """

    def release(self) -> None:
        """Release it. The last holder's release frees, which takes time: never on a loop."""


def export_all(allocations: Iterable[Allocation], *, writable: bool) -> list[OwnedFd]:
    """A descriptor of each for another process, in order, which the caller owns; all or none.

    Raises:
        UnderstudyError: `gms.driver_failed`, for example without descriptors left.
    """
    fds: list[OwnedFd] = []
    try:
        for allocation in allocations:
            fds.append(allocation.export(writable=writable))  # noqa: PERF401 - closed if one fails
    except BaseException:
        close_all(fds)
        raise
    return fds


def release_all(allocations: Iterable[Allocation]) -> None:
    """Release every one, whatever releasing any of them raises."""
    failed: BaseException | None = None
    for allocation in allocations:  # no ExitStack: there may be thousands
        try:
            allocation.release()
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed


class Reservation(abc.ABC):
    """A range of addresses that stays ours whether something is mapped there or not. It fills from
    its start, side by side, with one access."""

    address: int

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.mapped_bytes = 0
        self.is_writable = False

    @abc.abstractmethod
    def map(self, offset_bytes: int, allocations: Sequence[Allocation], *, writable: bool) -> None:
        """Map `allocations` (borrowed: they outlive the mapping) whole, side by side, all or none.

        `offset_bytes` is where the mapped part ends: a range fills from its start, without holes,
        and is writable as a whole or not at all.

        Raises:
            AssertionError: they do not fit, or are of another kind.
            UnderstudyError: `gms.driver_failed`.
        """

    @abc.abstractmethod
    def make_read_only(self) -> None:
        """Make every mapping read-only in place; drops every right to write."""

    @abc.abstractmethod
    def unmap(self) -> None:
        """Unmap everything; the addresses stay."""

    @abc.abstractmethod
    def free(self) -> None:
        """Unmap everything and release the addresses."""

    @abc.abstractmethod
    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        """A copy of what is mapped there; works on device memory too."""

    @abc.abstractmethod
    def write(self, offset_bytes: int, data: bytes | memoryview) -> None:
        """Copy `data` there, completely; works on device memory too."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Zero everything that is mapped, which must be writable."""

    @abc.abstractmethod
    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """What is mapped there, in place; read-only where the mapping is.

        A bare address: used after `unmap` it ends the process (SIGSEGV).

        Raises:
            UnderstudyError: `gms.not_host_memory`, this process cannot address a device's memory.
        """

    def check_next(self, offset_bytes: int, added_bytes: int, *, writable: bool) -> None:
        mapped_bytes = self.mapped_bytes
        fits = offset_bytes == mapped_bytes and offset_bytes + added_bytes <= self.size_bytes
        assert fits, (
            f"{added_bytes} bytes at {offset_bytes} do not follow the {mapped_bytes} mapped"
        )
        is_same = not mapped_bytes or writable == self.is_writable
        assert is_same, "a range is mapped writable as a whole or not at all"

    def check_mapped(self, offset_bytes: int, size_bytes: int) -> None:
        fits = 0 <= offset_bytes <= self.mapped_bytes - size_bytes
        assert fits, f"{size_bytes} bytes at {offset_bytes} are not mapped"


class DeviceMemory(Protocol):
    """One kind of memory: `host` or `cuda`; chosen, never a silent fallback."""

    kind: str
    granularity_bytes: int
    allocation_bytes_max: int | None  # larger tensors span allocations; None: no cap

    def create(self, size_bytes: int, name: str) -> Allocation:
        """New memory, zeroed on the host.

        Raises:
            UnderstudyError: `gms.device_full`, too little is left; `gms.driver_failed`, with the
                driver's reason.
        """

    def adopt(self, fd: OwnedFd, size_bytes: int) -> Allocation:
        """Memory of another process; takes `fd`.

        Raises:
            UnderstudyError: `gms.bad_slab`, it is not memory of this kind. Whether it has that size
                is found out here on the host, on a device by `check`.
        """

    def reserve(self, size_bytes: int) -> Reservation:
        """A free range of addresses."""

    def facts(self) -> dict[str, Any]:
        """Facts about the driver, for status; plain data."""
