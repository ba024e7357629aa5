"""One process's hold on one epoch: the flock on its file, the slabs, their mappings.

Owns the order of things: flock before the first mapping, and at the end unmap, close the slabs,
flock last. It knows neither messages nor what the bytes mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from gms.vmm.interface import Allocation, Mapping, Memory, Reservation
from understudy.errors import InvariantError
from understudy.wire.fds import OwnedFd, close_all


class Slab:
    """One slab in this process: memory, a range of addresses, and at times a mapping."""

    def __init__(self, memory: Memory, fd: OwnedFd, size_bytes: int, *, writable: bool) -> None:
        """Takes `fd`."""
        self.size_bytes = size_bytes
        self._allocation: Allocation | None
        self._mapping: Mapping | None
        self._range: Reservation
        with contextlib.ExitStack() as stack:
            self._allocation = memory.adopt(fd, size_bytes)
            stack.callback(self._allocation.release)
            self._range = memory.reserve(size_bytes)
            stack.callback(self._range.free)
            self._mapping = self._range.map(self._allocation, writable=writable)
            stack.pop_all()

    @classmethod
    def writable(cls, memory: Memory, fd: OwnedFd, size_bytes: int) -> Slab:
        """A slab that its writer fills; takes `fd`."""
        return cls(memory, fd, size_bytes, writable=True)

    @property
    def address(self) -> int:
        return self._range.address

    def fileno(self) -> int:
        """Lend the descriptor of the memory."""
        return self._memory().fileno()

    def view(self) -> memoryview:
        if self._mapping is None:
            raise InvariantError("this slab is not mapped")
        return self._mapping.view()

    def make_read_only(self) -> None:
        if self._mapping is not None:
            self._mapping.make_read_only()

    def unmap(self) -> None:
        """Unmap and release; the range of addresses stays."""
        if self._mapping is not None:
            self._mapping.unmap()
            self._mapping = None
        if self._allocation is not None:
            self._allocation.release()
            self._allocation = None

    def remap_from(self, other: Slab) -> None:
        """Map the memory of `other` at our addresses; `other` gives all that it has up."""
        allocation, other._allocation = other._memory(), None
        other.free()
        self._allocation = allocation
        self._mapping = self._range.map(allocation, writable=False)

    def free(self) -> None:
        """Give everything back, the addresses too."""
        self.unmap()
        self._range.free()

    def _memory(self) -> Allocation:
        if self._allocation is None:
            raise InvariantError("this slab's memory was released")
        return self._allocation


class Attachment:
    """The flock and the slabs of one epoch."""

    def __init__(self, memory: Memory) -> None:
        self.slabs: list[Slab] = []
        self._memory = memory
        self._flock: OwnedFd | None = None

    def hold(self, flock: OwnedFd) -> None:
        """Takes the descriptor with the shared flock."""
        self._flock = flock

    def adopt(self, fds: Sequence[OwnedFd], sizes: Sequence[int]) -> None:
        """Map read-only slabs; takes `fds`."""
        rest = list(fds)
        try:
            for size_bytes in sizes:
                self.slabs.append(Slab(self._memory, rest.pop(0), size_bytes, writable=False))
        finally:
            close_all(rest)

    def make_read_only(self) -> None:
        """Every slab read-only over itself; nobody can write through us from here on."""
        for slab in self.slabs:
            slab.make_read_only()

    def unmap(self) -> None:
        """Let go of the memory and then of the epoch, keeping the addresses."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._unlock)
            for slab in self.slabs:
                stack.callback(slab.unmap)

    def remap_from(self, fresh: Attachment) -> None:
        """Take over the memory and the flock of `fresh`, at our addresses."""
        self._flock, fresh._flock = fresh._flock, None
        for slab, other in zip(self.slabs, fresh.slabs, strict=True):
            slab.remap_from(other)
        fresh.slabs.clear()

    def close(self) -> None:
        """Give everything back; again is harmless."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._unlock)
            for slab in self.slabs:
                stack.callback(slab.free)
            self.slabs.clear()

    def _unlock(self) -> None:
        if self._flock is not None:
            self._flock.close()
            self._flock = None
