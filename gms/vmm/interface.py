"""Physical memory, address ranges and mappings: one interface, implementations that behave alike.

    Allocation    physical memory      undone by `release`; frees when nobody else holds it either
    Reservation   a range of addresses undone by `free`
    Mapping       one in the other     undone by `unmap`; the range stays reserved

Each thing has exactly one undo, which is harmless to repeat. Allocations and reservations depend
on nothing, a mapping on one of each. Sizes travel with descriptors, because a descriptor does not
say its size and a wrong one fails the import. The server only creates, exports, seals and releases;
only clients reserve and map.
"""

from __future__ import annotations

from typing import Protocol

from understudy.wire.fds import OwnedFd


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
        """Make it read-only for everybody for ever; success proves that nobody can write.

        Raises:
            UnderstudyError: `gms.still_writable`, somebody has a writable mapping.
        """
        ...

    def release(self) -> None:
        """Let go of it. The last holder's release frees, which takes time: never on a loop."""
        ...


class Mapping(Protocol):
    """An allocation at an address of this process."""

    address: int
    size_bytes: int

    def view(self) -> memoryview:
        """Its bytes; read-only where the mapping is. Not to be used after `unmap`."""
        ...

    def make_read_only(self) -> None:
        """Map it read-only over itself, at the same address, and drop every right to write."""
        ...

    def unmap(self) -> None: ...


class Reservation(Protocol):
    """A range of addresses that stays ours whether something is mapped there or not."""

    address: int
    size_bytes: int

    def map(self, allocation: Allocation, *, writable: bool) -> Mapping:
        """Map `allocation` (borrowed) whole, from the start of the range."""
        ...

    def free(self) -> None:
        """Give the range back, after what is mapped there was unmapped."""
        ...


class Memory(Protocol):
    """One kind of memory: `host` or `cuda`; chosen, never a silent fallback."""

    kind: str
    granularity_bytes: int

    def create(self, size_bytes: int, name: str) -> Allocation:
        """New memory, zeroed.

        Raises:
            UnderstudyError: `gms.driver_failed`, with the driver's reason.
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
