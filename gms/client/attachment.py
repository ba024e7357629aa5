"""One process's hold on one epoch: the flock on its file, the slabs, their range of addresses.

Owns the order: the flock before the first mapping; at the end unmap, release the slabs, the flock
last. If the driver fails at that, the flock stays until the process ends, because the memory may
stay mapped until then. It knows neither messages nor what the bytes mean.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

from gms.vmm.interface import Allocation, DeviceMemory, Reservation, release_all
from plumbing.errors import InvariantError
from plumbing.wire.fds import OwnedFd, close_all


class Attachment:
    """The flock, the slabs and the one range in which they lie side by side."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.slabs: list[Allocation] = []
        self._memory = memory
        self._range: Reservation | None = None
        self._flock: OwnedFd | None = None

    @property
    def range(self) -> Reservation:
        """The addresses of the epoch."""
        if self._range is None:
            raise InvariantError("this attachment has no addresses")
        return self._range

    @property
    def size_bytes(self) -> int:
        """How much is mapped."""
        return sum(slab.size_bytes for slab in self.slabs)

    def hold(self, flock: OwnedFd) -> None:
        """Takes the descriptor with the shared flock."""
        self._flock = flock

    def reserve(self, size_bytes: int) -> None:
        """Reserve addresses for `size_bytes`, if there are none yet; they cost no memory."""
        if self._range is not None:
            return
        granularity = self._memory.granularity_bytes
        # An epoch may be empty, a range of addresses may not.
        self._range = self._memory.reserve(max(1, -(-size_bytes // granularity)) * granularity)

    def adopt(self, fds: Sequence[OwnedFd], sizes: Sequence[int], *, writable: bool) -> None:
        """Map more slabs after the mapped ones; takes `fds`."""
        fresh: list[Allocation] = []
        rest = deque(fds)
        try:
            for size_bytes in sizes:
                slab = self._memory.adopt(rest.popleft(), size_bytes)
                fresh.append(slab)
            self.range.map(self.size_bytes, fresh, writable=writable)
        except BaseException:
            close_all(rest)
            release_all(fresh)
            raise
        self.slabs += fresh

    def make_read_only(self) -> None:
        """Map every slab read-only over itself; this process cannot write any more."""
        self.range.make_read_only()

    def unmap(self) -> None:
        """Release the memory and then the epoch, keeping the addresses."""
        slabs, self.slabs = self.slabs, []
        flock, self._flock = self._flock, None
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(release_all, slabs)
                if self._range is not None:
                    self._range.unmap()
        except BaseException:
            if flock is not None:
                flock.detach()
            raise
        if flock is not None:
            flock.close()

    def close(self) -> None:
        """Release everything; safe to call again."""
        with contextlib.ExitStack() as stack:
            if self._range is not None:
                stack.callback(self._range.free)
            self.unmap()
