"""Physical memory and ranges of addresses: one interface, implementations that behave alike.

    Allocation    physical memory      undone by `release`; frees when nobody else holds it either
    Reservation   a range of addresses undone by `free`; what is mapped in it, by `unmap`

Each undo is harmless to repeat. An epoch is one reservation in which its allocations lie side by
side, so that a tensor has one offset and may span allocations; a mapping depends on both, and an
allocation outlives it. Sizes travel with descriptors, because a descriptor does not say its size
and a wrong one fails the import. The server only creates, exports, seals, checks and releases;
only clients reserve and map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from plumbing.wire.fds import OwnedFd


class Allocation(Protocol):
    """Physical memory; `size_bytes` is a multiple of the granularity."""

    size_bytes: int

    def fileno(self) -> int:
        """Lend the descriptor by which it is held."""
        ...

    def export(self, *, writable: bool) -> OwnedFd:
        """A descriptor for another process, which the caller owns.

        Raises:
            InvariantError: writable, of memory that is sealed or was imported read-only.
        """
        ...

    def seal(self) -> None:
        """Make it read-only for everybody for ever.

        On the host success proves that nobody can write; on CUDA there is nothing to do, and
        read-only access is the clients' own rule.

        Raises:
            UnderstudyError: `gms.still_writable`, somebody has a writable mapping.
        """
        ...

    def check(self, name: str) -> None:
        """Of memory that came from another process: its size is true, nobody can write it, and it
        is what was created as `name`.

        The name is a guard against mistakes, not against forgery, and the host's only: a CUDA
        handle says nothing of which one it is.

        Raises:
            UnderstudyError: `gms.bad_slab`.
        """
        ...

    def release(self) -> None:
        """Let go of it. The last holder's release frees, which takes time: never on a loop."""
        ...


def release_all(allocations: Iterable[Allocation]) -> None:
    """Release every one, even where releasing another raises."""
    with contextlib.ExitStack() as stack:
        for allocation in allocations:
            stack.callback(allocation.release)


class Reservation(Protocol):
    """A range of addresses that stays ours whether something is mapped there or not."""

    address: int
    size_bytes: int

    def map(self, offset_bytes: int, allocations: Sequence[Allocation], *, writable: bool) -> None:
        """Map `allocations` (borrowed: they outlive the mapping) whole, side by side.

        `offset_bytes` is where what is mapped already ends: a range fills from its start, without
        holes, and is writable as a whole or not at all. All or nothing.

        Raises:
            InvariantError: they do not fit, or belong elsewhere.
            UnderstudyError: `gms.driver_failed`.
        """
        ...

    def make_read_only(self) -> None:
        """Everything mapped, in place, at the same addresses; drops every right to write."""
        ...

    def unmap(self) -> None:
        """Everything; the addresses stay."""
        ...

    def free(self) -> None:
        """Unmap what is mapped, and give the addresses back."""
        ...

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        """A copy of what is mapped there; works on device memory too."""
        ...

    def write(self, offset_bytes: int, data: bytes | memoryview) -> None:
        """Copy `data` there; works on device memory too. It is there when this returns."""
        ...

    def clear(self) -> None:
        """Zero everything that is mapped, which is writable; it is zero when this returns."""
        ...

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """What is mapped there, in place; read-only where the mapping is.

        A bare address: used after `unmap` it ends the process (SIGSEGV).

        Raises:
            UnderstudyError: `gms.not_host_memory`, this process cannot address a device's memory.
        """
        ...


class DeviceMemory(Protocol):
    """One kind of memory: `host` or `cuda`; chosen, never a silent fallback."""

    kind: str
    granularity_bytes: int
    allocation_bytes_max: int | None  # larger tensors span allocations; None: no cap

    def create(self, size_bytes: int, name: str) -> Allocation:
        """New memory, zeroed on the host.

        Raises:
            UnderstudyError: `gms.device_full`, there is not so much left; `gms.driver_failed`,
                with the driver's reason.
        """
        ...

    def adopt(self, fd: OwnedFd, size_bytes: int) -> Allocation:
        """Memory of another process; takes `fd`.

        Raises:
            UnderstudyError: `gms.bad_slab`, it is not memory of that size.
        """
        ...

    def reserve(self, size_bytes: int) -> Reservation:
        """A free range of addresses."""
        ...

    def facts(self) -> dict[str, Any]:
        """What people should know of the driver, for status; plain data."""
        ...
